"""What a forward counts and leaves around itself is as if no copy had run, and what it counts keeps
nobody from asking: each case is made anew, with classes, functions and files of its own."""

import enum
from collections import Counter, namedtuple
from types import ModuleType

import pytest
import torch
from attach_oracle import a_few_modes, need_native, refused, seeded, square  # noqa: F401
from between import Between, as_a_number, runs_alike

import torchgradx

N = 6
FILES = {
    "a number of a closure": """
def made():
    n = 0
    def gain(m):
        nonlocal n
        n += 1
        return n
    return gain
gain = made()""",
    "a decorator that counts": """
import functools
def counted(f):
    calls = 0
    @functools.wraps(f)
    def inner(m):
        nonlocal calls
        calls += 1
        return f(m) + calls
    return inner
@counted
def gain(m):
    return 0""",
    "a global": """
calls = 0
def gain(m):
    global calls
    calls += 1
    return calls""",
    "a global by its name": """
calls = 0
def gain(m):
    globals()["calls"] += 1
    return calls""",
    "a tuple of its class": """
def gain(m):
    type(m).seen = (*type(m).seen, 1)
    return len(m.seen)""",
    "what its class had not": """
def gain(m):
    type(m).new = getattr(m, "new", 0) + 1
    return m.new""",
    "a tensor of its class": """
def gain(m):
    type(m).total = type(m).total + 1
    return float(m.total)""",
    "dicts in a dict": """
told = {"of": {"calls": 0}}
def gain(m):
    told["of"]["calls"] += 1
    return told["of"]["calls"]""",
    "the order of a dict": """
told = dict.fromkeys("abc", 1.0) | {"c": 2.0}
def gain(m):
    first = next(iter(told))
    told[first] = told.pop(first)
    return told[first] + 0.1 * "abc".index(first)""",
    "a default that is replaced": """
def counts(seen=()):
    counts.__defaults__ = ((*seen, 1),)
    return 1 + len(seen)
def gain(m):
    return counts()""",
    "a metaclass": """
class Meta(type):
    calls = 0
class Told(metaclass=Meta):
    pass
def gain(m):
    Meta.calls += 1
    return Told.calls""",
    "a member of an enumeration": """
def gain(m):
    m.colour.calls = getattr(m.colour, "calls", 0) + 1
    return m.colour.calls""",
    "a list of a list's own": """
def gain(m):
    m.numbers.seen.append(1)
    return len(m.numbers.seen)""",
    "lists in slots": """
def gain(m):
    m.slotted.seen.append(1)
    return len(m.slotted.seen)""",
    "another file's counter": """
def gain(m):
    other.bag["calls"] += 1
    return other.bag["calls"]""",
    "another file's iterator": """
def gain(m):
    return next(other.ids)""",
}


NEVER = ("lists in slots", "another file's iterator")  # of which no copy is made


class Numbers(list):
    def __init__(self):
        self.seen = []


class Slotted:
    __slots__ = ("__dict__", "seen")

    def __init__(self):
        self.seen, self.width = [], 2


def made(source, before=as_a_number):
    """A model in a file of its own."""
    file, other = ModuleType("a_file"), ModuleType("another")
    other.bag, other.ids = Counter(calls=0), iter(range(1, 1000))
    file.other, file.leave = other, lambda m, y: None
    exec(source, vars(file))

    class Asks(Between):
        seen, total = (), torch.zeros(())

        def forward(self, x):
            y = super().forward(x)
            file.leave(self, y)
            return y * file.gain(self)

    model = Asks(before=before).double()
    model.numbers = Numbers()
    if "slotted" in source:
        model.slotted = Slotted()
    model.colour = enum.Enum("Colour", ["RED"]).RED
    model.file = file.gain  # whose globals are the file
    return model


@a_few_modes
@pytest.mark.parametrize("name", FILES)
def test_a_run_is_the_same(name, options):
    need_native(options)
    assert runs_alike(lambda: made(FILES[name]), options, N)


@a_few_modes
@pytest.mark.parametrize("name", [name for name in FILES if name not in NEVER])
def test_what_it_counts_keeps_nobody_from_asking(name, options):
    need_native(options)
    model = made(FILES[name])
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 4).double()).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"a\.weight: .* mixes"):
            probe.norms()


LEFT = {
    "a file's dict": ("told = {}", "told['loss'] = y", "told['loss']"),
    "a file's dict, of a number before": ("told = {'loss': 0}", "told['loss'] = y.sum()",
                                          "told['loss']"),
    "its class": ("", "type(m).loss = y.square().mean()", "m.loss"),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", LEFT)
def test_what_a_forward_leaves_for_the_loss_is_its_own(name, options):
    need_native(options)
    first, left, read = LEFT[name]
    source = f"{first}\ndef gain(m):\n    return 1.0\ndef leave(m, y):\n    {left}\n"
    source += f"def loss(m):\n    return {read}.square().mean()"
    grads = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = made(source)
        probe = torchgradx.attach(model, **options) if attached else None
        x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1)).double()
        loss = square(model, x) + 0.5 * model.file.__globals__["loss"](model)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
        if probe:
            probe.remove()
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


Out = namedtuple("Out", ["logits"])


@a_few_modes
def test_a_named_tuple_keeps_nobody_from_asking(options):
    class Named(Between):
        def forward(self, x):
            return Out(super().forward(x))

    model = Named(before=as_a_number)
    refused(model, lambda m, x: square(lambda y: m(y).logits, x), torch.randn(N, 4),
            names=["a.weight"], match="mixes", **options)  # fmt: skip
