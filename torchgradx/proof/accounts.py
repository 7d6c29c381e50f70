"""What a record leaves unaccounted for, said by parameter when it is read."""

from __future__ import annotations

from collections.abc import Collection
from operator import itemgetter
from typing import Any

from ..layers.rules import Layer
from ..layers.table import Parameters
from ..record.record import Record
from ..refusals import cause, key_of, refused


def require_all(record: Record, recorder: Any, parameters: Parameters, layers: list[Layer]) -> None:
    """Raise a CoverageError if anything in the record is not accounted for."""
    runs = [run for run, _ in record.runs]
    sound = recorder.sound and all(run.sound for run in runs)
    if sound and not record.mismatched and not record.refused:
        return
    places = parameters.trainable()
    created = any(run.create_graph for run in runs)
    causes: dict[int, str] = dict.fromkeys(places, "create_graph") if created else {}
    causes.update(_of_refusals(recorder, layers, places, any(run.silent for run in runs)))
    for place, why in record.refused.items():
        causes.setdefault(place, why)
    doubts = [
        *((place, _beyond(count)) for place, count in enumerate(recorder.balance) if count),
        *((place, "not_the_sum") for _, place in record.mismatched),
        *((place, "overwritten") for run in runs for place in run.changed()),
        *((place, "late") for run in runs for place in run.late()),
    ]
    for place, why in sorted(doubts, key=itemgetter(0)):  # of each parameter the first in this list
        if place in places:
            causes.setdefault(place, why)
    if causes:
        raise refused({parameters.names[place]: why for place, why in causes.items()})


def _of_refusals(
    recorder: Any, layers: list[Layer], places: Collection[int], silent: bool
) -> dict[int, str]:
    """Return causes by parameter; silent: a reentrant checkpoint's graph hides tables."""
    causes: dict[int, str] = {}
    statistics = ""  # of a batch: why rows below mix
    for site, why in sorted(recorder.refusals, key=lambda refusal: _explains(key_of(refusal[1]))):
        if silent and key_of(why) == "not_found":
            why = cause(why, more="reentrant")
        own = layers[site].parameters if site >= 0 else ()
        concerned = [place for place in own if place in places]
        if site >= 0 and (not concerned or key_of(why) == "batch_statistics"):  # it may be frozen
            why = cause(why, module=layers[site].name)
        if key_of(why) == "batch_statistics":
            statistics = why
        elif key_of(why) == "mixes":
            why = statistics or why
        causes.update(dict.fromkeys(concerned or places, why))
    return causes


def _beyond(count: int) -> str:
    return cause("beyond" if count > 0 else "without_edge", places=abs(count))


def _explains(key: str) -> bool:
    """Return True for a cause from which others follow."""
    return key == "mixes" or key.startswith("segments_")
