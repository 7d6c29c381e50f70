"""The operators that a whole compiled graph records with, by themselves."""

import pytest
import torch
from attach_oracle import mlp

import torchgradx

if not torchgradx.ops.NATIVE:
    pytest.skip("a graph is whole with the extension only", allow_module_level=True)

N = 4
# A token is another each time, which AOTAutograd's own check would hold against the operator.
STATIC = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_the_operators_keep_what_they_tell_the_compiler():
    model = mlp()
    with torchgradx.attach(model) as probe:
        use = f"{probe._trace._held[0]}/1"
        x = torch.randn(N, 3, requires_grad=True)
        args = (x, model[0].weight, model[0].bias, torchgradx._C.token(None), use)
        torch.library.opcheck(torch.ops.torchgradx.trace_layer.default, args, test_utils=STATIC)
        given = [t.detach() for t in args[:4]]  # never beneath autograd
        back = (torch.randn(N, 5), *given, use, [True, False, True])
        torch.library.opcheck(torch.ops.torchgradx.trace_backward.default, back)


@pytest.mark.parametrize(
    ("use", "token", "match"),
    [("", torch.zeros(1, dtype=torch.int64), "use must be"),
     ("-1/1", torch.zeros(1, dtype=torch.int64), "without its probe"),
     (None, torch.zeros(0, dtype=torch.int64), "token must be"),
     (None, torch.zeros(1), "Long")]
)  # fmt: skip
def test_a_call_of_ones_own_is_refused(use, token, match):
    model = mlp()
    with torchgradx.attach(model) as probe:
        key = torchgradx._C.Key(probe._sites[0].core)
        with pytest.raises(RuntimeError, match=match):
            torch.ops.torchgradx.trace_layer(
                torch.randn(N, 3), model[0].weight, None, token, f"{key}/1" if use is None else use
            )
