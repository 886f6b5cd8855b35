"""The reference against loops, and every backend against the reference, for every way of forbidding."""

import math
import os

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import BACKENDS, choose, memory, sdpa
from lengthwise.testing import TRIED

BATCH, HEADS, KV_HEADS, KEYS, DIM, VALUE = 2, 6, 2, 13, 5, 7
POSITIONS = torch.arange(KEYS)
PADDING = torch.ones(BATCH, KEYS, dtype=torch.bool)
PADDING[0, :4] = False
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [3] * 2 + [4] * 9 + [9] * 2])

LIMITS = {
    "causal": {},
    "two-sided": {"causal": False},
    "window": {"window": 4},
    "two-sided window": {"window": 4, "causal": False},
    "padding": {"key_mask": PADDING},
    "documents": {"documents": DOCUMENTS},
    "everything": {"window": 3, "key_mask": PADDING, "documents": DOCUMENTS},
}


def inputs(queries: int = KEYS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, queries, DIM, generator=generator)
    k = torch.randn(BATCH, KV_HEADS, KEYS, DIM, generator=generator)
    v = torch.randn(BATCH, KV_HEADS, KEYS, VALUE, generator=generator)
    table = torch.randn(HEADS, KEYS, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype), lw.DistanceBias(table, POSITIONS[-queries:], POSITIONS)


def may_meet(b: int, i: int, j: int, limits: dict) -> bool:
    causal = limits.get("causal", True)
    return (
        (j <= i if causal else True)
        and abs(i - j) < limits.get("window", math.inf)
        and ("key_mask" not in limits or bool(PADDING[b, j]))
        and ("documents" not in limits or DOCUMENTS[b, i] == DOCUMENTS[b, j])
    )


def attend_in_loops(q, k, v, bias, limits, start):
    dense = bias.dense().double()
    out = torch.zeros(BATCH, HEADS, q.shape[2], VALUE, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            for i in range(q.shape[2]):
                seen = [j for j in range(KEYS) if may_meet(b, start + i, j, limits)]
                group = h // (HEADS // KV_HEADS)
                scores = [float(q[b, h, i].double() @ k[b, group, j].double()) / math.sqrt(DIM) for j in seen]
                powers = [math.exp(s + float(dense[0, h, i, j])) for s, j in zip(scores, seen, strict=True)]
                for power, j in zip(powers, seen, strict=True):
                    out[b, h, i] += power / sum(powers) * v[b, group, j].double()
    return out


@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("queries", [KEYS, 5, 1])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_attention_is_what_plain_loops_give(limits, queries, backend):
    q, k, v, bias = inputs(queries)
    expected = attend_in_loops(q, k, v, bias, limits, KEYS - queries)
    out = lw.attend(q, k, v, bias=bias, backend=backend, **limits)
    # 13 terms of size 1, each with a few roundings of 2 ** -24.
    assert torch.allclose(out.double(), expected, atol=KEYS * 4 * 2**-24, rtol=0)


@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("start", [4, torch.tensor(4)], ids=["int", "tensor"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_queries_may_stand_before_the_last_slots(limits, start, backend):
    q, k, v, _ = inputs(5)
    bias = lw.DistanceBias(torch.linspace(0, -1, HEADS * KEYS).view(HEADS, KEYS), POSITIONS[4:9], POSITIONS)
    expected = attend_in_loops(q, k, v, bias, limits, 4)
    out = lw.attend(q, k, v, bias=bias, start=start, backend=backend, **limits)
    assert torch.allclose(out.double(), expected, atol=KEYS * 4 * 2**-24, rtol=0)


@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_row_that_may_see_nothing_gives_zeros_and_no_gradient(with_bias, backend):
    q, k, v, bias = inputs()
    q.requires_grad_()
    nothing = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    out = lw.attend(q, k, v, bias=bias if with_bias else None, key_mask=nothing, backend=backend)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(q.grad, torch.zeros_like(q))


@pytest.mark.parametrize("backend", TRIED)
def test_minus_infinity_in_a_bias_forbids_like_a_mask(backend):
    q, k, v, _ = inputs()
    value = torch.zeros(1, 1, KEYS, KEYS)
    value[..., 3] = -torch.inf
    value[..., 6, :] = -torch.inf
    out = lw.attend(q, k, v, bias=lw.DenseBias(value), backend=backend)
    masked = lw.attend(q, k, v, key_mask=(POSITIONS != 3)[None], backend="reference")
    keep = POSITIONS != 6
    assert torch.allclose(out[:, :, keep], masked[:, :, keep], atol=1e-6)
    assert torch.equal(out[:, :, 6], torch.zeros_like(out[:, :, 6]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_what_is_not_finite_stays_in_the_rows_that_may_see_it(limits, backend, bad):
    place = 8
    outs, gradients = [], []
    for poison in (0.0, bad):
        q, k, v, bias = inputs()
        k[:, :, place] += poison
        v[:, :, place] += poison
        q.requires_grad_()
        out = lw.attend(q, k, v, bias=bias, backend=backend, **limits)
        sees = torch.tensor([[may_meet(b, i, place, limits) for i in range(KEYS)] for b in range(BATCH)])
        out.masked_fill(sees[:, None, :, None], 0).sum().backward()
        outs.append(out)
        gradients.append(q.grad)
    blind = ~sees[:, None, :, None]
    for clean, poisoned in (outs, gradients):
        assert torch.equal(clean.masked_fill(~blind, 0), poisoned.masked_fill(~blind, 0))
    assert outs[1].masked_fill(blind, torch.nan).isnan().all()


@pytest.mark.parametrize("backend", TRIED)
def test_autocast_does_not_round_what_attention_computes(backend):
    q, k, v, bias = inputs()
    expected = lw.attend(q, k, v, bias=bias, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lw.attend(q, k, v, bias=bias, backend=backend), expected)


def test_the_explanation_adds_up():
    q, k, v, bias = inputs()
    whole = lw.explain(lw.checked_call(q, k, v, bias=bias))
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    assert torch.equal(whole.scores[:, :, seen], (whole.content + whole.bias)[:, :, seen])
    assert torch.equal(whole.scores[:, :, ~seen], torch.full_like(whole.scores[:, :, ~seen], -torch.inf))
    assert torch.allclose(whole.weights.sum(-1), torch.ones(BATCH, HEADS, KEYS))
    assert torch.equal(whole.out, lw.attend(q, k, v, bias=bias, backend="reference"))


def test_an_explicit_backend_is_used_or_says_why_not():
    q, k, v, bias = inputs()
    rescored = lw.checked_call(q, k, v, rescore=lambda content, bias, q, mask: content)
    assert choose(lw.checked_call(q, k, v, bias=bias), "reference") == "reference"
    with pytest.raises(NotImplementedError) as error:
        choose(rescored, "sdpa")
    shape = "float32 cpu  batch=2 head=6 query=13 dim=5"
    for part in ("backend 'sdpa' cannot take this call", shape, "sdpa: rescore", "reference"):
        assert part in str(error.value)
    assert choose(rescored) != "sdpa"


def test_a_length_that_cannot_fit_names_the_bytes_and_the_way_out(monkeypatch):
    q, k, v, bias = inputs()
    call = lw.checked_call(q, k, v, bias=bias)
    monkeypatch.setattr(memory, "total_bytes", lambda: 4 * BATCH * HEADS * KEYS * KEYS * 4 - 1)
    with pytest.raises(NotImplementedError, match=r"13 x 13 scores of 12 heads take 0.0 GB .* row_block never"):
        choose(call, "reference")
    assert choose(call, "sdpa") == "sdpa", "it needs one matrix less"
    monkeypatch.setattr(memory, "total_bytes", lambda: 0)
    assert sdpa.objections(call)
    assert not sdpa.objections(lw.checked_call(q, k, v)), "without a bias nothing is filled in"


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_where_every_backend_refuses_none_is_recommended(backend, monkeypatch):
    q, k, v, bias = inputs()
    for name, module in BACKENDS.items():
        monkeypatch.setattr(module, "objections", lambda call, name=name: [f"{name} rests today"])
    with pytest.raises(NotImplementedError) as error:
        lw.attend(q, k, v, bias=bias, backend=backend)
    assert "Use backend" not in str(error.value)
    assert "sdpa: sdpa rests today" in str(error.value)
    assert str(error.value).endswith("No other backend can take it either.") == (backend != "auto")


def test_where_nobody_tells_the_size_of_the_memory_nothing_is_refused_for_it(monkeypatch):
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    q, k, v, bias = inputs()
    assert choose(lw.checked_call(q, k, v, bias=bias), "reference") == "reference"
    assert memory.total_bytes() > 2**60
