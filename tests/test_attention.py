"""The reference against loops, and every backend against the reference, for every kind of mask."""

import math

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import backend, checked_call, choose, sdpa
from lengthwise.attention.backend import Refusal
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


def masked(limits: dict, queries: int = KEYS, start: int | torch.Tensor | None = None) -> dict:
    """The limits as `attend` takes them: a layout, and the window beside it."""
    places = {name: value for name, value in limits.items() if name != "window"}
    first = KEYS - queries if start is None else int(start)
    layout = lw.TokenLayout.of(POSITIONS[first : first + queries], POSITIONS, start=start, **places)
    return {"layout": layout, "window": limits.get("window")}


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
    out = lw.attend(q, k, v, bias=bias, backend=backend, **masked(limits, queries))
    # 13 terms of size 1, each with a few roundings of 2 ** -24.
    assert torch.allclose(out.double(), expected, atol=KEYS * 4 * 2**-24, rtol=0)


@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("start", [4, torch.tensor(4)], ids=["int", "tensor"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_queries_may_stand_before_the_last_slots(limits, start, backend):
    q, k, v, _ = inputs(5)
    bias = lw.DistanceBias(torch.linspace(0, -1, HEADS * KEYS).view(HEADS, KEYS), POSITIONS[4:9], POSITIONS)
    expected = attend_in_loops(q, k, v, bias, limits, 4)
    out = lw.attend(q, k, v, bias=bias, backend=backend, **masked(limits, 5, start))
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
def test_minus_infinity_in_a_bias_hides_like_a_mask(backend):
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
        out = lw.attend(q, k, v, bias=bias, backend=backend, **masked(limits))
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
    whole = lw.explain(q, k, v, bias=bias)
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    assert torch.equal(whole.scores[:, :, seen], (whole.content + whole.bias)[:, :, seen])
    assert torch.equal(whole.scores[:, :, ~seen], torch.full_like(whole.scores[:, :, ~seen], -torch.inf))
    assert torch.allclose(whole.weights.sum(-1), torch.ones(BATCH, HEADS, KEYS))
    assert torch.equal(whole.out, lw.attend(q, k, v, bias=bias, backend="reference"))


def content_alone(content, bias, q, k, mask, rows):
    return content


def test_an_explicit_backend_is_used_or_says_why_not():
    q, k, v, bias = inputs()
    rescored = checked_call(q, k, v, rescore=lw.ScoreFunction(content_alone))
    assert choose(checked_call(q, k, v, bias=bias), "reference")[0] == "reference"
    with pytest.raises(NotImplementedError) as error:
        choose(rescored, "sdpa")
    shape = "float32 cpu  batch=2 head=6 query=13 dim=5"
    for part in ("backend 'sdpa' cannot take this call", shape, "sdpa: rescore", "reference"):
        assert part in str(error.value)
    assert choose(rescored)[0] != "sdpa"


def test_a_length_that_cannot_fit_names_the_bytes_and_the_way_out(monkeypatch):
    q, k, v, bias = inputs()
    call = checked_call(q, k, v, bias=bias)
    monkeypatch.setattr(backend, "total_bytes", lambda: 4 * BATCH * HEADS * KEYS * KEYS * 4 - 1)
    with pytest.raises(NotImplementedError, match=r"13 x 13 scores of 12 heads take 0.0 GB .* row_block never"):
        choose(call, "reference")
    assert choose(call, "sdpa")[0] == "sdpa", "it needs one matrix less"
    monkeypatch.setattr(backend, "total_bytes", lambda: 0)
    assert isinstance(sdpa.plan(call), Refusal)
    assert not isinstance(sdpa.plan(checked_call(q, k, v)), Refusal), "without a bias nothing is filled in"


@pytest.mark.parametrize("backend", TRIED)
def test_softcap_logit_scale_and_sink_mean_what_the_definition_says(backend):
    q, k, v, bias = inputs()
    factor, sink = torch.linspace(0.5, 2, KEYS).view(1, 1, -1), torch.linspace(-1, 1, HEADS)
    options = {"softcap": 1.5, "logit_scale": factor, "sink": sink}
    if backend == "sdpa":
        with pytest.raises(NotImplementedError, match="log-sum-exp"):
            lw.attend(q, k, v, bias=bias, backend=backend, **options)
        pytest.skip("torch's function has no sink and no softcap")
    out, lse = lw.attend(q, k, v, bias=bias, return_lse=True, backend=backend, **options)
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    content = 1.5 * torch.tanh(q.double() @ keys.transpose(-1, -2) / math.sqrt(DIM) / 1.5)
    hidden = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    scores = (factor.double()[..., None] * (content + bias.dense().double())).masked_fill(hidden, -torch.inf)
    denominator = scores.exp().sum(-1) + sink.double()[:, None].exp()
    assert torch.allclose(lse.double(), denominator.log(), atol=KEYS * 4 * 2**-24, rtol=0)
    assert torch.allclose(out.double(), scores.exp() @ values / denominator[..., None], atol=KEYS * 4 * 2**-24, rtol=0)


def test_rows_are_explained_without_matrices_too():
    q, k, v, bias = inputs()
    options = {"bias": bias, "sink": torch.linspace(-1, 1, HEADS), "window": 5}
    whole, rows = lw.explain(q, k, v, **options), lw.explain(q, k, v, matrices=False, **options)
    assert rows.weights is None
    for name in ("out", "lse", "entropy", "largest", "sink_weight"):
        assert torch.allclose(getattr(rows, name), getattr(whole, name)), name
    assert torch.allclose(whole.weights.sum(-1) + whole.sink_weight, torch.ones(BATCH, HEADS, KEYS))
    assert torch.equal(whole.largest, whole.scores.amax(-1))


def test_parts_merge_to_the_whole_and_empty_ones_to_nothing():
    q, k, v, bias = inputs()
    empty = (torch.zeros(BATCH, HEADS, KEYS, VALUE), torch.full((BATCH, HEADS, KEYS), -torch.inf))
    out, lse = lw.merge(empty, empty)
    assert not out.any()
    assert (lse == -torch.inf).all()
    bands = (lw.Band(0, 3), lw.Band(3, 7), lw.Band(7))
    q.requires_grad_()
    parts = [lw.attend(q, k, v, bias=bias, window=band, return_lse=True, backend="reference") for band in bands]
    whole = lw.attend(q, k, v, bias=bias, return_lse=True, backend="reference")
    joined = lw.merge(*parts, empty)
    for got, wanted in zip(joined, whole, strict=True):
        assert torch.allclose(got, wanted, atol=KEYS * 4 * 2**-24, rtol=0)
    gradients = [torch.autograd.grad(out.square().sum() + lse.square().sum(), q)[0] for out, lse in (joined, whole)]
    assert torch.allclose(*gradients, atol=1e-5)


def test_a_choice_of_skipping_is_the_context_s_own():
    q, k, v, _ = inputs()
    assert checked_call(q, k, v).skip
    with lw.skipping(False):
        assert not checked_call(q, k, v).skip
    assert checked_call(q, k, v).skip


@pytest.mark.parametrize(("name", "backend"), [("cable", "row_block"), ("grape-a", "auto"), ("shaw", "reference")])
def test_a_batch_of_nothing_has_an_output_of_nothing(name, backend):
    encoding, layout = lw.make(name, heads=3, width=24, head_dim=8), lw.layout(6)
    x, q = torch.zeros(0, 6, 24), torch.zeros(0, 3, 6, 8)
    bias = encoding.bias(x, layout, **encoding.own_qk("bias", q, q))
    assert lw.attend(q, q, q, layout=layout, bias=bias, backend=backend).shape == q.shape


def test_no_tokens_see_one_another_on_either_side():
    encoding = lw.make("ssmax", heads=3, width=24, causal=False)
    assert encoding.logit_scale(torch.zeros(1, 0, 24), lw.layout(0, causal=False)).shape[-1] == 0
