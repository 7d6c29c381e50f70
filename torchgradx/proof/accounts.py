"""What a record leaves unaccounted for, said by parameter when it is read."""

from __future__ import annotations

from collections.abc import Collection
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
    for place, why in sorted(_doubts(record, recorder).items()):
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


def _doubts(record: Record, recorder: Any) -> dict[int, str]:
    """Return causes by parameter of what its uses and its gradient do not agree on."""
    doubts = {
        place: cause("beyond" if beyond > 0 else "without_edge", places=abs(beyond))
        for place, beyond in enumerate(recorder.balance)
        if beyond
    }
    for _, place in record.mismatched:
        doubts.setdefault(place, "not_the_sum")
    for place in (place for run, _ in record.runs for place in run.changed()):
        doubts.setdefault(place, "overwritten")
    for place in (place for run, _ in record.runs for place in run.late()):
        doubts.setdefault(place, "late")
    return doubts


def _explains(key: str) -> bool:
    """Return True for a cause from which others follow."""
    return key == "mixes" or key.startswith("segments_")
