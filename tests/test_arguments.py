"""The public functions: what they take, what they equal, and what they say when they refuse."""

import pytest
import torch
from oracle import CONV2D, Conv2d, assert_gradient, assert_sq_norms, case, linear_truth

from torchgradx import ops

A, B = torch.randn(8, 128, 64), torch.randn(8, 128, 32)
X, Y = torch.randn(4, 6, 9, 8), torch.randn(4, 4, 7, 6)  # a 3x3 convolution's, without padding
IDS, G = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, 2)  # of a table


@pytest.mark.parametrize("positions", [(), (5,), (900,), (3, 2), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("algorithm", [None, "gram", "direct"])
def test_activations_of_any_rank(positions, algorithm):
    a, b = torch.randn(4, *positions, 7), torch.randn(4, *positions, 3)
    truth = linear_truth(a, b)
    sq_norms = ops.linear_sq_norms(a, b, algorithm=algorithm)
    assert_sq_norms(sq_norms[None], truth, "gram", torch.float32)
    grad_weight, sq_norms = ops.linear_weight_grad(a, b)
    assert_sq_norms(sq_norms[None], truth, "fused", torch.float32)
    terms = a.shape[:-1].numel()
    assert_gradient(grad_weight, truth.weight.sum(0), truth.weight_magnitude.sum(0), terms)


@pytest.mark.parametrize("problem", CONV2D)
@pytest.mark.parametrize("algorithm", [None, "gram", "direct"])
def test_conv2d_takes_what_the_layer_takes(problem, algorithm):
    x, b, truth = case(problem, torch.float32, "gaussians")
    kernel_size, stride, padding, dilation, groups = problem.geometry
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    sq_norms = ops.conv2d_sq_norms(x, b, kernel_size, algorithm=algorithm, **options)
    assert_sq_norms(sq_norms[None], truth, "gram", torch.float32)
    grad_weight, sq_norms = ops.conv2d_weight_grad(x, b, kernel_size, **options)
    assert_sq_norms(sq_norms[None], truth, "fused", torch.float32)
    magnitude, terms = truth.weight_magnitude.sum(0), b[:, 0].numel()
    assert_gradient(grad_weight, truth.weight.sum(0), magnitude, terms)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("kernel_size", "dilation"), [(3, 1), (2, 1), ((4, 3), (1, 2))])
def test_conv2d_padding_by_name(padding, kernel_size, dilation):
    layer = torch.nn.Conv2d(6, 4, kernel_size, padding=padding, dilation=dilation, bias=False)
    output = layer(X)
    b = torch.randn_like(output)
    options = {"padding": padding, "dilation": dilation}
    weight_grad, sq_norms = ops.conv2d_weight_grad(X, b, kernel_size, **options)
    expected = torch.autograd.grad(output, layer.weight, b)[0]
    torch.testing.assert_close(weight_grad, expected, rtol=1e-4, atol=1e-4)
    alone = ops.conv2d_sq_norms(X, b, kernel_size, **options)
    one = torch.autograd.grad(layer(X[:1]), layer.weight, b[:1])[0]
    torch.testing.assert_close(sq_norms, alone, rtol=1e-4, atol=0)
    torch.testing.assert_close(alone[0], one.square().sum(), rtol=1e-4, atol=0)


def test_rank1_of_a_convolution_with_one_output_pixel():
    x, b, truth = case(Conv2d(2, 3, 4, (4, 5), (4, 5)), torch.float32, "gaussians")
    sq_norms = ops.conv2d_sq_norms(x, b, (4, 5), algorithm="rank1")
    assert_sq_norms(sq_norms[None], truth, "rank1", torch.float32)


def test_results_carry_no_autograd_graph():
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    alone = [ops.linear_sq_norms(a, b), ops.conv2d_sq_norms(x, y, 3)]
    fused = [*ops.linear_weight_grad(a, b), *ops.conv2d_weight_grad(x, y, 3)]
    assert not any(result.requires_grad for result in alone + fused)


TRACED = [
    (lambda a, b: ops.linear_sq_norms(a, b) + ops.linear_weight_grad(a, b)[1], A, B),
    (lambda x, b: ops.conv2d_sq_norms(x, b, 3) + ops.conv2d_weight_grad(x, b, 3)[1], X, Y),
    (ops.embedding_sq_norms, IDS, torch.randn(3, 5, 2)),
]


@pytest.mark.skipif(not ops.NATIVE, reason="torchgradx._C is not built")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_traces_through_without_a_break(dynamic):
    for function, *operands in TRACED:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for n in (4, 3):
            halved = [t[:n] for t in operands]
            torch.testing.assert_close(compiled(*halved), function(*halved))


REFUSALS = [
    (lambda: ops.linear_sq_norms(A, torch.zeros(8, 127, 32)), ValueError,
        "grad_output must be [N, T, O] with N = 8 and T = 128, as activations are [8, 128, 64]; "
        "got [8, 127, 32]"),
    (lambda: ops.linear_sq_norms(torch.zeros(8, 64), torch.zeros(7, 32)), ValueError,
        "grad_output must be [N, O] with N = 8, as activations are [8, 64]; got [7, 32]"),
    (lambda: ops.linear_sq_norms(torch.zeros(8), torch.zeros(8)), ValueError,
        "activations must be [N, *, I], of two dimensions at least; got [8]"),
    (lambda: ops.linear_sq_norms([1.0], B), TypeError,
        "activations must be a torch.Tensor; got list [1.0]"),
    (lambda: ops.linear_sq_norms(A, None), TypeError,
        "grad_output must be a torch.Tensor; got NoneType None"),
    (lambda: ops.linear_sq_norms(A.to_sparse(), B), TypeError,
        "activations must be a dense (strided) tensor; got torch.sparse_coo: densify it"),
    (lambda: ops.linear_sq_norms(A.int(), B.int()), TypeError,
        "activations must be float16, bfloat16, float32 or float64; got torch.int32: convert it"),
    (lambda: ops.linear_sq_norms(A, B.half()), TypeError,
        "grad_output must be torch.float32, as activations is; got torch.float16: convert one"),
    (lambda: ops.linear_sq_norms(A, B.to("meta")), TypeError,
        "grad_output must be on cpu, as activations is; got meta: move one"),
    (lambda: ops.linear_sq_norms(A, B, algorithm="rank1"), ValueError,
        "algorithm='rank1' refuses: rank1 needs T = 1: a sum over T = 128 positions is not of "
        "rank one"),
    (lambda: ops.linear_sq_norms(A, B, algorithm="fused"), ValueError,
        "algorithm='fused' refuses: fused computes the weight gradient with the norms, and none "
        "is wanted"),
    (lambda: ops.linear_sq_norms(A, B, algorithm="ghost"), ValueError,
        "algorithm must be None or one of 'rank1', 'gram', 'direct', 'fused'; got 'ghost'"),
    (lambda: ops.linear_sq_norms(A, B, algorithm=2), TypeError,
        "algorithm must be a str or None; got int 2"),
    (lambda: ops.linear_weight_grad(A, B, scale=torch.ones(7)), ValueError,
        "scale must be [N] with N = 8; got [7]"),
    (lambda: ops.linear_weight_grad(A, B, scale=[1.0] * 8), TypeError,
        "scale must be a torch.Tensor [N] or None; got list [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, "
        "1.0]"),
    (lambda: ops.conv2d_sq_norms(X[0], Y, 3), ValueError,
        "input must be [N, C, H, W]; got [6, 9, 8]"),
    (lambda: ops.conv2d_sq_norms(X, Y, 3, stride=2), ValueError,
        "grad_output must be [N, O, H', W'] with N = 4, H' = 4 and W' = 3, as input is "
        "[4, 6, 9, 8], kernel_size = (3, 3), stride = (2, 2), padding = 0 and dilation = (1, 1); "
        "got [4, 4, 7, 6]"),
    (lambda: ops.conv2d_sq_norms(X, Y, 3, groups=4), ValueError,
        "groups must divide input's C = 6 and grad_output's O = 4; got 4"),
    (lambda: ops.conv2d_sq_norms(X, Y, 3, groups=1.0), TypeError,
        "groups must be an int; got float 1.0"),
    (lambda: ops.conv2d_sq_norms(X, Y, (3, 3, 3)), ValueError,
        "kernel_size must be an int or a pair of ints; got tuple (3, 3, 3)"),
    (lambda: ops.conv2d_sq_norms(X, Y, "3"), TypeError,
        "kernel_size must be an int or a pair of ints; got str '3'"),
    (lambda: ops.conv2d_sq_norms(X, Y, 3, stride=0), ValueError,
        "stride must be from 1 to 1048576; got int 0"),
    (lambda: ops.conv2d_sq_norms(X, Y, 10), ValueError,
        "kernel_size = (10, 10) with dilation = (1, 1) must fit into the input's [9, 8] pixels "
        "padded by (0, 0)"),
    (lambda: ops.conv2d_sq_norms(X, Y, 3, stride=2, padding="same"), ValueError,
        'padding="same" needs stride = 1; got stride = (2, 2)'),
    (lambda: ops.conv2d_weight_grad(X, Y, 3, padding="full"), ValueError,
        'padding must be an int, a pair, "same" or "valid"; got str \'full\''),
    (lambda: ops.embedding_sq_norms(IDS.float(), G), TypeError,
        "indices must be int32 or int64; got torch.float32: convert it"),
    (lambda: ops.embedding_sq_norms(IDS, G.long()), TypeError,
        "grad_output must be float16, bfloat16, float32 or float64; got torch.int64: convert it"),
    (lambda: ops.embedding_sq_norms(IDS, G[:, :4]), ValueError,
        "grad_output must be [N, *, D] where indices are [N, *]; got [3, 4, 2] and [3, 5]"),
    (lambda: ops.embedding_sq_norms(IDS, G, padding_idx=-1), ValueError,
        "padding_idx must be an id, from 0 on; got -1: add num_embeddings to it"),
    (lambda: ops.embedding_sq_norms(IDS, G, padding_idx=1.0), TypeError,
        "padding_idx must be an int or None; got float 1.0"),
    (lambda: ops.embedding_sq_norms(IDS, G.to("meta")), TypeError,
        "grad_output must be on cpu, as indices is; got meta: move one"),
    (lambda: ops.embedding_sq_norms([1], G), TypeError,
        "indices must be a torch.Tensor; got list [1]"),
    (lambda: ops.embedding_sq_norms(IDS - 3, G), IndexError,
        "indices must be from 0 on; got -3 in sample 0, position 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS, ids=[r[2][:40] for r in REFUSALS])
def test_a_refusal_names_the_argument_and_what_came(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_public_names():
    both = ["sq_norms", "weight_grad"]
    products = [f"{layer}_{what}" for layer in ("conv2d", "linear") for what in both]
    assert ops.__all__ == sorted([*products, "embedding_sq_norms"])
    assert all((getattr(ops, name).__doc__ or "").count("Equivalent to::") for name in ops.__all__)
