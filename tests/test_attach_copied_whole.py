"""A copy is asked only where nothing that it reaches is shared: what a forward draws, counts and
keeps, wherever that is, is as if nobody had asked."""

import functools
import gc
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from attach_oracle import a_few_modes, need_native, refused, seeded, square  # noqa: F401
from between import Between, as_a_number, runs_alike
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import torchgradx

N = 6
DRAWS, NUMPY = torch.Generator(), np.random.default_rng(0)
COUNT = 0


class Kept(tuple):
    __slots__ = ()


class Told:
    calls = 0


# One that no file names, a module, and a class of another one.
TOLD = type("Unnamed", (), {"calls": 0, "seen": []})
IMPORTED = type("Imported", (), {"calls": 0, "seen": [], "__module__": "elsewhere"})
ELSEWHERE = ModuleType("elsewhere")
ELSEWHERE.calls, ELSEWHERE.seen = 0, []


class Asks(Between):
    """Does what cannot be followed, so that copies are asked where there can be any."""

    def __init__(self):
        super().__init__(before=as_a_number)
        self.kept = Kept(([],))

    def gain(self):
        return 1.0

    def forward(self, x):
        return super().forward(x) * self.gain()


class ByTheFile(Asks):
    def gain(self):
        return torch.rand((), generator=DRAWS)


class ByNumPy(Asks):
    def gain(self):
        return float(NUMPY.random())


class ByTheClass(Asks):
    draws = torch.Generator()

    def gain(self):
        return torch.rand((), generator=self.draws)


class ByWhatItHidesInTheClass(Asks):
    _seen: ClassVar[list] = []

    def gain(self):
        self._seen.append(1)
        return len(self._seen)


SEEN = {"calls": 0}


class ByADictOfTheFile(Asks):
    def gain(self):
        SEEN["calls"] += 1
        return SEEN["calls"]


class ByAnObjectOfTheClass(Asks):
    told = Told()

    def gain(self):
        self.told.calls += 1
        return self.told.calls


class ByAnotherClass(Asks):
    def gain(self):
        Told.calls += 1
        return Told.calls


class ByAClassThatItHolds(Asks):
    def __init__(self):
        super().__init__()
        self.counts = TOLD

    def gain(self):
        self.counts.calls += 1
        self.counts.seen.append(1)
        return self.counts.calls + len(self.counts.seen)


class ByAClassOfItsClass(ByAClassThatItHolds):
    counts = TOLD

    def __init__(self):
        Asks.__init__(self)


class ByAClassInAList(Asks):
    def __init__(self):
        super().__init__()
        self.counts = [TOLD]

    def gain(self):
        self.counts[0].calls += 1
        return self.counts[0].calls


class ByTheClassOfAnObject(Asks):
    def __init__(self):
        super().__init__()
        self.told = TOLD()
        self.told.width = 2

    def gain(self):
        type(self.told).calls += 1
        return self.told.calls


class ByAClassOfADefault(Asks):
    def gain(self, counts=TOLD):
        counts.calls += 1
        return counts.calls


class ByAModule(Asks):
    def gain(self):
        ELSEWHERE.calls += 1
        ELSEWHERE.seen.append(1)
        return ELSEWHERE.calls + len(ELSEWHERE.seen)


class ByAModuleThatItHolds(ByAClassThatItHolds):
    def __init__(self):
        Asks.__init__(self)
        self.counts = ELSEWHERE


class ByAClassOfAnotherFile(Asks):
    def gain(self):
        IMPORTED.calls += 1
        return IMPORTED.calls


class ByItsOwnClass(Asks):
    calls = 0

    def gain(self):
        type(self).calls += 1
        return self.calls


class ByAGlobal(Asks):
    def gain(self):
        global COUNT
        COUNT += 1
        return COUNT


class ByATuple(Asks):
    def gain(self):
        self.kept[0].append(1)
        return len(self.kept[0])


class ByAFunction(Asks):
    def gain(self):
        ByAFunction.gain.calls += 1
        return ByAFunction.gain.calls


class ByAFunctionsList(Asks):
    def gain(self):
        ByAFunctionsList.gain.told.append(Told())
        return len(ByAFunctionsList.gain.told)


class ByADefault(Asks):
    def gain(self, seen=[]):  # noqa: B006
        seen.append(1)
        return len(seen)


KINDS = [ByTheFile, ByNumPy, ByTheClass, ByWhatItHidesInTheClass, ByADictOfTheFile,
         ByAnObjectOfTheClass, ByAnotherClass, ByAClassThatItHolds, ByAClassOfItsClass,
         ByAClassInAList, ByTheClassOfAnObject, ByAClassOfADefault, ByAModule,
         ByAModuleThatItHolds, ByAClassOfAnotherFile, ByItsOwnClass, ByAGlobal, ByATuple,
         ByAFunction, ByAFunctionsList, ByADefault]  # fmt: skip


def put_back():
    global NUMPY, COUNT
    NUMPY, COUNT, Told.calls, ByItsOwnClass.calls = np.random.default_rng(0), 0, 0, 0
    DRAWS.manual_seed(0), ByTheClass.draws.manual_seed(0)
    ByAFunction.gain.calls, ByAFunctionsList.gain.told = 0, [Told()]
    ByWhatItHidesInTheClass._seen.clear(), ByADefault.gain.__defaults__[0].clear()
    ByAnObjectOfTheClass.told, SEEN["calls"] = Told(), 0
    for holder in (TOLD, ELSEWHERE, IMPORTED):
        holder.calls = 0
        holder.seen.clear()


@a_few_modes
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same(kind, options):
    need_native(options)

    def make():
        put_back()
        return kind().double()

    assert runs_alike(make, options, N)


WIDTH = {"of": 2.0}


class Configured(Asks):
    powers: ClassVar[list] = [1, 2]
    kinds: ClassVar[dict] = {"act": nn.ReLU, "told": Told}

    def gain(self):
        return WIDTH["of"] ** self.powers[1]


@a_few_modes
def test_what_a_file_and_a_class_say_keeps_nobody_from_asking(options):
    refused(Configured(), square, torch.randn(N, 4), names=["a.weight"], match="mixes", **options)


@a_few_modes
def test_global_hooks_hear_the_model_alone(options):
    need_native(options)
    model, heard = Asks().double(), []
    handle = register_module_forward_hook(lambda module, *_: heard.append(module))
    with torchgradx.attach(model, **options):
        square(model, torch.randn(N, 4).double())
    handle.remove()
    assert heard == [model.a, model.b, model]


class Closes(Asks):
    closed = 0

    def __del__(self):
        Closes.closed += 1


@a_few_modes
def test_no_copy_closes_what_the_model_has(options):
    need_native(options)
    model, Closes.closed = Closes().double(), 0
    with torchgradx.attach(model, **options):
        square(model, torch.randn(N, 4).double())
    gc.collect()
    assert Closes.closed == 0


class Cached(Asks):
    @functools.lru_cache  # noqa: B019
    def gain(self):
        return 2.0


@a_few_modes
def test_no_copy_is_kept(options):
    need_native(options)
    Cached.gain.cache_clear()
    gc.collect()
    for kind in (Asks, Cached):
        model = kind().double()
        with torchgradx.attach(model, **options):
            square(model, torch.randn(N, 4).double())
        gc.collect()
        assert sum(type(thing) is kind for thing in gc.get_objects()) == 1


@a_few_modes
def test_autocast_keeps_no_weights_of_copies(options):
    need_native(options)
    wide, x = 256, torch.randn(N, 256)
    held = []
    for attached in (False, True):
        model = nn.Sequential(*(nn.Linear(wide, wide, bias=False) for _ in range(4)), Last())
        probe = torchgradx.attach(model, **options) if attached else None
        with torch.autocast("cpu", torch.bfloat16):
            with torch.profiler.profile(profile_memory=True) as profile:
                out = model(x)
            held.append(sum(e.self_cpu_memory_usage for e in profile.events()))
        del out
        if probe:
            probe.remove()
    assert held[1] - held[0] < 4 * wide * wide * 2  # bytes: one copy's


class Last(nn.Module):
    def forward(self, x):
        return x + int((x > 100).sum())
