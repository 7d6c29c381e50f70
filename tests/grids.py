"""Thins grids: tests whose parameters are combined in full.

`make test-all` runs all cases of a test marked `grid` (--all-cases); `make test` enough for each
value of a parameter to occur with each value of every other one, the same in every run.
`grid("backend", "algorithm")` also has each combination of these two occur with each value of every
other parameter. Of slow tests, `grid(pairs=False)` takes each value of each parameter once.
"""

import heapq
import zlib
from collections import defaultdict
from itertools import combinations


def thin(items):
    """Split collected tests into those to run and those to leave out, both in their order."""
    left_out = {i for i in items if i.get_closest_marker("long")}
    for cases in _by_test(i for i in items if i.get_closest_marker("grid")):
        left_out.update(set(cases) - _cover(cases))
    return _parted(items, left_out)


def in_default_mode(items):
    """Split off the cases with other `options` of attach(), where a test has one without any."""
    left_out = set()
    for cases in _by_test(items):
        default = [c for c in cases if c.callspec.params.get("options") == {}]
        left_out.update(set(cases) - set(default) if default else ())
    return _parted(items, left_out)


def _parted(items, left_out):
    return [i for i in items if i not in left_out], [i for i in items if i in left_out]


def _by_test(items):
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    return tests.values()


def _cover(cases):
    """Choose the case with most combinations that none has had yet, until there are none."""
    cases = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))  # spreads what is free
    has = [frozenset(_combinations(case)) for case in cases]
    queue = [(-len(combos), k) for k, combos in enumerate(has)]
    heapq.heapify(queue)
    chosen, seen = set(), set()
    while queue:
        _, k = heapq.heappop(queue)
        new = len(has[k] - seen)
        if queue and -new > queue[0][0]:  # others may now have more
            if new:
                heapq.heappush(queue, (-new, k))
        elif new:
            chosen.add(cases[k])
            seen |= has[k]
    return chosen


def _combinations(case):
    # By identity, for a dict has no hash: the cases of a test share the values of its lists.
    values = sorted((name, id(value)) for name, value in case.callspec.params.items())
    marks = list(case.iter_markers("grid"))
    pairs = all(mark.kwargs.get("pairs", True) for mark in marks)
    yield from combinations(values, min(2 if pairs else 1, len(values)))
    together = {name for mark in marks for name in mark.args}
    whole = tuple(v for v in values if v[0] in together)
    if whole:
        yield from ((*whole, v) for v in values if v[0] not in together)
