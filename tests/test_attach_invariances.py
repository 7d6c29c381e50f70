"""What changes no norm, in small models: threads, memory formats, samples' order, a second run."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    every_mode,
    fallback_mode,
    loop,
    loop_model,
    mlp,
    need_native,
    square,
)
from torch import nn

import torchgradx

N = 4


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


@every_mode
def test_the_model_of_the_forum_question(options):
    model = Model(
        lambda m, x: m.fc(torch.relu(m.conv2(torch.relu(m.conv1(x)))).flatten(1)),
        conv1=nn.Conv2d(3, 10, 3, padding=1, bias=False),
        conv2=nn.Conv2d(10, 20, 3, padding=1, stride=2, bias=False),
        fc=nn.Linear(500, 10, bias=False),
    )
    x, y = torch.randn(50, 3, 10, 10), torch.randint(0, 10, (50,))
    check(model, cross_entropy, x, y, dtype=torch.float32, **options)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


@both_dtypes
@a_few_modes
def test_a_cnn_with_group_norm_and_in_place_activations(options, dtype):
    x, y = torch.randn(N, 2, 6, 6), torch.randint(0, 5, (N,))
    check(small_cnn(), cross_entropy, x, y, dtype=dtype, **options)


@every_mode
@pytest.mark.parametrize("threads", [2, 3])
def test_norms_do_not_depend_on_the_number_of_threads(threads, options):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    x, y = torch.randn(33, 3, 8, 8), torch.randint(0, 5, (33,))
    want = loop(model, cross_entropy, x, y)
    torch.set_num_threads(threads)
    check(model, cross_entropy, x, y, dtype=torch.float32, want=want, **options)


@every_mode
@pytest.mark.parametrize("what", ["input", "model", "both"])
def test_channels_last_changes_nothing(what, options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, stride=2))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    if what != "input":
        model = model.to(memory_format=torch.channels_last)
    if what != "model":
        x = x.to(memory_format=torch.channels_last)
    check(model, square, x, want=want, **options)


@every_mode
def test_channels_last_changes_nothing_to_normalisations(options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.PReLU(4))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    last = torch.channels_last
    check(model.to(memory_format=last), square, x.to(memory_format=last), want=want, **options)


@every_mode
def test_strided_and_expanded_inputs_are_as_good_as_contiguous_ones(options):
    images = torch.randn(N, 8, 2, 9).permute(0, 2, 1, 3)[..., ::2]
    check(nn.Conv2d(2, 3, 3), square, images, **options)
    check(nn.Linear(3, 4), square, torch.randn(3, N, 5).permute(1, 2, 0), **options)
    check(nn.Linear(3, 4), square, torch.randn(N, 1, 3).expand(N, 5, 3), **options)


@every_mode
def test_an_expanded_output_gradient_is_as_good_as_a_dense_one(options):
    def total(model, x):
        return model(x).flatten(1).sum(1).mean()

    check(nn.Linear(3, 4), total, torch.randn(N, 5, 3), **options)
    check(nn.Conv2d(2, 3, 3, padding=1), total, torch.randn(N, 2, 5, 5), **options)


def test_norms_of_a_bfloat16_model_are_float32():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).bfloat16()
    x = torch.randn(N, 9, 16).bfloat16()
    want = loop_model(model, square, x)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        norms = probe.norms()
    assert norms.dtype == torch.float32
    # 8 roundings to bfloat16 on a sample's way, each of 2^-9
    assert torch.allclose(norms.double(), want, rtol=8 * 2**-9)


@fallback_mode
def test_permuting_samples_permutes_norms(options):
    model, order = small_cnn().double(), torch.tensor([2, 0, 3, 1])
    x, y = torch.randn(N, 2, 6, 6).double(), torch.randint(0, 5, (N,))
    with torchgradx.attach(model, **options) as probe:
        cross_entropy(model, x, y).backward()
        norms = probe.norms()
        cross_entropy(model, x[order], y[order]).backward()
        assert torch.allclose(probe.norms(), norms[order], rtol=1e-9)


@a_few_modes
def test_the_same_bits_come_out_twice(options):
    model, x, y = small_cnn(), torch.randn(32, 2, 6, 6), torch.randint(0, 5, (32,))
    with torchgradx.attach(model, **options) as probe:
        runs = []
        for _ in range(2):
            model.zero_grad()
            cross_entropy(model, x, y).backward()
            runs.append([probe.norms(), *probe.norms(per="parameter").values()])
            runs[-1] += [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@every_mode
def test_a_sample_without_a_gradient_has_exactly_zero(options):
    need_native(options)
    model, x = mlp(), torch.randn(N, 6, 3)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0])
    with torchgradx.attach(model, **options) as probe:
        (model(x).square().flatten(1).sum(1) * weights).mean().backward()
        norms = probe.norms()
    assert (norms > 0).tolist() == [True, False, True, False]


@a_few_modes
@pytest.mark.parametrize("factor", [1e-18, 1e15])
def test_very_small_and_very_large_gradients_survive_float32(factor, options):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    x = torch.rand(N, 2, 6, 6)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        (square(model, x) * factor).backward()
        norms = probe.norms().double() / factor
    assert torch.allclose(norms, want, rtol=1e-4), f"{norms.tolist()} and not {want.tolist()}"
