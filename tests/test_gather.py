"""Tables looked up by id: the norms of their gradients, and their dot with a tied Linear's."""

import layouts
import pytest
import torch
from backends import each_dtype, each_kind, to
from oracle import accumulation_epsilon, assert_within, tolerance
from oracle_gather import GATHER, Gather, assert_sq_norms, dots

from torchgradx import ops

each_problem = pytest.mark.parametrize("problem", GATHER, ids=lambda p: "-".join(map(str, p)))


@pytest.mark.grid("backend", "dtype")
@each_dtype
@each_kind
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=("int32", "int64"))
@pytest.mark.parametrize("padding_idx", [None, 0])
@each_problem
def test_norms_agree_with_the_oracle(backend, problem, padding_idx, ids, kind, dtype):
    indices, grads = problem.operands(dtype, kind)
    arguments = to(backend, indices.to(ids), grads)
    sq_norms = backend.operator("gather_sq_norms")(*arguments, padding_idx)
    # Ids are renamed in order, so that the oracle's table is small.
    names, renamed = indices.unique(return_inverse=True)
    padding = None if padding_idx is None or padding_idx not in names else 0
    assert_sq_norms(sq_norms, renamed, grads, max(1, len(names)), padding, kind)


@pytest.mark.grid("backend", "dtype")
@each_dtype
@each_kind
@pytest.mark.parametrize("s", [0, 1, 5, 33, 300])
@pytest.mark.parametrize("padding_idx", [None, 0])
@each_problem
def test_dots_agree_with_the_oracle(backend, problem, padding_idx, s, kind, dtype):
    problem = problem._replace(v=min(problem.v, 400))
    operands = (*problem.operands(dtype, kind), *problem.linear(s, dtype, kind))
    actual = backend.operator("gather_dots")(*to(backend, *operands), padding_idx)
    expected, magnitude = dots(problem, s, dtype, kind, padding_idx)
    allowance = 2 * accumulation_epsilon(dtype) * expected.abs()
    if kind == "gaussians":
        terms = tolerance(dtype, problem.t) + tolerance(dtype, s)
        allowance = (terms + accumulation_epsilon(dtype)) * magnitude
    assert_within(actual, expected, allowance, dtype)


LAYOUTS = layouts.LAYOUTS | {
    "features_outside": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "one_position_expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(backend, layout, dtype):
    problem, laid = Gather(3, 33, 7, 31), LAYOUTS[layout]
    operands = (*problem.operands(dtype, "integers"), *problem.linear(9, dtype, "integers"))
    for which in range(4):
        these = list(operands)
        these[which] = laid(these[which])
        plain = [t.contiguous() for t in these]
        for name, count in (("gather_sq_norms", 2), ("gather_dots", 4)):
            run = backend.operator(name)
            actual = run(*to(backend, *these[:count]), 3)
            assert torch.equal(actual, run(*to(backend, *plain[:count]), 3))


@pytest.mark.parametrize("operator", ["gather_sq_norms", "gather_dots"])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_ids_outside_of_the_table_are_refused(backend, operator, wrong):
    problem = Gather(3, 33, 7, 5)
    operands = (*problem.operands(torch.float32, "integers"),)
    operands[0][1, 4] = wrong
    if operator == "gather_dots":
        operands += problem.linear(9, torch.float32, "integers")
    elif wrong > 0:
        pytest.skip("the size of the table is not known")
    if backend.name in ("emulated", "cuda"):  # which do not wait
        sq_norms = backend.operator(operator)(*to(backend, *operands), None)
        assert sq_norms.isnan().tolist() == [False, True, False]
        return
    text = rf"indices must be from 0 (on|to \d+); got {wrong} in sample 1, position 4"
    with pytest.raises(IndexError, match=text):
        backend.operator(operator)(*to(backend, *operands), None)


def test_largest_ids(backend):
    """The sort is by bytes: ids that differ in the highest, or only in one between."""
    ids = torch.tensor([[2**62, 2**62 + 1, 5, 2**40 + 5, 2**62, 5, 2**62 + 256]])
    actual = backend.operator("gather_sq_norms")(*to(backend, ids, torch.ones(1, 7, 2)), None)
    assert actual.tolist() == [2 * (4 + 1 + 4 + 1 + 1)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("problem", [Gather(1, 200, 60, 512), Gather(7, 100, 30, 256)])
def test_any_number_of_threads_is_right_and_repeats(backend, problem, count, threads):
    threads(count)
    operands = (
        *problem.operands(torch.float32, "integers"),
        *problem.linear(64, torch.float32, "integers"),
    )
    expected, _ = dots(problem, 64, torch.float32, "integers", None)
    indices, grads, a, b = to(backend, *operands)
    for _ in range(3):
        sq_norms = backend.operator("gather_sq_norms")(indices, grads, None)
        assert_sq_norms(sq_norms, operands[0], operands[1], problem.v, None, "integers")
        actual = backend.operator("gather_dots")(indices, grads, a, b, None)
        assert torch.equal(actual.cpu().double(), expected)


@pytest.mark.parametrize("positions", [(), (5,), (3, 2), (0,)])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_embedding_sq_norms_of_any_rank(positions, padding_idx):
    ids, g = torch.randint(0, 3, (4, *positions)), torch.randn(4, *positions, 6)
    sq_norms = ops.embedding_sq_norms(ids, g, padding_idx=padding_idx)
    flat = ids.reshape(4, -1)
    assert_sq_norms(sq_norms, flat, g.reshape(4, flat.shape[1], 6), 3, padding_idx, "gaussians")
