"""Recorder and Pass in plain Python, for an installation without the compiled extension.

Names and meanings are those of csrc/record/pass.h. One thing is missing: the balance of graph
edges, which Python cannot see in backward. So every pass is compared with what the parameters
receive, not only the first of a structure. A `place` is a parameter's index in the table.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..hooks.engine import put_gate, will_execute
from ..kept import Versions

KeptTerm = tuple[int, Tensor | None, Tensor, Any]  # (site or -1, activations, grads, segments)
Slot = tuple[int, Tensor]  # a parameter's place, and the tensor that is there now


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Pass | None, int]] = []  # forwards, with the number of the next node
        self.asking = False


class Recorder:
    """What all passes of one probe share."""

    def __init__(self, parameters: int, *callbacks: Any) -> None:
        """callbacks: began, finish, drained, site_called, received, called_directly; the third and
        fourth are not needed here."""
        self.began, self.finish, _, _, self.received, self._called_directly = callbacks
        self.keeps_tape = self.shields = False
        self.balance = [0] * parameters
        self._refusals: dict[int, list[tuple[int, str]]] = {}  # by task; -1: outside of backwards
        self.auditing = False
        self.held = 0  # nothing is saved through hooks here
        self._audited: list[int] = []  # the latest tasks that reached a pass
        self.alive: Any = []  # weak references to passes
        # By task and place: the recorded sum, and how large its terms were.
        self._recorded: dict[tuple[int, int], tuple[Tensor, float]] = {}
        self._local = _OfThread()

    @property
    def asking(self) -> bool:
        """Return True while this thread asks a node for its products, which records nothing."""
        return self._local.asking

    @asking.setter
    def asking(self, on: bool) -> None:
        self._local.asking = on

    def enlist(self, run: Pass) -> None:
        """Let a checkpoint's recomputation find a pass."""
        self.alive = [*(ref for ref in self.alive if ref() is not None), weakref.ref(run)]

    def push(self, run: Pass | None) -> None:
        """Record this thread's forwards in a pass until pop(); None: record nothing."""
        if run is not None:
            self.enlist(run)
        self._local.stack.append((run, torch.autograd._get_sequence_nr()))

    def pop(self) -> None:
        run, first = self._local.stack.pop()
        if run is not None:
            run.seen.clear()
            run.made.append(range(first, torch.autograd._get_sequence_nr()))

    def _original(self) -> Pass | None:
        """Return the pass whose forward made the node that runs now, or None."""
        node = self.running_node()
        if node is None:
            return None
        number = node[1]  # as if there were one thread
        runs = (ref() for ref in reversed(self.alive))
        return next((run for run in runs if run and any(number in m for m in run.made)), None)

    @staticmethod
    def next_node() -> tuple[int, int]:
        """Return (thread, number of its next node), as if there were one thread."""
        return 0, torch.autograd._get_sequence_nr()

    @staticmethod
    def running_node() -> tuple[int, int] | None:
        """Return (thread, number) of the node that a backward runs on this thread, or None."""
        node = torch._C._current_autograd_node()
        return None if node is None else (0, node._sequence_nr())

    @property
    def sound(self) -> bool:
        return not (self.refusals or any(self.balance))

    def depth(self) -> int:
        return len(self._local.stack)

    def current(self) -> Pass | None:
        """Return the pass that a call on this thread belongs to; in a backward, where a checkpoint
        runs it again, that of its forward."""
        if self._local.stack:
            return self._local.stack[-1][0]
        if torch._C._current_graph_task_id() == -1:
            return self._called_directly() if torch.is_grad_enabled() else None
        return self._original()

    def audited(self, task: int) -> bool:
        return task in self._audited

    def add_audited(self, task: int) -> None:
        if task not in self._audited:
            # Those that are open stay: more may run inside of one.
            former = [each for each in self._audited[:-63] if each in self._refusals]
            self._audited = [*former, *self._audited[-63:], task]

    def refuse(self, site: int, reason: str) -> None:
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._refusals:
            self.began(None)
        self._refusals.setdefault(task, []).append((site, reason))

    @property
    def refusals(self) -> list[tuple[int, str]]:
        return list(dict.fromkeys(refusal for each in self._refusals.values() for refusal in each))

    def open(self, task: int) -> None:
        self._refusals.setdefault(task, [])

    def merge(self, tasks: Sequence[int]) -> None:
        for task in tasks:
            self._refusals.setdefault(-1, []).extend(self._refusals[task])
        self.drop(tasks)

    def drop(self, tasks: Sequence[int]) -> None:
        for task in tasks:
            self._refusals.pop(task, None)
        for key in [key for key in list(self._recorded) if key[0] in tasks]:
            self._recorded.pop(key, None)

    def clear(self) -> None:
        self._refusals.pop(-1, None)

    def add_recorded(self, parameter: int, gradient: Tensor, magnitude: float) -> None:
        """Add to the sum that a parameter must receive in the current backward."""
        task = torch._C._current_graph_task_id()
        before, size = self.take_recorded(task, parameter)
        # A copy, since others may write into a gradient.
        total = gradient.flatten().clone() if before is None else before + gradient.flatten()
        self._recorded[task, parameter] = total, size + magnitude

    def untaken(self, tasks: Sequence[int]) -> list[tuple[int, int]]:
        """Return (task, place) of recorded sums that were not compared, and are not zero."""
        return [key for key, (total, _) in list(self._recorded.items())
                if key[0] in tasks and bool(total.any())]  # fmt: skip

    def take_recorded(self, task: int, parameter: int) -> tuple[Tensor | None, float]:
        return self._recorded.pop((task, parameter), (None, 0.0))


class Pass:
    """One training forward: what it leaves behind, and what its backward adds."""

    def __init__(self, recorder: Recorder, n: int, parameters: Sequence[Tensor]) -> None:
        self.recorder, self.n = recorder, n
        self.recorded = self.keep = self.retained = self.called_directly = False
        self.in_graph = False  # never without the extension
        self.create_graph = self.silent = False
        self.count = 0
        self._task = -1  # the latest backward that reached it
        self.structure: Any = (n > 1, *(p.requires_grad for p in parameters))
        self.trainable = [place for place, p in enumerate(parameters) if p.requires_grad]
        self.wide = any(parameters[place].dtype == torch.float64 for place in self.trainable)
        self.layouts: list[int] = []  # by use
        self.segments: list[Any] = []  # the layout SEGMENTS + k is for segments[k]
        self.directions: list[Tensor | None] = []
        self.hooked: list[int] = []
        self.serial = 0
        self.made: list[range] = []  # numbers of the nodes that its forwards made
        self.refusals: list[tuple[int, str]] = []
        self.seen: list[tuple[int, list[int], Any, int]] = []  # see uses(); while a forward runs
        self._calls = [0] * len(parameters)  # uses by place
        self._owners: list[Any] = [None] * len(parameters)  # by place: the node that accumulates
        for place, tensor in enumerate(parameters):
            self._track(place, tensor)
        self.clear()

    def clear(self) -> None:
        self.recorded = self.create_graph = False
        self._sq_norms: dict[int, Tensor] = {}
        self._terms: dict[int, list[tuple[KeptTerm, Versions]]] = {}
        self._late: set[int] = set()
        self.dots: Tensor | None = None
        self._tape: tuple[Any, ...] = ()

    def state(self) -> Any:
        """Return a copy of what backwards have added, for restore()."""
        terms = {place: list(those) for place, those in self._terms.items()}
        flags = self.create_graph, self.retained
        return dict(self._sq_norms), terms, set(self._late), self.dots, self._tape, flags

    def restore(self, state: Any) -> None:
        self._sq_norms, self._terms, self._late, self.dots, self._tape, flags = state
        self.create_graph, self.retained = flags

    def forget(self) -> None:
        """Drop what the only backward that reached this pass has added: it failed."""
        self.clear()
        self.create_graph = self.retained = False

    def _track(self, place: int, tensor: Tensor) -> bool:
        """Note the tensor at a place. Return False if it is another parameter's."""
        if not (tensor.requires_grad and tensor.is_leaf):
            return True
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        is_anothers = node is not self._owners[place] and node in self._owners
        self._owners[place] = node
        put_gate(self.recorder, place, node, tensor)
        return not is_anothers

    def _needed(self, place: int) -> bool:
        """Return True if this backward computes a parameter's gradient."""
        node = self._owners[place]
        return node is None or will_execute(node)

    def call(self, site: int, slots: Sequence[Slot], sizes: Sequence[int], inputs: Any = ()) -> int:
        """Note a use of these parameters. Return its number, or -1 in a recomputation."""
        if self.called_directly:
            self.refuse(site, "outside")
            return -1
        for place, tensor in slots:
            if not self._track(place, tensor):
                self.refuse(site, "anothers")
        if torch._C._current_graph_task_id() != -1 and not self.recorder.depth():
            return -1
        for place, _ in slots:
            self._calls[place] += 1
        self.silent |= not torch.is_grad_enabled()
        self.structure += ((site, *sizes, *(t.shape for t in inputs)),)
        self.count += 1
        self.seen.append((site, list(sizes), None, 0))
        return self.count - 1

    def expect(self, place: int, tensor: Tensor) -> None:
        """Expect one more use of a parameter, outside the calls of modules."""
        self._track(place, tensor)
        self._calls[place] += 1

    def note(self, fact: int) -> None:
        """Add a fact that the structure depends on."""
        self.structure += (fact,)

    def watch(self, use: int, output: Tensor) -> None:
        """Note the node that made a use's output."""
        if use >= 0 and output.grad_fn is not None:
            place = use - self.count + len(self.seen)
            self.seen[place] = (*self.seen[place][:2], output.grad_fn, output.output_nr)

    def uses(self) -> list[tuple[int, list[int], Any, int]]:
        """Return (site, sizes, node of the output or None, output of the node) for each use."""
        return list(self.seen)

    def refuse(self, site: int, reason: str) -> None:
        self.refusals.append((site, reason))

    def enclose(self, places: Sequence[int], first: int) -> None:
        """Do nothing: no edges are counted here."""

    def arrive(self, places: Sequence[int], enclosed: bool = False) -> bool:
        """Note that a use's gradient has arrived. Return False if there is nothing to record: this
        backward computes none of the parameters' gradients (autograd.grad of a proof, say)."""
        if self.recorder.asking or not any(map(self._needed, places)):
            return False
        task = torch._C._current_graph_task_id()
        if task != self._task or not self.recorded:
            self.recorder.began(self)
            self._task = task
            if not self.called_directly:
                self.recorder.add_audited(task)
        if self.called_directly:
            return False
        if not all(self._needed(place) for place in places):
            self.recorder.refuse(-1, "some_inputs")
        self.create_graph |= torch.is_grad_enabled()
        self.retained |= torch._C._autograd._get_current_graph_task_keep_graph()
        return True

    def waits(self, place: int) -> bool:
        """Return True if a use's operands must be kept, since more gradients may follow."""
        return self.keep or self.retained or self._calls[place] != 1 or place in self._terms

    def add(self, place: int, grads: Tensor, activations: Tensor | None = None) -> None:
        """Add gradients [N, *], or their factors: grads [N, T, O] and activations [N, T, I]."""
        if place in self._sq_norms:
            self._late.add(place)
            return
        if self.n == 1:  # the same memory may become the .grad of a tensor that is expanded over N
            grads = grads.clone()
        versions = Versions(t for t in (activations, grads) if t is not None)
        term = -1, None if activations is None else activations.detach(), grads.detach(), None
        self._terms.setdefault(place, []).append((term, versions))
        if not (self.keep or self.retained or len(self._terms[place]) < self._calls[place]):
            self.recorder.finish(self, place)

    def finish(self, place: int, sq_norms: Tensor, parts: int = 1) -> None:
        """Set the squared norms [N] of a parameter, and drop its operands. parts: always 1."""
        if place in self._sq_norms:
            self._late.add(place)
        self._sq_norms[place] = sq_norms
        self._terms.pop(place, None)

    def add_dots(self, dots: Tensor) -> None:
        self.dots = dots.double() + (0 if self.dots is None else self.dots)

    def keep_on_tape(self, use: Any) -> None:
        self._tape += (use,)

    def take_tape(self) -> tuple[Any, ...]:
        tape, self._tape = self._tape, ()
        return tape

    def total(self, places: Sequence[int] | None = None) -> Tensor:
        """Return [N] float64: the final squared norms of some parameters, or of all, summed."""
        total = torch.zeros(self.n, dtype=torch.float64, device="cpu")
        for place in list(self._sq_norms) if places is None else places:  # threads may add more
            if place in self._sq_norms:
                total += self._sq_norms[place].cpu()
        return total

    def waiting(self) -> list[int]:
        return list(self._terms)

    @property
    def sound(self) -> bool:
        return not (self.create_graph or self.late() or self.changed())

    def late(self) -> list[int]:
        """Return parameters of which a use arrived after their norms were final."""
        return list(self._late)

    def changed(self) -> list[int]:
        """Return parameters with operands that were written into."""
        items = list(self._terms.items())
        return [place for place, terms in items if not all(v.intact for _, v in terms)]

    def terms(self, place: int) -> list[KeptTerm]:
        return [term for term, _ in self._terms.get(place, [])]
