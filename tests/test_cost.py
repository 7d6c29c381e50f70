"""The cost model, specified by a table: integers in, a verdict out."""

from __future__ import annotations

import pytest

from torchgradx.plan.cost import ALGORITHMS, Cost, Plan, Problem, cost_of, plan


def linear(n, t, i, o, weight_grad=False):
    return Problem("linear", n, t, i, o, weight_grad=weight_grad)


def conv2d(n, t, i, o, groups=1, weight_grad=False):
    return Problem("conv2d", n, t, i, o, groups, weight_grad=weight_grad)


VERDICTS = [
    (linear(256, 1, 784, 1024), "rank1"),  # an MLP: two row sums
    (linear(256, 1, 784, 1024, True), "fused"),  # a GEMM over all samples, and row sums
    (linear(4096, 1, 16, 16), "rank1"),
    (linear(16, 2, 512, 512), "gram"),  # 3 (I + O) against 2 I O
    (linear(16, 4, 512, 512), "gram"),
    (linear(16, 4, 512, 512, True), "fused"),  # a Gram inside: below T = 16 no tile is squared
    (linear(16, 8, 4096, 4096), "gram"),
    (linear(8, 1024, 512, 512), "direct"),  # past T = 2 I O / (I + O) a Gram is dearer
    (linear(8, 1024, 512, 512, True), "fused"),  # the gradient's tiles are there to be squared
    (linear(16, 128, 256, 256, True), "fused"),
    (linear(8, 4096, 64, 64), "direct"),
    (linear(8, 128, 2, 2), "direct"),  # a gradient of four numbers
    (conv2d(64, 1024, 27, 32, weight_grad=True), "fused"),  # a CNN's first layer
    (conv2d(16, 4096, 288, 32), "direct"),
    (conv2d(16, 4096, 288, 32, weight_grad=True), "fused"),
    (conv2d(32, 256, 9, 1, groups=64), "direct"),  # depthwise: nine numbers a channel
    (conv2d(16, 4, 4608, 512), "gram"),  # 2x2 pixels of 512 channels
]


@pytest.mark.parametrize(("problem", "verdict"), VERDICTS)
def test_verdicts(problem, verdict):
    assert plan(problem).algorithm == verdict, plan(problem)


REFUSALS = [
    (linear(8, 128, 64, 32), "rank1", "rank1 needs T = 1: a sum over T = 128 positions is not"),
    (conv2d(8, 2, 64, 32), "rank1", "rank1 needs T = 1: a sum over T = 2 positions is not"),
    (linear(8, 128, 64, 32), "fused", "fused computes the weight gradient with the norms, and"),
]


@pytest.mark.parametrize(("problem", "algorithm", "reason"), REFUSALS)
def test_a_forced_refusal_raises_the_reason_that_the_plan_shows(problem, algorithm, reason):
    shown = plan(problem).refused[algorithm]
    assert shown.startswith(reason)
    assert shown in repr(plan(problem))
    with pytest.raises(ValueError, match="refuses") as raised:
        plan(problem, algorithm)
    assert shown in str(raised.value)


@pytest.mark.parametrize("weight_grad", [False, True])
@pytest.mark.parametrize("t", [0, 1, 2, 4096])
@pytest.mark.parametrize("algorithm", ["gram", "direct"])
def test_gram_and_direct_never_refuse(algorithm, t, weight_grad):
    assert plan(linear(8, t, 64, 32, weight_grad), algorithm).algorithm == algorithm


def test_an_unknown_algorithm_is_told_the_names():
    names = "'rank1', 'gram', 'direct', 'fused'"
    with pytest.raises(ValueError, match=f"one of {names}; got 'ghost'"):
        plan(linear(8, 1, 64, 32), "ghost")


@pytest.mark.parametrize("problem", [problem for problem, _ in VERDICTS])
def test_every_algorithm_is_chosen_refused_or_an_alternative(problem):
    made = plan(problem)
    accounted = [made.algorithm, *made.refused, *made.alternatives]
    assert sorted(accounted) == sorted(ALGORITHMS)
    assert made.seconds <= min(made.alternatives.values(), default=made.seconds)


def test_the_frameworks_weight_gradient_is_counted_beside_all_but_fused():
    alone, beside = linear(3, 4, 5, 7), linear(3, 4, 5, 7, True)
    gemm = Cost(2 * 3 * 4 * 5 * 7, 4 * 3 * 4 * (5 + 7))
    for name in ("gram", "direct"):
        assert cost_of(beside, name) == cost_of(alone, name) + gemm
    assert cost_of(beside, "fused").flop < gemm.flop + cost_of(alone, "direct").flop


@pytest.mark.parametrize("features", [64, 768, 4096])
def test_one_crossover_from_gram_to_direct(features):
    chosen = [plan(linear(8, t, features, features)).algorithm for t in range(2, 8192, 7)]
    assert chosen == sorted(chosen, reverse=True)  # gram, ..., gram, direct, ..., direct
    assert {"gram", "direct"} == set(chosen)


def test_plans_are_cached_and_print_as_a_table():
    p = linear(8, 128, 64, 64, True)
    assert plan(p) is plan(linear(8, 128, 64, 64, True))
    table = repr(plan(p)).splitlines()
    assert table[0] == "linear N=8 T=128 I=64 O=64: weight gradient and norms"
    assert [line.split()[0] for line in table[1:]] == ["fused", "gram", "direct", "rank1"]
    assert table[1].endswith("<- chosen")
    assert isinstance(plan(p), Plan)
