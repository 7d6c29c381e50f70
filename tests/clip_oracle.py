"""The oracle for clipping and dot products: a float64 loop over single samples' gradients."""

import pytest
import torch
from attach_models import square
from attach_modes import need_native
from attach_oracle import each_gradient, prepared, tolerance

import torchgradx


def gradients(model, loss, *batch, dims=0):
    """[{parameter: gradient of loss(model, sample n)}, ...] in float64."""
    return list(each_gradient(model, loss, *batch, dims=dims))


def group_of(name, per):
    return {"model": "", "module": name.rpartition(".")[0], "parameter": name}[per]


def norms_of(rows, per):
    """{group: [N]}"""
    sums = {}
    for n, row in enumerate(rows):
        for name, g in row.items():
            sq = sums.setdefault(group_of(name, per), torch.zeros(len(rows), dtype=torch.float64))
            sq[n] += g.square().sum()
    return {group: sq.sqrt() for group, sq in sums.items()}


def weighted(rows, factors, per):
    """{parameter: sum over samples of factor * gradient}, factors: {group: [N]}"""
    return {name: sum(factors[group_of(name, per)][n] * row[name] for n, row in enumerate(rows))
            for name in (rows[0] if rows else {})}  # fmt: skip


def bounded(norms, max_norm):
    return {g: (max_norm / v).clamp(max=1).nan_to_num(1.0) for g, v in norms.items()}


def same(model, want, rtol, terms):
    """.grad, up to rounding of the terms {parameter: norm} that it is a sum of."""
    largest = max(map(float, terms.values()), default=0)
    for name, p in model.named_parameters():
        if name not in want:
            continue
        got = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        off = float((got.cpu().double() - want[name].cpu()).norm())
        bound = rtol * (float(terms[name]) + largest / 10) + 1e-300
        assert off <= bound, f"{name}.grad is off by {off}, and may be by {bound}"


def clipped(model, *batches, bound=0.5, loss=square, share=1.0):
    """{parameter: the sum of the means of each batch's clipped gradients, times share}"""
    found = {}
    for x in batches:
        rows = gradients(model, loss, x)
        part = weighted(rows, bounded(norms_of(rows, "model"), bound), "model")
        found = {n: found.get(n, 0) + g * share / len(x) for n, g in part.items()}
    return found


def is_sum(model, want, rtol=1e-9):
    same(model, want, rtol, {name: g.norm() + 1 for name, g in want.items()})


def check_clip(model, loss, *batch, dims=0, dtype=torch.float64, reduction="mean", **options):
    """Steps of an attached copy: `.grad` is the loop's clipped sum, added to what it held before;
    dots are the loop's; a factor of 1 for all leaves the bits of `.grad`. With weight_grad=False
    backward leaves `.grad` alone, and a factor of 1 for all adds the whole gradient."""
    need_native(options)
    rows, dots = gradients(model, loss, *batch, dims=dims), options.pop("dots", True)
    model, batch = prepared(model, batch, dtype)
    held = dict(model.named_parameters())
    rtol, deferred = tolerance(model, dtype), not options.get("weight_grad", True)
    directions = {name: torch.randn(p.shape) for name, p in held.items()}
    exact = [sum((g * directions[name]).sum() for name, g in row.items()) for row in rows]
    norms = norms_of(rows, "model")[""]
    of_directions = sum(v.double().square().sum() for v in directions.values()).sqrt()
    share = 1 / len(rows) if reduction == "mean" else 1.0
    along = {name: v.to(held[name].device) for name, v in directions.items()}
    options |= {"loss_reduction": reduction} | ({"directions": along} if dots else {})
    with torchgradx.attach(model, clip=True, **options) as probe:
        for per, before in (("model", None), ("parameter", 0.5), ("module", None)):
            groups = norms_of(rows, per)
            for p in model.parameters():
                p.grad = None if before is None else torch.full_like(p, before)
            bound = float(torch.cat(list(groups.values())).median())
            loss(model, *batch).backward()
            for name, p in held.items() if deferred else ():
                found = None if p.grad is None else p.grad.to_dense()
                assert found is None if before is None else (found == before).all(), f"{name}.grad"
            if dots:
                off = (probe.dot().cpu().double() - torch.stack(exact).cpu()).abs()
                assert (off <= (rtol * norms * of_directions).cpu() + 1e-300).all(), off
            plain = {n: None if p.grad is None else p.grad.to_dense().clone()
                     for n, p in held.items()}  # fmt: skip
            returned = probe.clip_grad_norm_(bound, per=per)
            again = probe.norms(per=per)
            if per == "model":
                assert torch.equal(returned, again)
            else:
                assert all(torch.equal(returned[key], again[key]) for key in again)
            factors = bounded(groups, bound)
            want = weighted(rows, {key: f * share for key, f in factors.items()}, per)
            if before is not None:
                want = {n: g + before * (plain[n] is not None) for n, g in want.items()}
            terms = {n: share * sum(row[n].norm() for row in rows) + (before or 0) * g.numel()
                     for n, g in want.items()}  # fmt: skip
            same(model, want, rtol, terms)
        if deferred:
            model.zero_grad()
        loss(model, *batch).backward()
        plain = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        probe.clip_grad_norm_(float("inf"))
        if deferred:
            want = {name: share * sum(row[name] for row in rows) for name in rows[0]}
            terms = {name: share * sum(row[name].norm() for row in rows) for name in want}
            same(model, want, rtol, terms)
        else:
            for p, g in zip(model.parameters(), plain, strict=True):
                assert g is None or torch.equal(p.grad.to_dense(), g)


def refuses(kind, match, probe, model, *args, **kwargs):
    """clip_grad_norm_(*args, **kwargs) raises this, and `.grad` is as it was."""
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(kind, match=match):
        probe.clip_grad_norm_(*args, **kwargs)
    for p, g in zip(model.parameters(), before, strict=True):
        assert g is None or torch.equal(p.grad, g)
