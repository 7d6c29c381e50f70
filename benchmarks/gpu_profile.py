"""Says where a step's time goes: its kernels by name, in time and in number, by torch.profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from isolated import said
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TOP = 25
WIDTH = 130  # of a kernel's name


def kernels_of(step: Callable[[], None], device: str) -> dict[str, Any]:
    """Return {"kernels": {name: [count, microseconds]}} of one step.

    On the CPU operators stand in for kernels, so that the code can be tried there. A profiler that
    does not start costs no figures: its error stands in the kernels' place.
    """
    try:
        return {"kernels": _profiled(step, device == "cuda")}
    except Exception as error:
        return {"kernels": {f"no profile: {said(error)}": [0, 0.0]}}


def _profiled(step: Callable[[], None], on_gpu: bool) -> dict[str, list[float]]:
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    step()
    with profile(activities=[kind]) as seen:
        step()
    count: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for event in seen.events():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        count[event.name] += 1
        taken[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
    return {name: [count[name], taken[name]] for name in count}


def text_of(model: str, profiles: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Return the profiles of one model as text: for each way the top kernels, twice sorted.

    `profiles` is {way: {kernel: [count, microseconds]}}, with "plain" among the ways.
    """
    lines = [model]
    plain = profiles.get("plain", {})
    for way, kernels in profiles.items():
        launches = sum(int(count) for count, _ in kernels.values())
        busy = sum(us for _, us in kernels.values())
        lines += ["", f"== {way}: {launches} launches, {busy / 1e3:.3f} ms busy"]
        orders = {
            "by time": sorted(kernels, key=lambda name: -kernels[name][1]),
            "by number": sorted(kernels, key=lambda name: -kernels[name][0]),
        }
        if way != "plain" and plain:
            orders["by time beyond the plain step's"] = sorted(
                kernels, key=lambda name: plain.get(name, [0, 0])[1] - kernels[name][1]
            )
        for title, names in orders.items():
            lines += ["", f"-- {title}", f"{'us':>10} {'part':>6} {'count':>6} {'plain us':>10}"]
            for name in names[:TOP]:
                number, us = kernels[name]
                before = plain.get(name, [0, 0.0])[1]
                lines.append(
                    f"{us:10.1f} {us / max(busy, 1e-9):6.1%} {int(number):6} {before:10.1f}"
                    f"  {short(name)}"
                )
    return "\n".join(lines) + "\n"


def short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= WIDTH else f"{name[: WIDTH - 3]}..."
