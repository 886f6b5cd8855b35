"""Levels as channels of SDPA: as exact as half precision is without a bias, and never where something would be lost."""

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import AttentionCall, checked_call, reference, sdpa

LENGTH, HEADS, DIM = 1531, 2, 32
POSITIONS = torch.arange(LENGTH)


def error(name: str, dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    x = torch.randn(1, LENGTH, HEADS * DIM).to(dtype)
    qkv = torch.randn(3, 1, HEADS, LENGTH, DIM, dtype=torch.float64)
    encoding = lw.make(name, heads=HEADS, width=HEADS * DIM)
    with torch.no_grad():
        call = checked_call(*qkv.to(dtype), bias=encoding.bias(x, lw.TokenLayout.of(POSITIONS)))
        exact_call = checked_call(*qkv, bias=encoding.bias(x.double(), lw.TokenLayout.of(POSITIONS)))
        exact = reference.run(exact_call, reference.plan(exact_call))[0]
        assert sdpa.rides_in_channels(call) == (name != "none")
        return float((sdpa.run(call, sdpa.plan(call))[0] - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["alibi", "cable", "cable-nw", "fox"])
def test_levels_in_channels_are_as_exact_as_no_bias_at_all(name, dtype):
    assert error(name, dtype) <= 2 * error("none", dtype)


def call_with(level: torch.Tensor, dtype: torch.dtype = torch.bfloat16, **options) -> AttentionCall:
    length = level.shape[-1]
    q, k, v = torch.zeros(3, 1, HEADS, length, DIM, dtype=dtype)
    slope = torch.ones(1, 1, 1, requires_grad=options.pop("learned", False))
    return checked_call(q, k, v, bias=lw.LevelBias(level, level, slope), **options)


def test_levels_ride_only_where_nothing_is_lost():
    rising = torch.arange(9.0, dtype=torch.float64)[None, None]
    assert sdpa.rides_in_channels(call_with(rising))
    assert not sdpa.rides_in_channels(call_with(rising.flip(-1)))
    assert not sdpa.rides_in_channels(call_with(rising, torch.float32))
    assert not sdpa.rides_in_channels(call_with(rising, learned=True))
    assert not sdpa.rides_in_channels(call_with(rising, causal=False))
    assert not sdpa.rides_in_channels(call_with(rising, window=3))
    assert not sdpa.rides_in_channels(call_with(1e5 * rising))
    # A score of 8,192 has in float32 the rounding that a weight has in float16.
    assert sdpa.rides_in_channels(call_with(1024 * rising, torch.float16))
    assert not sdpa.rides_in_channels(call_with(1025 * rising, torch.float16))
    assert sdpa.rides_in_channels(call_with(1025 * rising, torch.bfloat16))
    assert not sdpa.rides_in_channels(call_with(rising * torch.nan))
