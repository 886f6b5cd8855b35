"""Second witness, continued: how many numbers each encoding learns, and where they start."""

import math

import pytest
import torch

import lengthwise as lw

GPT2_SMALL = {"heads": 12, "width": 768, "train_length": 512}

PARAMETERS = {
    ("alibi", True): 0,
    ("kerple", True): 2 * 12,
    ("kerple-power", True): 2 * 12,
    ("fire", True): 33 * 12 + 66,
    ("t5", True): 32 * 12,
    ("t5", False): 32 * 12,
    ("t5-clamped", True): 12 * 257,
    ("t5-clamped", False): 12 * 513,
    ("shaw", True): 17 * 64,
    ("shaw", False): 33 * 64,
    ("transformer-xl", True): 2 * 12 * 64 + 768 * 768,
    ("transformer-xl", False): 2 * 12 * 64 + 768 * 768,
    ("deberta", True): 512 * 768 + 2 * (768 * 768 + 768),
    ("inkling", True): 768 * 12 * 16 + 16 * 1024,
    ("inkling", False): 768 * 12 * 16 + 16 * 2047,
    ("rope", True): 0,
    ("cable", True): 2 * (768 * 12 + 12),
    ("cable-nw", True): 768 * 12 + 12,
    ("k-cable", True): 2 * (768 * 12 + 12),
    ("fox", True): 768 * 12 + 12,
    ("cope", True): 64 * 64,
    ("dape", True): (24 * 32 + 32) + (32 * 12 + 12),
    ("dapev2", True): (24 * 32 * 3 + 32) + (32 * 12 * 3 + 12),
    ("sandwich", True): 0,
    ("bam", True): 12,
    ("hope", True): 0,
    ("xpos", True): 0,
    ("fope", True): 0,
    ("pope", True): 12 * 64,
    ("grape-m", True): 32,
    ("grape-m-ctx", True): 32 + 768 + 1,
    ("carope", True): 768 * 12 + 12,
    ("repo", True): 2 * 768 * 96 + 96 * 12,
    ("selective-rope", True): 768 * 16 + 16 * 12 * 32 + 12 * 32 * 4,
    ("axial-rope", True): 0,
    ("mixed-rope", True): 12 * 2 * 32,
    ("alibi-2d", True): 0,
    ("swin", True): 45 * 45 * 12,
    ("grape-a", True): 2 * 12 * 64 + 12,
    ("stick-breaking", True): 0,
    ("path", True): 2 * 32 * 768 + 12 * 64 * 3 + 768 * 12 + 12,
    ("ssmax", True): 12,
    ("logn", True): 0,
    ("llama4-scale", True): 0,
    ("ministral3-scale", True): 0,
    ("log-floor", True): 0,
    ("headscale", True): 12,
    ("sink", True): 12,
    ("none", True): 0,
    ("learned", True): 512 * 768,
    ("sinusoidal", True): 0,
}


@pytest.mark.parametrize(("name", "causal"), PARAMETERS)
def test_an_encoding_learns_as_many_numbers_as_its_paper_says(name, causal):
    assert lw.make(name, causal=causal, **GPT2_SMALL).learned_parameters == PARAMETERS[name, causal]


def test_every_encoding_has_its_parameters_counted_here():
    assert {name for name, _ in PARAMETERS} == {n for n, cls in lw.ENCODINGS.items() if "encodings" in cls.__module__}


def test_twelve_layers_of_cable_add_what_the_paper_says_to_gpt2_small():
    assert 12 * lw.make("cable", **GPT2_SMALL).learned_parameters == 221_472


def made(name, **sizes):
    torch.manual_seed(1)
    return lw.make(name, **sizes)


def reset(name, **sizes):
    """Made, changed by training, and drawn anew."""
    encoding = made(name, **sizes)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(7.0)
    encoding.reset_parameters()
    return encoding


ONCE_AND_AGAIN = pytest.mark.parametrize("start", [made, reset])


def assert_normal(sample, *, std):
    """Mean 0 and this deviation, both within five standard errors: one in a million draws would not be."""
    count = sample.numel()
    assert abs(sample.mean().item()) <= 5 * std / math.sqrt(count)
    assert abs(sample.std().item() - std) <= 5 * std / math.sqrt(2 * count)


@ONCE_AND_AGAIN
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *(("t5", "table"), ("t5-clamped", "table"), ("learned", "weight")),
        *(("cable", "to_step.weight"), ("cable", "to_slope.weight"), ("cable-nw", "to_step.weight")),
        *(("k-cable", "to_step.weight"), ("k-cable", "to_slope.weight"), ("fox", "to_step.weight")),
        *(("shaw", "table"), ("transformer-xl", "content_query"), ("transformer-xl", "distance_query")),
        *(("transformer-xl", "to_key.weight"), ("inkling", "to_rows.weight"), ("inkling", "profiles")),
        *(("deberta", parameter) for parameter in ("table", "to_key.weight", "to_query.weight")),
        *(("fire", "into.weight"), ("fire", "out.weight")),
        *((name, f"{layer}.weight") for name in ("dape", "dapev2") for layer in ("into", "out")),
    ],
)
def test_what_gpt2_would_draw_starts_as_gpt2_draws_it(name, parameter, start):
    assert_normal(start(name, **GPT2_SMALL).get_parameter(parameter).detach(), std=0.02)


@ONCE_AND_AGAIN
@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        *((name, "to_step.bias", 0.0) for name in ("cable", "cable-nw", "k-cable", "fox")),
        *((name, "to_slope.bias", 0.0) for name in ("cable", "k-cable")),
        *((name, f"{layer}.bias", 0.0) for name in ("fire", "dape", "dapev2") for layer in ("into", "out")),
        *(("deberta", "to_key.bias", 0.0), ("deberta", "to_query.bias", 0.0)),
        *(("cope", "table", 0.0), ("fire", "c", 0.1), ("fire", "multiplier", 1.0)),
    ],
)
def test_what_is_not_drawn_starts_at_its_value(name, parameter, value, start):
    started = start(name, **GPT2_SMALL).get_parameter(parameter)
    assert torch.equal(started, torch.full_like(started, value))


def test_fire_starts_with_a_threshold_of_512():
    fire = lw.make("fire", **GPT2_SMALL)
    assert abs(fire.multiplier.item() * fire.threshold) == 512


@ONCE_AND_AGAIN
@pytest.mark.parametrize("name", ["kerple", "kerple-power"])
def test_kerple_starts_uniform_above_its_floor(name, start):
    heads = 4096
    encoding = start(name, heads=heads, width=heads)
    for value, high in ((encoding.p, 2.0), (encoding.a, 1.0)):
        assert value.min() >= 0.01
        assert value.max() < high
        # Five standard errors of the mean of a uniform sample, and of the part of it below a quarter. The floor moves
        # neither by more than itself.
        assert abs(value.mean().item() - high / 2) <= 5 * high / math.sqrt(12 * heads) + 0.01
        assert abs((value < high / 4).double().mean().item() - 1 / 4) <= 5 * math.sqrt(3 / 16 / heads) + 0.01


def test_cable_starts_with_a_mean_slope_of_about_015_per_token():
    # x of a layer norm has variance 1, so W x ~ N(0, 0.02 sqrt(768) = 0.554). E[relu] = 0.554 / sqrt(2 pi) = 0.221,
    # E[softplus] is near log 2 + 0.554 ** 2 / 8 = 0.731, and their product 0.16: the paper's 0.15 to its one digit.
    torch.manual_seed(4)
    encoding = lw.make("cable", **GPT2_SMALL)
    x, positions = torch.randn(31, 101, 768), torch.arange(101)
    last_row = encoding.bias(x, lw.TokenLayout.of(positions)).dense()[:, :, -1]
    slope = -(last_row[..., 0] / 100).mean().item()
    # A head's mean over tokens hardly depends on its weights, and one row's slope scatters by half of itself: the mean
    # of 12 heads and 31 rows is within 0.16 * 0.5 / sqrt(12 * 31) * 5 = 0.02 of 0.16.
    assert abs(slope - 0.16) <= 0.02
