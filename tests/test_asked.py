"""What an operation does with samples, by asking it: found for each two of them."""

import pytest
import torch
from attach_oracle import seeded  # noqa: F401

from torchgradx.proof.asked import answers, runs
from torchgradx.proof.sample_dims import GONE, Place

aten = torch.ops.aten
SIZES = [2, 3, 6, 7, 20]


def answer(func, args, places, n):
    fed = [(t, place) for t, place in zip(args, places, strict=False) if place is not None]
    return answers(func(*args), runs(func, args, {}, fed, n), n)[0]


@pytest.mark.parametrize("n", SIZES)
def test_each_two_samples_are_told_apart(n):
    x = torch.randn(n, 3)
    for i in range(n):
        for j in range(n):
            mix = torch.eye(n)
            mix[i, j] = 1
            place, astray = answer(aten.mm.default, (mix, x), (None, Place(0)), n)
            assert (place, astray) == ((Place(0), False) if i == j else (None, True)), (i, j)


@pytest.mark.parametrize("n", SIZES)
def test_two_rows_that_change_places_are_seen(n):
    x = torch.randn(n, 3)
    for i in range(n - 1):
        order = torch.arange(n)
        order[[i, i + 1]] = order[[i + 1, i]]
        assert answer(aten.index_select.default, (x, 0, order), (Place(0),), n).astray


@pytest.mark.parametrize("inner", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 5])
def test_samples_are_found_in_flattened_rows(n, inner):
    x = torch.randn(4, 2 * n * inner)
    place = Place(1, inner)
    assert answer(aten.cumsum.default, (x, 0), (place,), n) == (place, False)
    assert answer(aten.cumsum.default, (x, 1), (place,), n).astray
    assert answer(aten.t.default, (x,), (place,), n) == (Place(0, inner), False)


def test_what_is_of_all_samples_has_none():
    x = torch.randn(6, 4)
    assert answer(aten.std.correction, (x, [0]), (Place(0),), 6) == (GONE, True)
    assert answer(aten.max.default, (x,), (Place(0),), 6) == (GONE, True)


def test_what_it_writes_into_is_left_as_it_was():
    x, rows = torch.randn(6, 4), torch.arange(6)
    into, before = torch.zeros(6, 4), x.clone()
    fed = [(x, Place(0)), (rows, Place(0))]
    others = [*runs(aten.index_add_.default, (into, 0, rows, x), {}, fed, 6)]
    assert not into.any()
    assert torch.equal(x, before)
    aten.index_add_.default(into, 0, rows, x)
    assert answers(into, others, 6) == [(Place(0), False)]


def test_of_sizes_that_values_choose_nothing_is_said():
    x = torch.tensor([[1.0], [0.0], [0.0], [2.0]])
    assert answer(aten.nonzero.default, (x,), (Place(0),), 4) == (None, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_rounding_is_no_sample(dtype):
    x = torch.randn(6, 100).mul(8).to(dtype)
    assert answer(aten.sum.dim_IntList, (x, [1]), (Place(0),), 6) == (Place(0), False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_little_of_another_sample_is_seen_in_halves(dtype):
    x, mix = torch.randn(6, 100, dtype=dtype), torch.eye(6, dtype=dtype)
    mix[4, 2] = 0.05
    assert answer(aten.mm.default, (mix, x), (None, Place(0)), 6).astray


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_numbers_that_are_alike_in_all_samples_hide_nothing(value):
    x = torch.full((4, 3), value)
    assert answer(aten.roll.default, (x, [1], [0]), (Place(0),), 4).astray
    assert answer(aten.roll.default, (x, [1], [1]), (Place(0),), 4) == (Place(0), False)
