"""FlexAttention, forward on the CPU. A kernel takes seconds to compile, so most of it is tested without one."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

import lengthwise as lw
from lengthwise.attention import AttentionCall, checked_call, flex, run
from lengthwise.attention.backend import Refusal
from lengthwise.attention.flex import masks
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    FunctionBias,
    LevelBias,
    LineBias,
    QueryDistanceBias,
    SumBias,
    two_floats,
)
from lengthwise.rescore import ScoreFunction
from lengthwise.token_layout import Band, TokenLayout
from lengthwise.visibility import Visibility

BATCH, LENGTH, HEADS, DIM = 2, 300, 4, 16
SLOTS = torch.arange(LENGTH)[None]
ROUNDING = 10 * 2**-22
"""Sums of some hundred terms of size 1 in another order."""


@pytest.fixture(autouse=True)
def _forward_only():
    with torch.no_grad():
        yield


@pytest.fixture
def uncompiled(monkeypatch):
    """The same functions without a kernel."""
    monkeypatch.setattr(flex, "_kernel", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def make_call(bias: Bias | None = None, queries: int = LENGTH, **options: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, queries, DIM, generator=generator)
    k, v = torch.randn(2, BATCH, HEADS // 2, LENGTH, DIM, generator=generator)
    return checked_call(q, k, v, bias=bias, **options)


def assert_like_reference(call: AttentionCall) -> None:
    plan = flex.plan(dataclasses.replace(call, return_lse=False, sink=None))
    assert isinstance(plan, flex.FlexPlan)
    expected = run(call, "reference")
    found = flex.run(call, plan)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is None or torch.allclose(ours, theirs, atol=ROUNDING, rtol=0)
    assert (found[1] is not None) == (call.return_lse or call.sink is not None)


def level_bias(batch: int, heads: int, curve: str = "linear") -> LevelBias:
    level = torch.rand(batch, heads, LENGTH, dtype=torch.float64).cumsum(2)
    return LevelBias(level, level, torch.rand(batch, heads, LENGTH), curve)  # type: ignore[arg-type]


def split_levels(batch: int, heads: int) -> LevelBias:
    whole = level_bias(batch, heads)
    level, rest = two_floats(whole.key_level)
    return LevelBias(level, level, whole.slope, query_rest=rest, key_rest=rest)


def table(batch: int, heads: int) -> DistanceBias:
    positions = SLOTS + 5 * torch.arange(batch)[:, None]
    return DistanceBias(torch.randn(heads, 70), positions, positions, first=-4)


def lines(batch: int, heads: int) -> LineBias:
    curve = DistanceBias(torch.linspace(-1, 1, 2 * LENGTH - 1)[None], SLOTS, SLOTS, first=1 - LENGTH)
    slope, intercept = torch.randn(2, heads, 6)
    return LineBias(curve, torch.rand(batch, LENGTH), torch.rand(5).sort().values, slope, intercept)


def profiles(batch: int, heads: int, side: str, beyond: str) -> QueryDistanceBias:
    rows = torch.randn(batch, heads, LENGTH, 3)
    return QueryDistanceBias(rows, torch.randn(1, 3, 50), SLOTS, SLOTS, -4, side, beyond)  # type: ignore[arg-type]


KINDS: dict[str, Callable[[int, int], Bias | None]] = {
    "none": lambda b, h: None,
    "table": table,
    "levels": level_bias,
    "curved levels": lambda b, h: level_bias(b, h, "log1p_square"),
    "levels of two floats": split_levels,
    "steps": lambda b, h: LevelBias.of_steps(torch.rand(b, h, LENGTH), torch.rand(b, h, 1), start=0, queries=LENGTH),
    "lines": lines,
    "profiles": lambda b, h: profiles(b, h, "query", "clamp"),
    "profiles of keys": lambda b, h: profiles(b, h, "key", "zero"),
    "dense": lambda b, h: DenseBias(torch.randn(b, h, LENGTH, LENGTH)),
    "sum": lambda b, h: SumBias((table(b, h), SumBias((level_bias(b, h), lines(b, h))))),
}


@pytest.mark.parametrize("spread", [(BATCH, HEADS), (1, 1)], ids=["own", "one for all"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("uncompiled")
def test_every_kind_is_what_the_reference_says(kind, spread):
    torch.manual_seed(1)
    assert_like_reference(make_call(KINDS[kind](*spread), causal=kind != "lines"))


HOLES = (torch.arange(LENGTH) % 7 > 1).repeat(BATCH, 1) & (torch.arange(LENGTH) > torch.tensor([[130], [0]]))
DOCUMENTS = torch.stack([torch.arange(LENGTH) // 140, torch.arange(LENGTH) % 3])
LAYOUTS: dict[str, Callable[[], TokenLayout]] = {
    "plain": lambda: lw.layout(LENGTH),
    "two-sided": lambda: lw.layout(LENGTH, causal=False),
    "padding with holes": lambda: lw.layout(LENGTH, key_mask=HOLES),
    "documents": lambda: lw.layout(LENGTH, documents=DOCUMENTS),
    "both": lambda: lw.layout(LENGTH, documents=DOCUMENTS[:1], key_mask=HOLES),
    "the last of the queries": lambda: lw.layout(140, past=LENGTH - 140),
    "one query": lambda: lw.layout(1, past=LENGTH - 1),
    "behind all keys": lambda: TokenLayout.of(SLOTS[:, :9] + LENGTH + 7, SLOTS, start=LENGTH + 7),
    "room behind": lambda: TokenLayout.of(SLOTS[:, 100:109], SLOTS, start=100),
    "a mask": lambda: TokenLayout.of(
        SLOTS, mask=torch.rand(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    ),
}
WINDOWS: dict[str, Any] = {
    "whole": None,
    "window": 33,
    "bands": (Band(2, 40), Band(150, None, first=30)),
    "chunks": (Band(1, 3, chunk=16), Band(-1, 1, chunk=16)),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("uncompiled")
def test_every_mask_is_kept(layout, window):
    where = LAYOUTS[layout]()
    assert_like_reference(make_call(queries=where.query_count, layout=where, window=WINDOWS[window]))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_left_out_or_taken_whole_only_where_the_mask_says_so(layout, window):
    where = LAYOUTS[layout]()
    call = make_call(queries=where.query_count, layout=where, window=WINDOWS[window])
    rows, columns = ((-size) % masks.BLOCK for size in (call.queries, call.keys))
    padded = torch.nn.functional.pad(call.visibility.mask(), (0, columns, 0, rows))
    blocks = padded.unflatten(3, (-1, masks.BLOCK)).unflatten(2, (-1, masks.BLOCK))
    some, whole = masks.visible_blocks(call)
    assert not (blocks.any(5).any(3) & ~some).any()
    assert not (whole & ~blocks.all(5).all(3)).any()
    if layout == "plain":
        assert torch.equal(some, blocks.any(5).any(3))


EXTRAS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "logit scale": {"logit_scale": torch.linspace(-1, 3, LENGTH)[None, None]},
    "logit scale by head": {"logit_scale": torch.linspace(0.1, 3, HEADS, dtype=torch.bfloat16)[None, :, None]},
    "lse": {"return_lse": True},
    "sink": {"sink": torch.linspace(-2, 5, HEADS), "return_lse": True},
    "sink by row": {"sink": torch.linspace(-2, 5, BATCH * HEADS * LENGTH).view(BATCH, HEADS, LENGTH)},
    "all": {"softcap": 2.0, "logit_scale": torch.full((1, 1, 1), 1.3), "sink": torch.ones(HEADS), "return_lse": True},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.usefixtures("uncompiled")
def test_caps_scales_and_sinks_mean_what_the_reference_says(extra):
    torch.manual_seed(1)
    assert_like_reference(make_call(table(1, HEADS), key_mask=HOLES, **EXTRAS[extra]))


@pytest.mark.usefixtures("uncompiled")
def test_what_is_not_finite_stays_with_the_rows_that_see_it():
    call = make_call(layout=lw.layout(LENGTH, documents=DOCUMENTS[:1]))
    call.k[0, 0, 150, 3] = torch.inf
    out, _ = flex.run(call, flex.FlexPlan(()))
    assert torch.equal(out.isnan().all(-1), run(call, "reference")[0].isnan().any(-1))


def test_no_mask_is_filled_in(monkeypatch, uncompiled):
    def refuse(*_: object) -> Tensor:
        raise AssertionError("the whole mask")

    monkeypatch.setattr(Visibility, "mask", refuse)
    layout = lw.layout(LENGTH, documents=DOCUMENTS, key_mask=HOLES)
    call = make_call(layout=layout, window=(Band(2, 40), Band(90)))
    call.k[0, 0, 150, 3] = torch.inf
    flex.run(call, flex.FlexPlan(()))


@pytest.mark.usefixtures("uncompiled")
def test_layers_of_one_pass_share_a_block_mask_which_goes_with_the_layout():
    layout = lw.layout(LENGTH)
    first, second, windowed = (make_call(layout=layout, window=window) for window in (None, None, 33))
    assert masks.block_mask(first) is masks.block_mask(second)
    assert masks.block_mask(first) is not masks.block_mask(windowed)
    before = len(masks._block_masks)
    del first, second, windowed, layout
    gc.collect()
    assert len(masks._block_masks) == before - 1


def test_one_kernel_serves_seventy_lengths():
    generator = torch.Generator().manual_seed(0)
    before = counters["stats"]["unique_graphs"]
    for length in range(131, 201):
        x = torch.randn(1, 2, length, DIM, generator=generator)
        layout = lw.layout(length, key_mask=torch.arange(length)[None] > 2)
        bias = DistanceBias(torch.randn(2, length, generator=generator), layout.query, layout.key)
        found, expected = (lw.attend(x, x, x, layout=layout, bias=bias, backend=name) for name in ("flex", "reference"))
        assert torch.allclose(found, expected, atol=ROUNDING, rtol=0)
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.prove
def test_one_kernel_serves_a_query_that_decodes():
    generator = torch.Generator().manual_seed(0)
    before = counters["stats"]["unique_graphs"]
    for length in range(201, 271):
        x = torch.randn(1, 2, length, DIM, generator=generator)
        layout = lw.layout(1, past=length - 1)
        bias = DistanceBias(torch.randn(2, length, generator=generator), layout.query, layout.key)
        roads = (
            lw.attend(x[:, :, -1:], x, x, layout=layout, bias=bias, backend=name) for name in ("flex", "reference")
        )
        assert torch.allclose(*roads, atol=ROUNDING, rtol=0)
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_flex_agrees_with_the_reference(kind):
    torch.manual_seed(1)
    window = (Band(0, 90), Band(7, None, first=20, chunk=16))
    call = make_call(KINDS[kind](BATCH, HEADS), key_mask=HOLES, window=window, softcap=2.0)
    assert_like_reference(dataclasses.replace(call, logit_scale=torch.rand(BATCH, 1, LENGTH)))


def test_flex_says_what_it_cannot_do():
    function = FunctionBias(lambda rows, columns, query, key: torch.zeros(1, 1, 1, 1), (SLOTS, SLOTS))
    assert "tile by tile" in reasons(make_call(function))
    assert "tile by tile" in reasons(make_call(SumBias((table(1, HEADS), function))))
    rescore = ScoreFunction(lambda content, bias, q, k, mask, rows: content)
    assert "whole rows" in reasons(make_call(rescore=rescore))
    assert "log-sum-exp" in reasons(make_call(return_lse=True))
    assert "log-sum-exp" in reasons(make_call(sink=torch.zeros(HEADS)))
    with torch.enable_grad():
        learned = DistanceBias(torch.zeros(HEADS, 9, requires_grad=True), SLOTS, SLOTS)
        assert "no backward pass on the CPU" in reasons(make_call(learned))


def test_flex_says_what_it_cannot_do_off_the_cpu():
    def on_meta(dim: int, profiles: int, learned: bool) -> str:
        q = torch.zeros(1, HEADS, LENGTH, dim, device="meta")
        rows = torch.zeros(1, HEADS, LENGTH, profiles, device="meta", requires_grad=learned)
        layout = lw.layout(LENGTH, device="meta")
        own = torch.zeros(1, profiles, 50, device="meta")
        return reasons(
            checked_call(q, q, q, layout=layout, bias=QueryDistanceBias(rows, own, layout.query, layout.key))
        )

    with torch.enable_grad():
        assert "16 channels or more off the CPU, got 8" in on_meta(8, 1, learned=False)
        assert "several profiles" in on_meta(16, 2, learned=True)
        assert "profiles" not in on_meta(16, 2, learned=False) + on_meta(16, 1, learned=True)


def reasons(call: AttentionCall) -> str:
    refusal = flex.plan(call)
    assert isinstance(refusal, Refusal)
    return " ".join(refusal.reasons)
