"""A few queries against many keys in the C++ kernel: every kind, every mask, every precision, and odd numbers."""

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import choose, native, reference
from lengthwise.attention.native import build, few_rows

pytestmark = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")

BATCH, HEADS, KEYS, DIM, VALUE = 2, 6, 301, 24, 21
HALVES = (torch.bfloat16, torch.float16)


def make_call(name: str = "none", queries: int = 3, dtype: torch.dtype = torch.float32, **masks) -> lw.attention.Call:
    torch.manual_seed(0)
    encoding = lw.make(name, heads=HEADS, width=48, head_dim=DIM, train_length=64).requires_grad_(False)
    x = torch.randn(BATCH, KEYS, 48)
    key = torch.arange(KEYS)[None]
    q, k, v = (
        torch.randn(BATCH, HEADS, queries, DIM),
        torch.randn(BATCH, 3, KEYS, DIM),
        torch.randn(BATCH, 3, KEYS, VALUE),
    )
    bias = encoding.bias(x[:, -queries:], key[:, -queries:], key, encoding.state(x))
    return lw.checked_call(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, **masks)


def assert_like_reference(call: lw.attention.Call) -> None:
    """Within twice the error of the reference at the same precision against float64, which half precision's rounding of
    the output rules."""
    exact = reference.attend(doubled(call))
    ours, plain = ((found.attend(call).double() - exact).norm() for found in (few_rows, reference))
    assert ours <= 2 * plain


def doubled(call: lw.attention.Call) -> lw.attention.Call:
    masks = {"key_mask": call.key_mask, "documents": call.documents, "window": call.window}
    return lw.checked_call(call.q.double(), call.k.double(), call.v.double(), bias=call.bias, **masks)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["none", "t5", "kerple", "alibi", "cable", "fire", "k-cable"])
def test_every_kind_of_bias_is_added_in_every_precision(name, dtype):
    call = make_call(name, dtype=dtype)
    assert choose(call) == "native"
    assert_like_reference(call)


MASKS = {
    "padding with a hole": {"key_mask": (torch.arange(KEYS) % 7 > 1).expand(BATCH, -1) & (torch.arange(KEYS) > 130)},
    "documents": {"documents": (torch.arange(KEYS) // 100)[None]},
    "window": {"window": 33},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["t5", "cable", "k-cable"])
def test_every_mask_is_kept(name, masks):
    assert_like_reference(make_call(name, **masks))


def test_a_table_is_read_right_where_positions_have_gaps_or_it_ends():
    call = make_call()
    key = 2 * torch.arange(KEYS)[None] + torch.arange(KEYS) % 2
    bias = lw.DistanceBias(torch.randn(HEADS, 50), key[:, -3:], key, first=-4)
    assert_like_reference(lw.checked_call(call.q, call.k, call.v, bias=bias))


def test_straight_lines_are_added_whether_a_block_has_one_or_many():
    call = make_call()
    key = torch.arange(KEYS)[None]
    for knots in (torch.rand(40).sort().values, torch.tensor([0.999])):
        slope, intercept = torch.randn(2, HEADS, len(knots) + 1)
        curve = lw.DistanceBias(torch.linspace(0, 1, KEYS)[None], key[:, -3:], key)
        lines = lw.LineBias(curve, torch.rand(BATCH, 3), knots, slope, intercept)
        assert_like_reference(lw.checked_call(call.q, call.k, call.v, bias=lines))


@pytest.mark.parametrize("name", ["cable", "cable-nw", "fox"])
def test_steps_are_summed_to_the_same_levels_wherever_they_lie(name):
    encoding = lw.make(name, heads=HEADS, width=48, head_dim=DIM, train_length=64)
    call, key, x = make_call(), torch.arange(KEYS), torch.randn(BATCH, KEYS, 48)
    levels = encoding.bias(x[:, -3:], key[-3:], key, encoding.state(x))
    with torch.no_grad():
        state = {"step": torch.stack([encoding.state(x)["step"]] * 3, -1)[..., 1]}
        steps = encoding.bias(x[:, -3:], key[-3:], key, state)
        assert isinstance(steps, lw.bias.StepBias)
        first, second = (
            few_rows.attend(lw.checked_call(call.q, call.k, call.v, bias=bias)) for bias in (levels, steps)
        )
        assert torch.allclose(first, second, rtol=0, atol=1e-6)  # float64 sums from one end or the other, then the same
        assert torch.equal(levels.dense(), steps.dense())
        room = encoding.bias(x[:, :3], key[200:203], key, state, start=200)
        shifted = lw.checked_call(call.q, call.k, call.v, bias=room, start=200)
        assert choose(shifted) == "native"
        assert torch.allclose(few_rows.attend(shifted), reference.attend(shifted), atol=1e-5)


def test_keys_and_values_are_read_where_they_lie():
    call = make_call("alibi")
    wide = torch.full((BATCH, KEYS + 9, 3, DIM + 5), torch.nan)
    k = wide.transpose(1, 2)[:, :, :KEYS, :DIM]
    k.copy_(call.k)
    moved = lw.checked_call(call.q, k, call.v, bias=call.bias)
    assert not k.is_contiguous()
    assert torch.equal(few_rows.attend(moved), few_rows.attend(call))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_changes_rounding_alone(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_like_reference(make_call("kerple", queries=1))


def test_a_row_that_sees_nothing_is_zero():
    nothing = make_call("alibi", key_mask=torch.zeros(BATCH, KEYS, dtype=torch.bool))
    assert few_rows.attend(nothing).eq(0).all()


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_the_rows_that_may_see_it(place, bad):
    call = make_call("cable", documents=(torch.arange(KEYS) >= KEYS - 2).long()[None])
    getattr(call, place)[0, 0, 5] = bad
    out = native.attend(call)
    assert out[0, :2, 0].isnan().all()
    assert out[0, :2, 1:].isfinite().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_a_call_that_needs_gradients_is_not_one_of_a_few_rows():
    call = make_call("none", queries=1)
    assert few_rows.suits(call)
    assert not few_rows.suits(lw.checked_call(call.q.requires_grad_(), call.k, call.v))
