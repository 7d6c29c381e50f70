"""Inputs that are lists: of one tensor for each sample, as a detector's images, or of several
arguments; and tensors that hold rows of no one size."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import torchgradx

T = 5


def resized(x):
    return nn.functional.interpolate(x[None], (4, 4))[0]


def padded(m, xs):
    lengths = torch.tensor([len(x) for x in xs])
    h = m.l(pad_sequence(xs, batch_first=True))
    mask = torch.arange(h.shape[1]) < lengths[:, None]
    return (h * mask[..., None]).sum(1) / lengths[:, None]


FORWARDS = {
    "stacked": (lambda m, xs: torch.tanh(m.l(torch.stack(xs))).sum(1), lambda n: [(T, 3)] * n),
    "stacked tokens": (lambda m, xs: torch.tanh(m.l(torch.stack(xs))), lambda n: [(T, 3)] * n),
    "padded": (padded, lambda n: [(2 + k, 3) for k in range(n)]),
    "images": (lambda m, xs: m.c(torch.stack([resized(x) for x in xs])).flatten(1),
               lambda n: [(3, 5 + k, 6) for k in range(n)]),
    "centred": (lambda m, xs: m.l(torch.stack([x - x.mean(0) for x in xs])).sum(1),
                lambda n: [(T, 3)] * n),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4, T])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_list_of_samples_is_exact(name, n, options):
    """Also where a sample has as many rows, or channels, as there are samples: or refused."""
    forward, sizes = FORWARDS[name]
    model = Model(forward, l=nn.Linear(3, 2), c=nn.Conv2d(3, 2, 3)).double()
    xs = [torch.randn(size).double() for size in sizes(n)]
    with torchgradx.attach(model, batch_size=lambda args, kwargs: len(args[0]), **options) as probe:
        square(model, xs).backward()
        if name == "stacked tokens" and n == T:
            with pytest.raises(torchgradx.CoverageError, match="two dimensions"):
                probe.norms()
            return
        got = probe.norms(per="parameter")
    for k, x in enumerate(xs):
        model.zero_grad()
        square(model, [x]).backward()
        want = {p: q.grad.norm()[None] for p, q in model.named_parameters() if q.grad is not None}
        close_named({p: norms[k : k + 1] for p, norms in got.items() if p in want}, want)


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_list_of_arguments_is_exact(n, options):
    """Of as many as there are samples, or of others."""
    model = Model(lambda m, a, b, c: m.l(torch.tanh(a * b)) + m.l(c), l=nn.Linear(3, 2)).double()
    whole = Model(lambda m, xs: model(*xs), inner=model)
    batch = [torch.randn(n, 3).double() for _ in range(3)]
    with torchgradx.attach(whole, **options) as probe:
        square(whole, batch).backward()
        got = probe.norms(per="parameter")
    close_named({name[6:]: norms for name, norms in got.items()}, loop(model, square, *batch))


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_dictionary_of_arguments_is_none_of_samples(n, options):
    """Of as many as there are samples."""
    model = Model(lambda m, given: torch.tanh(m.l(given["a"])) * given["b"] + given["c"],
                  l=nn.Linear(n, 5)).double()  # fmt: skip
    sizes = {"a": n, "b": 5, "c": 5, "d": 5}
    given = {name: torch.randn(n, sizes[name]).double() for name in "abcd"[: max(3, n)]}
    with torchgradx.attach(model, **options) as probe:
        square(model, given).backward()
        got = probe.norms(per="parameter")
    each = Model(lambda m, *batch: m.inner(dict(zip("abcd", batch, strict=False))), inner=model)
    want = loop(each, square, *given.values())
    close_named({f"inner.{name}": norms for name, norms in got.items()}, want)


@a_few_modes
@pytest.mark.parametrize("own", [False, True], ids=["", "parameters of its own"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_layers_that_are_given_nested_tensors_are_refused(layout, own, options):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def forward(m, x):
        rows = torch.nested.nested_tensor([v[: k + 1] for k, v in enumerate(x)], layout=layout)
        return m.o(torch.relu(m.l(rows)).to_padded_tensor(0.0).sum(1))

    kind = Scaled if own else nn.Linear
    model = Model(forward, l=kind(3, 4), o=nn.Linear(4, 2))
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(4, T, 3)).backward()
        assert model.o.weight.grad is not None or not options.get("weight_grad", True)
        with pytest.raises(
            torchgradx.CoverageError,
            match=r"l\.weight.*: .*(nested tensor|could not be looked for)",
        ):
            probe.norms()
