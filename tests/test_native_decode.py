"""A few queries against many keys in the C++ kernel: every kind, every mask, every precision, and odd numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthwise as lw
from lengthwise.attention import AttentionCall, checked_call, choose, run
from lengthwise.attention.native import build, decode
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
from lengthwise.token_layout import Band, TokenLayout

pytestmark = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")

BATCH, HEADS, KEYS, DIM, VALUE = 3, 6, 301, 24, 21
HALVES = (torch.bfloat16, torch.float16)
CURVES = ("linear", "log1p_square")


@pytest.fixture(autouse=True)
def _forward_only():
    with torch.no_grad():
        yield


def make_call(
    bias: Bias | None = None, queries: int = 3, dtype: torch.dtype = torch.float32, **options: Any
) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, queries, DIM, generator=generator)
    k, v = (torch.randn(BATCH, 3, KEYS, size, generator=generator) for size in (DIM, VALUE))
    return checked_call(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, return_lse=True, **options)


def doubled(call: AttentionCall) -> AttentionCall:
    return dataclasses.replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())


def assert_like_reference(call: AttentionCall) -> None:
    """Within twice the error of the reference at the same precision against float64, and the output's rounding."""
    exact = run(doubled(call), "reference")
    ours, plain = run(call, "native"), run(call, "reference")
    for found, theirs, truth in zip(ours, plain, exact, strict=True):
        assert found.dtype == theirs.dtype
        empty = truth == -torch.inf
        assert torch.equal(found == -torch.inf, empty)
        errors = [(x.double() - truth).masked_fill(empty, 0).norm() for x in (found, theirs)]
        rounding = truth.masked_fill(empty, 0).norm() * torch.finfo(found.dtype).eps
        assert errors[0] <= 2 * errors[1] + rounding


def function_tile(rows: Any, columns: Any, query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    distance = (query[:, None, rows, None] - key[:, None, None, columns]).float()
    return weight[:, :, None, None] * distance.square().add(1).log()


def levels_of(step: Tensor, slope: Tensor, curve: str) -> LevelBias:
    level = step.double().cumsum(2)
    return LevelBias(level[..., -3:], level, slope, curve)  # type: ignore[arg-type]


def two_sided_lines(batch: int, heads: int) -> Bias:
    table = torch.linspace(-1, 1, 2 * KEYS - 1)[None]
    return lines(batch, heads, DistanceBias(table, positions(batch)[:, -3:], positions(batch), first=1 - KEYS))


def lines(batch: int, heads: int, curve: DistanceBias) -> Bias:
    knots = torch.rand(9).sort().values
    return LineBias(curve, torch.rand(batch, 3), knots, torch.randn(heads, 10), torch.randn(heads, 10))


def positions(batch: int) -> Tensor:
    return torch.arange(KEYS) + 5 * torch.arange(batch)[:, None]


def table(batch: int, heads: int) -> DistanceBias:
    return DistanceBias(torch.randn(heads, 70), positions(batch)[:, -3:], positions(batch), first=-4)


def profiles(rows: Tensor, side: str, beyond: str) -> QueryDistanceBias:
    at = positions(rows.shape[0])
    return QueryDistanceBias(rows, torch.randn(1, 4, 70), at[:, -3:], at, -4, side, beyond)  # type: ignore[arg-type]


KINDS: dict[str, Callable[[int, int], Bias]] = {
    "table": table,
    "levels": lambda b, h: levels_of(torch.rand(b, h, KEYS), torch.rand(b, h, 3), "linear"),
    "steps": lambda b, h: LevelBias.of_steps(torch.rand(b, h, KEYS), torch.rand(b, h, 1), start=KEYS - 3, queries=3),
    "curved levels": lambda b, h: levels_of(torch.rand(b, h, KEYS), torch.rand(b, h, 3), "log1p_square"),
    "curved steps": lambda b, h: LevelBias.of_steps(
        torch.rand(b, h, KEYS), torch.rand(b, h, 3), start=KEYS - 3, queries=3, curve="log1p_square"
    ),
    "profiles": lambda b, h: profiles(torch.randn(b, h, 3, 4), "query", "clamp"),
    "profiles of keys": lambda b, h: profiles(torch.randn(b, h, KEYS, 4), "key", "zero"),
    "lines": lambda b, h: lines(
        b, h, DistanceBias(torch.linspace(0, 1, KEYS)[None], positions(b)[:, -3:], positions(b))
    ),
    "two-sided lines": two_sided_lines,
    "function": lambda b, h: FunctionBias(function_tile, (positions(b)[:, -3:], positions(b), torch.randn(b, h))),
    "dense": lambda b, h: DenseBias(torch.randn(b, h, 3, KEYS)),
    "sum": lambda b, h: SumBias(
        (table(b, h), KINDS["steps"](b, h), SumBias((KINDS["dense"](b, h), KINDS["curved steps"](b, h))))
    ),
}
SPREADS = {"own": (BATCH, HEADS), "one sequence": (1, HEADS), "one head": (BATCH, 1), "one of both": (1, 1)}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_of_one_sequence_or_one_head_spreads_over_all(kind, spread):
    torch.manual_seed(1)
    causal = kind != "two-sided lines"
    call = make_call(KINDS[kind](*SPREADS[spread]), causal=causal)
    assert choose(call)[0] == "native"
    assert_like_reference(call)


def test_steps_of_one_sequence_are_never_read_beyond_their_end():
    torch.manual_seed(1)
    step, slope = torch.rand(1, 12, 4096), torch.rand(1, 12, 1)
    q, k = torch.randn(4, 12, 1, 64), torch.randn(4, 12, 4096, 64)
    bias = LevelBias.of_steps(step, slope, start=4095, queries=1)
    together = lw.attend(q, k, k, bias=bias, backend="native")
    one_by_one = [lw.attend(q[n : n + 1], k[n : n + 1], k[n : n + 1], bias=bias, backend="native") for n in range(4)]
    assert torch.equal(together, torch.cat(one_by_one))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["none", "t5", "kerple", "alibi", "cable", "fire", "k-cable"])
def test_every_encoding_is_added_in_every_precision(name, dtype):
    torch.manual_seed(1)
    encoding = lw.make(name, heads=HEADS, width=48, head_dim=DIM, train_length=64)
    x, layout = torch.randn(BATCH, KEYS, 48), lw.layout(3, past=KEYS - 3)
    bias = encoding.bias(x[:, -3:], layout, encoding.state(x))
    assert_like_reference(make_call(bias, dtype=dtype, layout=layout))


HOLES = (torch.arange(KEYS) % 7 > 1).repeat(BATCH, 1) & (torch.arange(KEYS) > torch.tensor([[130], [0], [290]]))
DOCUMENTS = torch.stack([torch.arange(KEYS) // 100, torch.arange(KEYS) % 3, torch.zeros(KEYS, dtype=torch.int64)])
SLOTS = torch.arange(KEYS)[None]
LAYOUTS: dict[str, Callable[[], TokenLayout]] = {
    "plain": lambda: lw.layout(3, past=KEYS - 3),
    "two-sided": lambda: lw.layout(3, past=KEYS - 3, causal=False),
    "padding with holes": lambda: lw.layout(3, past=KEYS - 3, key_mask=HOLES),
    "documents": lambda: lw.layout(3, past=KEYS - 3, documents=DOCUMENTS),
    "one row of documents": lambda: lw.layout(3, past=KEYS - 3, documents=DOCUMENTS[:1]),
    "both": lambda: lw.layout(3, past=KEYS - 3, documents=DOCUMENTS, key_mask=HOLES[:1]),
    "room behind": lambda: TokenLayout.of(SLOTS[:, 200:203], SLOTS, start=200),
    "room behind, two-sided": lambda: TokenLayout.of(SLOTS[:, 200:203], SLOTS, start=200, causal=False),
    "queries behind all keys": lambda: TokenLayout.of(SLOTS[:, :3] + KEYS + 7, SLOTS, start=KEYS + 7),
    "some of the keys": lambda: lw.layout(3, past=KEYS + 80, documents=torch.arange(KEYS + 83)[None] // 300).keys(
        10, KEYS
    ),
    "later keys": lambda: TokenLayout.of(SLOTS[:, :3], torch.arange(KEYS + 9)[None], start=0).keys(9, KEYS),
}
WINDOWS: dict[str, Any] = {
    "whole": None,
    "window": 33,
    "band": Band(2, 40),
    "bands": (Band(0, 20), Band(20, None, first=30), Band(60, 70)),
    "chunks": (Band(1, 3, chunk=16), Band(0, 1, chunk=16)),
    "band ahead": Band(-5, 9),
    "band without end": Band(-(2**62), 2**62, chunk=2**40),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mask_is_kept(layout, window):
    torch.manual_seed(1)
    where, level = LAYOUTS[layout](), torch.rand(1, HEADS, KEYS, dtype=torch.float64).cumsum(2)
    bias = LevelBias(torch.rand(BATCH, HEADS, 3, dtype=torch.float64) + 150, level, torch.rand(1, 1, 1))
    assert_like_reference(make_call(bias, layout=where, window=WINDOWS[window]))


EXTRAS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "high softcap": {"softcap": 50.0},
    "logit scale": {"logit_scale": torch.tensor([1.7, 0.0, -0.4])[None, None]},
    "logit scale by head": {"logit_scale": torch.linspace(0.1, 3, HEADS, dtype=torch.bfloat16)[None, :, None]},
    "logit scale by sequence": {"logit_scale": torch.linspace(0.1, 3, BATCH)[:, None, None]},
    "sink": {"sink": torch.linspace(-2, 9, HEADS)},
    "sink by row": {"sink": torch.linspace(-2, 9, BATCH * HEADS * 3).view(BATCH, HEADS, 3)},
    "sink of one query": {"sink": torch.linspace(-2, 9, HEADS).half()[None, :, None]},
    "all": {"softcap": 2.0, "logit_scale": torch.full((1, 1, 3), 1.3), "sink": torch.ones(HEADS)},
}


@pytest.mark.parametrize("hidden", [False, True], ids=["all keys", "no key"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_caps_scales_and_sinks_mean_what_the_reference_says(extra, hidden):
    torch.manual_seed(1)
    key_mask = torch.tensor([[True], [not hidden], [True]]).repeat(1, KEYS)
    assert_like_reference(make_call(table(BATCH, HEADS), key_mask=key_mask, scale=1.0, **EXTRAS[extra]))


def test_a_row_that_sees_nothing_is_zero_and_its_lse_is_minus_infinity():
    out, lse = run(make_call(table(1, HEADS), key_mask=torch.zeros(BATCH, KEYS, dtype=torch.bool)), "native")
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


@pytest.mark.parametrize("sizes", [(0, 4, 2, 5), (2, 4, 0, 5), (2, 4, 2, 0)], ids=["batch", "queries", "keys"])
def test_nothing_at_all_is_no_problem(sizes):
    batch, heads, queries, keys = sizes
    q, k = torch.randn(batch, heads, queries, 8), torch.randn(batch, heads, keys, 8)
    out, lse = lw.attend(q, k, k, causal=False, sink=torch.ones(heads), return_lse=True, backend="native")
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.ones(batch, heads, queries))


@pytest.mark.parametrize("curve", CURVES)
def test_levels_of_two_floats_are_added_up(curve):
    torch.manual_seed(1)
    exact = levels_of(1000 * torch.rand(1, HEADS, KEYS), torch.rand(1, 1, 1), curve)
    (query, query_rest), (key, key_rest) = (two_floats(level) for level in (exact.query_level, exact.key_level))
    split = LevelBias(query, key, exact.slope, curve, query_rest=query_rest, key_rest=key_rest)
    ours, theirs = (run(make_call(bias), "native")[0] for bias in (split, exact))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)  # two float32 hold 48 bits of a level


def test_a_table_is_read_right_where_positions_have_gaps_or_it_ends():
    torch.manual_seed(1)
    key = 2 * torch.arange(KEYS)[None] + torch.arange(KEYS) % 2
    assert_like_reference(make_call(DistanceBias(torch.randn(HEADS, 50), key[:, -3:], key, first=-4)))


@pytest.mark.parametrize("knots", [torch.rand(40).sort().values, torch.tensor([0.999])], ids=["many", "one"])
def test_straight_lines_are_added_whether_a_block_has_one_or_many(knots):
    torch.manual_seed(1)
    slope, intercept = torch.randn(2, HEADS, len(knots) + 1)
    curve = DistanceBias(torch.linspace(0, 1, KEYS)[None], SLOTS[:, -3:], SLOTS)
    assert_like_reference(make_call(LineBias(curve, torch.rand(BATCH, 3), knots, slope, intercept)))


@pytest.mark.parametrize("start", [0, 200, KEYS - 3])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("causal", [True, False])
def test_steps_are_summed_to_the_same_levels_wherever_they_lie(start, curve, causal):
    torch.manual_seed(1)
    step, slope = torch.rand(BATCH, KEYS, HEADS, 2).permute(0, 2, 1, 3)[..., 1], torch.rand(1, HEADS, 3)
    layout = TokenLayout.of(SLOTS[:, start : start + 3], SLOTS, start=start, causal=causal)
    steps = LevelBias.of_steps(step, slope, start=start, queries=3, curve=curve)
    assert steps.step is step
    first, second = (run(make_call(bias, layout=layout), "native")[0] for bias in (steps, steps.summed()))
    assert torch.allclose(first, second, rtol=0, atol=1e-6)  # float64 sums from one end or the other, then the same
    assert_like_reference(make_call(steps, layout=layout))


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
def test_steps_of_another_precision_lose_nothing(dtype):
    torch.manual_seed(1)
    step = torch.rand(BATCH, HEADS, KEYS).to(dtype)
    assert_like_reference(make_call(LevelBias.of_steps(step, torch.rand(1, 1, 1), start=KEYS - 3, queries=3)))


def test_steps_that_do_not_reach_the_queries_are_refused():
    bias = LevelBias.of_steps(torch.rand(1, 1, KEYS), torch.rand(1, 1, 1), start=KEYS, queries=3)
    layout = TokenLayout.of(SLOTS[:, :3] + KEYS, SLOTS, start=KEYS)
    with pytest.raises(NotImplementedError, match=f"none to queries from slot {KEYS} on"):
        run(make_call(bias, layout=layout), "native")


def test_keys_and_values_are_read_where_they_lie():
    call = make_call(table(1, HEADS))
    wide = torch.full((BATCH, KEYS + 9, 3, DIM + 5), torch.nan)
    k = wide.transpose(1, 2)[:, :, :KEYS, :DIM]
    k.copy_(call.k)
    assert not k.is_contiguous()
    moved = dataclasses.replace(call, k=k)
    assert torch.equal(run(moved, "native")[0], run(call, "native")[0])


def test_channels_that_do_not_lie_side_by_side_are_read_right():
    call = make_call(table(1, HEADS))
    moved = dataclasses.replace(call, k=call.k.transpose(2, 3).contiguous().transpose(2, 3))
    assert torch.equal(run(moved, "native")[0], run(call, "native")[0])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_changes_rounding_alone(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(1)
    assert_like_reference(make_call(KINDS["sum"](BATCH, HEADS), sink=torch.ones(HEADS)))


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["", "softcap"])
@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_the_rows_that_see_it(place, bad, softcap):
    layout = lw.layout(3, past=KEYS - 3, documents=(torch.arange(KEYS) >= KEYS - 2).long()[None])
    torch.manual_seed(1)
    call = make_call(KINDS["steps"](BATCH, HEADS), layout=layout, softcap=softcap)
    clean = run(call, "native")
    getattr(call, place)[0, 0, 5, 3] = bad
    for found, before in zip(run(call, "native"), clean, strict=True):
        assert found[0, :2, 0].isnan().all()
        found[0, :2, 0] = before[0, :2, 0]
        assert torch.equal(found, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bias_that_is_not_finite_means_what_the_reference_says(bad):
    value = torch.zeros(1, 1, 3, KEYS)
    value[..., 1, 7], value[..., 2, :] = bad, bad
    call = make_call(DenseBias(value))
    for found, expected in zip(run(call, "native"), run(call, "reference"), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-5, equal_nan=True)


def test_a_call_that_needs_gradients_is_not_decoding():
    call = make_call(queries=1)
    assert isinstance(choose(call, "native")[1], decode.DecodePlan)
    with torch.enable_grad():
        trained = dataclasses.replace(call, q=call.q.requires_grad_())
        assert not isinstance(choose(trained)[1], decode.DecodePlan)
