"""What a record leaves unaccounted for, said by parameter when it is read."""

from __future__ import annotations

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
    created = any(run.create_graph for run in runs)
    silent = any(run.silent for run in runs)
    places = parameters.trainable()
    causes: dict[int, str] = dict.fromkeys(places, "create_graph") if created else {}
    statistics = ""  # of a batch: why rows below mix
    for site, why in sorted(recorder.refusals, key=lambda found: _tells(key_of(found[1]))):
        if silent and key_of(why) == "not_found":  # perhaps a table, which a checkpoint hides
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
    causes.update((place, why) for place, why in record.refused.items() if place not in causes)
    doubtful = {
        "not_the_sum": {place for _, place in record.mismatched},
        "overwritten": {place for run in runs for place in run.changed()},
        "late": {place for run in runs for place in run.late()},
    }
    for place, beyond in enumerate(recorder.balance):
        found = [key for key, doubt in doubtful.items() if place in doubt]
        if beyond:
            found.insert(0, cause("beyond" if beyond > 0 else "without_edge", places=abs(beyond)))
        if found and place in places:
            causes.setdefault(place, found[0])
    if causes:
        raise refused({parameters.names[place]: why for place, why in causes.items()})


def _tells(key: str) -> bool:
    """Return True for a cause that stands where others follow from it."""
    return key == "mixes" or key.startswith("segments_")
