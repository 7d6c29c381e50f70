"""What a record leaves unaccounted for, said by parameter when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import CoverageError

if TYPE_CHECKING:
    from ..passes.record import Record
    from ..rules import Layer
    from ..table import Parameters

__all__ = ["require_all"]

BEYOND = (
    "the backward used it in {:+d} places beyond the recorded calls of its module. A penalty on "
    "the weights inside the loss, a use outside of the model's own forward, or a functional one in "
    "a checkpoint cannot be split by sample: backward the penalty apart from the loss, call the "
    "module instead, or freeze it"
)
MISMATCHED = (
    "the gradient it received is not the sum of what was recorded: something besides the samples' "
    "own losses reaches it, its module mixes samples, or a reentrant checkpoint uses it outside of "
    "modules (say use_reentrant=False)"
)
CHANGED = (
    "what its module was given, or its gradient, was kept until it was read, and written into "
    "before: read the norms first, or write into another tensor"
)
LATE = "a use of it arrived after its norm was final: reset() in between"
CREATED = "its gradient was computed under create_graph=True, and may change again"

# What says that the samples are not found, to which what to do is added: the passes know more.
LOST = ("cannot be found in its output of shape", "has no rows of")
ADVICE = (
    "if these are not the batch's samples, say batch_size= or batch_dim=; if its rows hold them in "
    "another way, say layout="
)
REENTRANT = (
    "; where none are, as in a table of positions, a reentrant checkpoint keeps that from being "
    "seen: say use_reentrant=False"
)


def require_all(record: Record, recorder: Any, parameters: Parameters, layers: list[Layer]) -> None:
    """Raise a CoverageError if anything in the record is not accounted for."""
    runs = [run for run, _ in record.runs]
    sound = recorder.sound and all(run.sound for run in runs)
    if sound and not record.mismatched and not record.refused:
        return
    created = any(run.create_graph for run in runs)
    late = {place for run in runs for place in run.late()}
    changed = {place for run in runs for place in run.changed()}
    places = parameters.trainable()
    reasons: dict[int, str] = dict.fromkeys(places, CREATED) if created else {}
    advice = ADVICE + (REENTRANT if any(run.silent for run in runs) else "")
    for site, reason in recorder.refusals:
        if any(words in reason for words in LOST):
            reason = f"{reason.partition(';')[0]}: {advice}"
        own = layers[site].parameters if site >= 0 else ()
        concerned = [place for place in own if place in places]  # none: frozen, as a BatchNorm
        reasons.update(dict.fromkeys(concerned or places, reason))
    reasons.update((place, why) for place, why in record.refused.items() if place not in reasons)
    mismatched = {place for _, place in record.mismatched}
    doubtful: Mapping[str, set[int]] = {MISMATCHED: mismatched, CHANGED: changed, LATE: late}
    for place, beyond in enumerate(recorder.balance):
        found = [BEYOND.format(beyond)] if beyond else []
        found += [reason for reason, doubt in doubtful.items() if place in doubt]
        if found and place in places:
            reasons.setdefault(place, found[0])
    if reasons:
        problems = {parameters.names[place]: reason for place, reason in reasons.items()}
        lines = "".join(f"\n  {name}: {reason}" for name, reason in problems.items())
        raise CoverageError(
            f"no exact norms by sample for {len(problems)} parameters:{lines}", problems
        )
