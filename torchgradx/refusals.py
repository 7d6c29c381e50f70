"""Every refusal: what happened, and what to do, once.

Here is each cause of a CoverageError, by its key. A recorder keeps `cause(key, ...)`, a string of
the key and its fields; C++ writes the same (csrc/operators/text.h). `refused` makes the error: each
cause once, with the parameters that it covers. The first words of each text are unique, so that a
search finds them; docs/errors.md lists them. Wrong arguments raise where they are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .errors import CoverageError

# == section, key: text, > remedy; {fields} are filled in
TABLE = """
== Nothing is recorded
removed: the probe was removed before a backward, so nothing is recorded
    > Attach again, and call remove() after reading
frozen: no parameter of the model requires a gradient, so nothing is recorded
    > Call requires_grad_() on what is to be trained
backward_failed: the backward of the recorded forward raised an exception, so nothing is recorded
    > Run forward and backward again
no_backward: no backward has reached the recorded forward, so nothing is recorded
    > Call loss.backward() on a loss of its outputs, then read. torch.autograd.grad does not count
called_directly: only model.forward or submodules were called, so nothing is recorded
    > Call the model itself with grad enabled: model(x). Where other methods are called
    (model.encode), attach to a module whose forward calls them
paused: the model was called inside paused() or score() only, so nothing is recorded
    > Call it outside of them
no_grad: the model was called under no_grad or inference_mode only, so nothing is recorded
    > Call it with grad enabled, then loss.backward()
traced: the model was called by torch.func or a tracer only, so nothing is recorded
    > Call it in a plain training step
reset: the record was emptied by reset(), and no backward came since, so nothing is recorded
    > Read before reset(), or run another forward and backward
not_called: the attached model was not called since attach, so nothing is recorded
    > Call this object, not a copy of it or a module inside it: model(x), loss.backward(), norms()
under_way: a backward is still under way in another thread
    > Read when it has ended

== Samples are mixed
batch_statistics: it normalises by the batch's statistics, which mix samples
    > Call eval() on it, or use GroupNorm
mixes: its rows mix the {n} samples: each row of its output {shape} depends on several of them, so
    it has no per-sample gradient
    > If its input is the same for all samples (position ids), register it as a buffer or build it
    in forward with torch.arange, not torch.tensor([...]). Rows of samples must be in the order
    n*T+t or t*N+n: for others (sorted, a part of the batch, padding removed) pass sample_ids=
unbatched: it was called without a batch dimension, so it works along the {n} samples
    > Give it three dimensions
scale_grad_by_freq: scale_grad_by_freq divides by how often an id is in the batch
    > Leave that option out
alone: sample {sample} alone has a gradient norm of {alone} where it had {batched} in its batch: the
    model sorts or mixes samples in a part without gradient (statistics of data, a queue, a mask)
    > Sort and normalise before the model is called, or set it to eval(). If a batch cannot be cut
    by sample (flat ids with offsets), or the forward moves buffers on, pass check="graph"
output_alone: sample {sample} alone has another output than in its batch: the model sorts or mixes
    samples in a part without gradient (statistics of data, a queue, a detached or frozen part)
    > Sort and normalise before the model is called, or set it to eval(). If a batch cannot be cut
    by sample (flat ids with offsets), or the forward moves buffers on, pass check="graph"
failed_alone: the model could not be run on sample {sample} alone: {error}
    > Give a batch that can be split by sample, or pass check="graph"
one_number: its module gives one number for all samples, and running it again cannot split that
    > Return a loss for each sample, expand the number to [N], or freeze what it does not use

== Where the samples are
no_batch_size: the model was called without a tensor that shows N, the number of samples
    > Pass batch_size= to attach
one_row: the first tensor has one row, and others have more
    > Pass batch_size= to attach, or give the tensor with the samples first
not_found: the {n} samples of the pass cannot be found in its output of shape {shape}
    > If these are not the batch's samples, pass batch_size= or batch_dim=; if its rows hold them in
    another order, pass layout=
unproven: no proof was found of where the {n} samples are in its output of shape {shape}
    > Pass layout={{"{name}": "batch"}} or "sequence" to attach ("*" in place of the name: for all).
    If the batch has another number of samples (a list of images), pass batch_size= instead
either: the model's outputs have two dimensions or more of size {n}, the number of samples
    > Pass layout={{"*": "batch"}} to attach if they come first, or batch_dim=1, batch_size=
batch_first: the {n} samples are not where its batch_first says, in its output of shape {shape}
    > Set batch_first, or transpose its input
different_outputs: its outputs have the samples in different dimensions, or may have
    > Put them in the same dimension of each output, or return each from a module of its own
attention_rows: its batch of {rows} has several rows of each of the {n} samples
    > Only layout "batch" has them one after another: pass that
not_examined: where its samples are could not be looked for: {error}
    > Pass layout= to attach
nested: it was given a nested tensor, whose rows have no common size
    > Pad it, or use pack_padded_sequence
segments_outputs: no output of the model has N rows, or those of sample_ids, in front
    > Return what the loss is computed from, with one row for each sample or for each id
segments_unknown: nothing shows which samples the rows of its output {shape} are of
    > Index rows in the first dimension, in a part of the model that comes to its outputs
segments_mixed: rows of its output {shape} are fed by several samples of sample_ids
    > Let no edge, and no attention without a mask, join two samples
segments_kind: a {kind} is not served by rows of sample_ids
    > Give it padded samples [N, ...] in a model without sample_ids, or freeze it
segments_unproven: no weighted backward can run, which would prove whose its rows are
    > Leave reentrant checkpoints and Functions of your own out. If a part is compiled (as flex
    attention is), set torch._functorch.config.donated_buffer = False before the first forward.
    Or pass check="off"
packed: it was given a packed sequence, and does not return one of {n} samples first
    > Pass padded sequences, or use a stock LSTM, GRU or RNN with fused=True

== What was not recorded
outside: its module was called outside of the model's own forward
    > Call the model itself, or attach to a module whose forward makes these calls (encode, decode);
    or put probe.paused() around the call
beyond: it is used in {places} place(s) that were not recorded: a weight penalty in the loss, a use
    outside model(...), or outside of modules in a checkpoint
    > Call backward() on the penalty separately, or use the optimizer's weight_decay; call the
    module instead, with use_reentrant=False in a checkpoint; for derivatives by the input, also
    return what they are taken of; or freeze it
without_edge: {places} recorded use(s) of it have no place in the graph that backward() ran
    > Change no view of its output in place, and run the whole backward
not_the_sum: the gradient it received is not the sum of what was recorded: a penalty reaches it, its
    module mixes samples, or a reentrant checkpoint uses it outside of modules
    > Call backward() on penalties separately, and pass use_reentrant=False
no_output: it received a gradient that does not come from the model's outputs of N samples: from a
    tensor kept in an attribute, captured by a hook, or of another size?
    > Return that tensor from forward as well, with a dimension of the samples, or pass layout=
after_zeros: it received zeros from the model's outputs, and now a gradient that is not from them
    > Return the tensor that it comes from, from forward as well
computed: a tensor computed from others stood in its place, for example by functional_call
    > Pass a leaf (detached) parameter, or use torch.nn.utils.parametrize
anothers: it computed with a parameter that is another module's
    > Tie the two: module.weight = other.weight
model_changed: the model's modules, ties or options changed since attach
    > Call attach again
some_inputs: backward(inputs=...) computed the gradients of some parameters only
    > Call backward() without inputs=
create_graph: its gradient was computed under create_graph=True, and may change again
    > Take derivatives by the input inside the model's forward, or backward without it
overwritten: its module's input or gradient was written into before the norms were read
    > Read the norms first, or write into another tensor
late: a use of it arrived after its norm was final
    > Call reset() in between
run_twice: a reentrant checkpoint around the model ran one forward again for several backwards
    > Pass use_reentrant=False, or add the losses before backward()
several_backwards: its outputs came back in several backwards
    > Add their losses, or pass retain_graph=True to all backwards but the last
inner_failed: a backward inside of its backward failed
    > Run forward and backward again
two_sizes: same_samples() was given forwards of {one} and of {other} samples
    > Use the same samples in all of them
forgotten: more than {many} no_grad calls lie between a reentrant checkpoint and its backward
    > Call backward() earlier, or pass use_reentrant=False
one_context: a checkpoint's context serves one backward, as one made by @contextmanager, and the
    proof of the first pass runs more
    > Return contexts of a class from context_fn, or pass check="off"

== Modules that run again, kernels
failed: its gradients by sample failed: {error}
    > Freeze it, or compute that part without parameters of its own
other_outputs: run again in backward, it gives other outputs than its forward
    > Keep its switches and states until backward() has ended, and draw torch's random numbers
overwrites: it writes into its arguments, so it cannot run again in backward
    > Write x = x + y in place of x += y
not_its_sum: the gradient that a node above it received is not the sum of its gradients by sample: a
    hook, or a use that the model's outputs do not show, changed it
    > Remove the hook, or return that tensor from forward as well
otherwise: what no sample enters is used otherwise than when it was proven
    > Attach again, or call it in the same order in each forward
node_twice: its gradients by sample need {node} twice, which saves tensors through hooks
    > Leave the saved-tensor hooks out around it
sharded_apart: modules that it calls are sharded separately
    > Move its own parameters into a module of their own
complex: it has complex parameters, which have no kernel and no fallback
    > Hold them as real ones and call torch.view_as_complex in the forward, or freeze them
tangents: it was given tangents of forward-mode differentiation
    > Put probe.paused() around that forward
no_kernel: backend="native" has no kernel for this module, or for how it was called
    > Pass backend="auto", which serves it through vmap
algorithm: the algorithm= of attach cannot serve it: {error}
    > Leave algorithm= out of attach

== Compilers and processes
graph_break: torchgradx records this model outside of graphs (see docs/limits.md)
    > Compile it without fullgraph=True
tables_in_graph: a table that all samples share is not followed inside a full graph
    > Compile it without fullgraph=True, or look it up for each sample: positions.expand(N, -1)
other_layers: its compiled graph calls other layers than the model does without the compiler
    > Compile it without fullgraph=True
eager_failed: a call of the model without the compiler failed: {error}
    > Compile it without fullgraph=True, or make the model run without the compiler too
graph_and_eager: same_samples() was given forwards of a whole compiled graph and others
    > Use one kind in all of them
scale_in_graph: a loss_scale with arguments cannot be called within a compiled graph
    > Give a callable without arguments, or set probe.loss_scale before the forward
compiled_autograd: compiled autograd ran its backward, whose nodes are not seen
    > Switch it off
graph_copied: its compiled graph kept a copy of what it was to keep itself
    > Compile it without fullgraph=True
tensor_parallel: tensor parallelism has split layers over processes
    > Use fully_shard or DistributedDataParallel
data_parallel: DataParallel runs its replicas in threads, in no known order
    > Use DistributedDataParallel
flat_parameter: FullyShardedDataParallel makes one flat parameter of many, which has one norm
    > Use torch.distributed.fsdp.fully_shard
scripted: a scripted or traced model shows nothing of its layers
    > Attach to the model that it was made from

== Clipping
clip_sharded: gradients that are sharded over processes (FSDP) cannot be clipped by sample
    > Use DistributedDataParallel
clip_weights: weights were changed since the record began, for example by an optimizer's step
    > Clip, or call reset(), once a step
clip_hooks: hooks on parameters change .grad, and clipping makes it again without them
    > Change .grad itself, after clipping
clip_inputs: what the forward computed with was changed in place, and clipping needs it once more
    > Clip before that
clip_between: .grad was changed between the passes of this record (zero_grad, a failed backward)
    > Call reset() where you zero it, and use paused() for what is not to be clipped
clip_missing: .grad is missing, or no backward of this record left it
    > Clip before zero_grad()
clip_scaled: their gradients are not unscaled yet
    > Call unscale_() for all their optimizers before
clip_changed: .grad was changed since the backward, and clipping would undo that
    > Clip first, or change it by a separate backward()

== Losses and bridges
reduction: loss_fn returns the {kind} of its samples' losses, unlike loss_reduction or loss_scale
    > Reduce it as said, or say loss_reduction="{kind}" and no loss_scale
token_mean: loss_fn takes a mean over the targets that count (ignore_index, weight), of which these
    samples have more or fewer: a sample's weight depends on the others
    > Pass loss_reduction="sum" and loss_scale=torchgradx.token_weights(targets), in score() as a
    callable; or average each sample's own targets before the mean over samples
opacus_samples: Opacus takes the input of {layer} for one of {said} samples, and its output has {n}
    > Give the module one row for each sample
"""


class Refusal(NamedTuple):
    """Text of what happened, and the remedy."""

    text: str
    remedy: str


def _read(table: str) -> Iterator[tuple[str, dict[str, Refusal]]]:
    """Yield each section's title and its refusals by key."""
    for section in table.split("\n== ")[1:]:
        title, *entries = re.split(r"\n(?=\w+: )", section.strip())
        found = {}
        for entry in entries:
            key, _, words = " ".join(entry.split()).partition(": ")
            found[key] = Refusal(*words.split(" > "))
        yield title, found


SECTIONS = dict(_read(TABLE))
REFUSALS = {key: one for section in SECTIONS.values() for key, one in section.items()}
FIELD = "\x1f"  # between the key and the fields of a cause; as in csrc/operators/text.h
OF_ONE = ("shape=", "alone=", "batched=", "name=", "places=", "module=")  # fields of one use alone
ADVICE = {  # added to a remedy
    "reentrant": "A reentrant checkpoint keeps it from being seen: pass use_reentrant=False",
    "loss": "Or return the model's outputs beside its loss, which lets it be proven",
}
SHOWN = 8  # parameters that are listed


class RefusedError(RuntimeError):
    """A module cannot be run again, for this cause. Never leaves a backward."""

    def __init__(self, why: str) -> None:
        super().__init__(sentence(why))
        self.cause = why


def cause(key: str, **fields: object) -> str:
    """Return a refusal as a recorder keeps it; or a cause with more fields.

    `more=` names an advice to add, `module=` a module that may own none of the parameters.
    """
    return FIELD.join([key, *(f"{name}={value}" for name, value in fields.items())])


def key_of(why: str) -> str:
    """Return the key of a cause."""
    return why.partition(FIELD)[0]


def sentence(why: str) -> str:
    """Return what a cause says: the text, the remedy."""
    key, *fields = why.split(FIELD)
    values = {name: value for name, _, value in (field.partition("=") for field in fields)}
    parts = [part.format_map(values) for part in REFUSALS[key]]
    if "more" in values:
        parts.append(ADVICE[values["more"]])
    if "module" in values:
        parts[0] = f"module {values['module']!r}: {parts[0]}"
    return ". ".join(parts)


def refused(causes: Mapping[str, str]) -> CoverageError:
    """Return the error for {parameter: cause}, with each cause once."""
    covered: dict[str, list[str]] = {}
    for name, why in causes.items():
        fields = [field for field in why.split(FIELD) if not field.startswith(OF_ONE)]
        covered.setdefault(FIELD.join(fields), []).append(name)
    lines = [_line(names, causes) for names in covered.values()]
    count = f"{len(causes)} parameter{'s' * (len(causes) != 1)}"
    return CoverageError(f"no exact norms by sample for {count}:{''.join(lines)}", causes)


def refused_all(why: str, names: Iterable[str]) -> CoverageError:
    """Return the error for one cause that covers all these parameters."""
    names = list(names)
    concerned = f". Concerned: {_some(names)}" if names else ""
    return CoverageError(sentence(why) + concerned, names)


def _line(names: list[str], causes: Mapping[str, str]) -> str:
    if len(names) <= SHOWN:
        return f"\n  {', '.join(names)}: {sentence(causes[names[0]])}"
    first, rest = names[0], "more parameters"
    if key_of(causes[first]) == "mixes":  # in the order of forward: the last is the closest to it
        owner = names[-1].rpartition(".")[0]
        first = next(name for name in names if name.rpartition(".")[0] == owner)
        rest = "parameters below it"
    return f"\n  {first} and {len(names) - 1} {rest}: {sentence(causes[first])}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
