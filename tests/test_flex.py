"""FlexAttention, forward on the CPU, once per kind of bias: every compilation takes seconds."""

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import flex, reference

LENGTH, HEADS, DIM = 100, 3, 16
POSITIONS = torch.arange(LENGTH)
LIMITS = {"window": 11, "documents": (POSITIONS > 40).long()[None], "key_mask": (POSITIONS > 3)[None]}
KINDS = {
    "no bias": ("none", {}, {}),
    "DistanceBias": ("kerple", {}, {}),
    "LevelBias": ("cable", {}, LIMITS),
    "LineBias": ("fire", {"threshold": 50.0, "hidden": 5}, {}),
}


@pytest.fixture(autouse=True)
def _forward_only():
    with torch.no_grad():
        yield


def make_call(bias: lw.Bias | None, **limits) -> lw.attention.Call:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, DIM, generator=generator)
    return lw.checked_call(q, k, v, bias=bias, **limits)


@pytest.mark.parametrize("kind", KINDS)
def test_flex_agrees_with_the_reference(kind):
    name, options, limits = KINDS[kind]
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, HEADS * DIM)
    encoding = lw.make(name, heads=HEADS, width=HEADS * DIM, **options)
    for parameter in encoding.parameters():
        parameter.normal_()
    call = make_call(encoding.bias(x, POSITIONS, POSITIONS), **limits)
    assert kind in ("no bias", type(call.in_lines().bias).__name__)
    assert not flex.objections(call)
    expected = reference.attend(call)
    # Sums of up to 100 terms of size 1 in another order.
    assert torch.allclose(flex.attend(call), expected, atol=10 * 2**-22, rtol=0)


def test_flex_says_what_it_cannot_do():
    positions = POSITIONS[None]
    function = lw.FunctionBias(lambda rows, columns, query, key: torch.zeros(1, 1, 1, 1), (positions, positions))
    assert "tile by tile" in flex.objections(make_call(function))[0]
    assert "whole rows" in flex.objections(make_call(None, rescore=lambda content, bias, q, mask: content))[0]
    with torch.enable_grad():
        call = make_call(lw.DistanceBias(torch.zeros(HEADS, 9, requires_grad=True), positions, positions))
        assert "no backward pass on the CPU" in flex.objections(call)[0]
