"""The check before every read: the record must account for each trainable parameter.

Collects the causes of doubt from the whole record, picks one for each parameter, and makes one
CoverageError that lists them. A `place` is a parameter's index in the table of parameters.
"""

from __future__ import annotations

from operator import itemgetter

from ..errors import CoverageError
from ..extension import Recorder
from ..layers.rules import Layer
from ..layers.table import Parameters
from ..record.record import Record
from ..refusals import cause, key_of, refused


def refusal_of(
    record: Record, recorder: Recorder, parameters: Parameters, layers: list[Layer]
) -> CoverageError | None:
    """Return the error if the norm of any trainable parameter may be wrong or incomplete."""
    runs = [run for run, _ in record.runs]
    sound = recorder.sound and all(run.sound for run in runs)
    if sound and not record.mismatched and not record.refused:
        return None
    # Those that were trained as well: a parameter may be frozen between backward and the read.
    trainable = sorted(set(parameters.trainable()).union(*(run.trainable for run in runs)))
    causes: dict[int, str] = {}
    if any(run.create_graph for run in runs):
        causes = dict.fromkeys(trainable, "create_graph")
    causes |= _causes_of_refusals(recorder, layers, trainable, any(run.silent for run in runs))
    odd = ((place, n) for place, n in enumerate(recorder.balance) if n)  # edges minus uses
    doubts = [
        *((place, cause("beyond" if n > 0 else "without_edge", places=abs(n))) for place, n in odd),
        *((place, "not_the_sum") for _, place in record.mismatched),
        *((place, "overwritten") for run in runs for place in run.changed()),
        *((place, "late") for run in runs for place in run.late()),
    ]
    for place, why in sorted(doubts, key=itemgetter(0)):  # stable: a place's first doubt counts
        if place in trainable:
            is_complex = parameters.tensor(place).is_complex()
            causes.setdefault(place, "complex" if is_complex else why)
    for place, why in record.refused.items():  # a sample alone: what is above explains it too
        causes.setdefault(place, why)
    named = {parameters.names[place]: why for place, why in causes.items()}
    return refused(named) if named else None


def _causes_of_refusals(
    recorder: Recorder, layers: list[Layer], trainable: list[int], silent: bool
) -> dict[int, str]:
    """Return {place: cause} for the recorder's refusals. One of a layer without trainable
    parameters, or of the model (site -1), covers all. silent: a reentrant checkpoint hid nodes."""
    causes: dict[int, str] = {}
    statistics = ""  # the latest cause that explains why the rows of layers below mix
    last = "mixes", "segments_"  # keys of causes that explain others, and so replace them
    for site, why in sorted(recorder.refusals, key=lambda r: key_of(r[1]).startswith(last)):
        key, own = key_of(why), layers[site].parameters if site >= 0 else ()
        covered = [place for place in own if place in trainable]
        if silent and key == "not_found":
            why = cause(why, more="reentrant")
        if site >= 0 and (not covered or key == "batch_statistics"):
            why = cause(why, module=layers[site].name)
        if key == "batch_statistics":
            statistics = why
        elif key == "mixes":
            why = statistics or why
        causes.update(dict.fromkeys(covered or trainable, why))
    return causes
