"""Ten thousand malformed calls: no crash, but an exception that names the argument.

They run in child processes, whose log says what was called last. For AddressSanitizer, by hand:
`LD_PRELOAD=libasan.so python tests/test_fuzz.py <seed> <calls> <log>`.
"""

import random
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from processes import python
from torch import Tensor

from torchgradx import ops, reference

CALLS, CHILDREN = 10_000, 2
GEOMETRY = ("kernel_size", "stride", "padding", "dilation")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STRANGE_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn)
STRANGE = (None, 1, -1, 0, 2.5, True, "3", "same", b"", [], [[1.0]], (3, 3), object(), 2**70, {})
STRANGE_INTS = (-1, 0, -(2**63), 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**64, 10**30)


def linear(rng):
    n, t, i, o = (rng.choice((0, 1, 2, 3, 5)) for _ in range(4))
    return {"activations": torch.ones(n, t, i), "grad_output": torch.ones(n, t, o)}


def conv2d(rng):
    n, groups, c, o = (rng.choice((1, 2, 3)) for _ in range(4))
    k, s, p, d = ([rng.choice((1, 2, 3)) for _ in range(2)] for _ in range(4))
    size = [d[j] * (k[j] - 1) + 1 + rng.choice((0, 1, 4)) for j in range(2)]
    output = [(size[j] + 2 * p[j] - d[j] * (k[j] - 1) - 1) // s[j] + 1 for j in range(2)]
    geometry = dict(zip(GEOMETRY, map(tuple, (k, s, p, d)), strict=True))
    operands = torch.ones(n, c * groups, *size), torch.ones(n, o * groups, *output)
    return dict(zip(("input", "grad_output"), operands, strict=True), **geometry, groups=groups)


def embedding(rng):
    n, t, d = (rng.choice((0, 1, 2, 3, 5)) for _ in range(3))
    ids = torch.ones(n, t, dtype=rng.choice((torch.int32, torch.int64)))
    return {"indices": ids, "grad_output": torch.ones(n, t, d),
            "padding_idx": rng.choice((None, 0, 1))}  # fmt: skip


def gather_dots(rng):
    arguments, s, v = embedding(rng), rng.choice((0, 1, 3)), rng.choice((2, 5))
    n, _, d = arguments["grad_output"].shape
    others = {"activations": torch.ones(n, s, d), "grad_output": torch.ones(n, s, v)}
    return arguments | {"grad_rows": arguments["grad_output"]} | others


def elementwise(rng):
    n, t, g, k = (rng.choice((0, 1, 2, 3, 5)) for _ in range(4))
    shape = (n, t, 1) if g == 1 else (n, 1, g)
    x, statistic = torch.ones(n, t, g, k), torch.ones(shape)
    flags = {name: rng.random() < 0.5 for name in ("centred", "over_positions")}
    of_layer = {"mean": rng.choice((None, statistic)), "rstd": statistic, "frozen": False}
    tensors = {"input": x, "grad_output": x, "weight": x.new_ones(g, k)}
    return {**tensors, **of_layer, **flags, "eps": 1e-5}


VALID = {  # by what an operator's name begins with; else a Linear's
    "conv2d": conv2d, "embedding": embedding, "gather_sq": embedding, "gather_dots": gather_dots,
    "turned": lambda rng: {"input": torch.ones([rng.choice((0, 1, 2, 5)) for _ in range(3)])},
    **dict.fromkeys(("affine", "prelu", "moments"), elementwise),
}  # fmt: skip


def valid(name, names, rng):
    make = next((make for start, make in VALID.items() if name.startswith(start)), linear)
    arguments = make(rng)
    scale = torch.ones(len(next(iter(arguments.values()))))
    arguments |= {"scale": scale, "algorithm": None, "bias": rng.random() < 0.5}
    return {name: arguments[name] for name in names}


def _reshaped(x, rng):
    shape, where = list(x.shape), rng.randrange(x.dim())
    size = shape[where]
    now = rng.choice(([size + rng.choice((1, 2, 17))], [0], [], [rng.choice((1, 2)), size], None))
    shape[where : where + 1] = now or []
    return torch.ones(()) if now is None else x.new_ones(shape)


def _huge(x, rng):
    shape = list(x.shape)
    shape[rng.randrange(len(shape))] = rng.choice((2**31, 2**40, 2**61))
    try:
        return torch.empty(shape, device="meta")
    except RuntimeError:  # more elements than torch itself can count
        return torch.empty(2**40, device="meta")


def _restrided(x, rng):
    return rng.choice((
        lambda: x.expand(2, *x.shape),
        lambda: x.as_strided([s + 1 for s in x.shape], [0] * x.dim()) if x.numel() else x[None],
        lambda: x.transpose(0, -1), lambda: x.unsqueeze(0)[..., :0],
    ))()  # fmt: skip


def _foreign(x, rng):
    return rng.choice((
        lambda: x.to("meta"), x.to_sparse, lambda: x.to(rng.choice(DTYPES)),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
        lambda: x.to(rng.choice(STRANGE_DTYPES)),
    ))()  # fmt: skip


DAMAGE = (_reshaped, _huge, _restrided, _foreign, lambda x, rng: rng.choice(STRANGE))


def damaged(arguments, rng):
    spoilt = dict(arguments)
    for name in rng.sample(sorted(spoilt), rng.randint(1, min(3, len(spoilt)))):
        value = spoilt[name]
        if isinstance(value, Tensor) and value.dim():
            spoilt[name] = rng.choice(DAMAGE)(value, rng)
        elif name in GEOMETRY:
            strange = (rng.choice(STRANGE_INTS), rng.choice((1, *STRANGE_INTS)))
            spoilt[name] = rng.choice((strange, strange[0], (1, 2, 3), (), rng.choice(STRANGE)))
        else:
            spoilt[name] = rng.choice((*STRANGE, *STRANGE_INTS))
    return spoilt


def public_call(rng):
    name = rng.choice(ops.__all__)
    function = getattr(ops, name)
    return name, function, [], damaged(valid(name, signature(function).parameters, rng), rng)


def raw_call(rng):
    """A call of an overload, past every check in Python."""
    name = rng.choice(reference.__all__)
    schema = getattr(torch.ops.torchgradx, name).default._schema
    arguments = valid(name, [argument.name for argument in schema.arguments], rng)
    return name, getattr(ops, name), list(damaged(arguments, rng).values()), {}


def _written(value):
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided and not value.is_nested else ""
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{value.dtype} {shape} {strides} {value.device} {value.layout}"
    return repr(value)


def run(seed, calls, log_path):
    """Make the calls, and say on stdout what went wrong. Called in a process of its own."""
    rng = random.Random(seed)
    refused = {"public": 0, "raw": 0}
    with Path(log_path).open("w") as log:
        for call in range(calls):
            kind = "public" if call % 2 or not ops.NATIVE else "raw"
            make = public_call if kind == "public" else raw_call
            name, function, positional, named = make(rng)
            written = [_written(v) for v in positional]
            written += [f"{key}={_written(v)}" for key, v in named.items()]
            line = f"{call} {kind} {name}({', '.join(written)})"
            log.seek(0)
            log.truncate()
            log.write(line)
            log.flush()
            try:
                function(*positional, **named)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                refused[kind] += 1
                if kind == "public" and not any(key in str(error) for key in named):
                    print(f"{line}: names no argument: {type(error).__name__}: {error}")
            except BaseException as error:
                print(f"{line}: {type(error).__name__}: {error}")
    print("refused", *refused.values(), file=sys.stderr)


@pytest.mark.parametrize("seed", range(CHILDREN))
def test_malformed_calls_are_refused_by_name(seed, tmp_path):
    log, calls = tmp_path / "last_call", CALLS // CHILDREN
    result = python("-W", "ignore", __file__, seed, calls, log, timeout=120)
    assert result.returncode == 0, f"{result.returncode} in {log.read_text()}: {result.stderr}"
    assert result.stdout == ""
    # Some damage is harmless (a dimension of 1 more everywhere); most is not.
    _, public, _raw = result.stderr.split()[-3:]
    assert int(public) > calls // 4


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
