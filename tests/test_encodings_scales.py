"""Encodings that scale scores, sink weight or replace scores: their formulas in loops, and other people's numbers."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from witness import assert_refuses, assert_same, dot, make, numbers

import lengthwise as lw
from lengthwise.visibility import visible_counts

HEADS, DIM, LENGTH = 3, 4, 9
WIDTH = HEADS * DIM
EPS32, EPS64 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))


def factor(name, seen, *, train_length=1024, **options):
    """The factor of a query that sees so many keys."""
    encoding = lw.make(name, heads=1, width=1, train_length=train_length, **options)
    layout = lw.TokenLayout.of(torch.tensor([seen - 1]), torch.arange(seen))
    return float(encoding.logit_scale(torch.zeros(1, 1, 1), layout).detach())


# Computed in plain Python from the formulas in the models' code.
FACTORS = [
    ("logn", {"train_length": 512}, {1: 1.0, 512: 1.0, 513: math.log(513) / math.log(512), 262144: 2.0}),
    ("llama4-scale", {}, {1: 1.0, 8191: 1.0, 8192: 1.069315, 16384: 1.109861, 131072: 1.283321}),
    ("ministral3-scale", {"floor": 8192}, {8192: 1.0, 8193: 1.069315, 16385: 1.109861}),
    ("ministral3-scale", {}, {16384: 1.0, 16385: 1.069315}),
    ("log-floor", {}, {1: 1.0, 1024: 1.0, 2048: 1.069315, 16384: 1.277259}),
    ("ssmax", {"start": 0.43}, {1: 0.0, 2: 0.43 * math.log(2), 1000: 0.43 * math.log(1000)}),
    ("headscale", {}, {1: 1.0, 1000: 1.0}),
]


@pytest.mark.parametrize(("name", "options", "wanted"), FACTORS, ids=[f"{name} {o}" for name, o, _ in FACTORS])
def test_a_factor_has_the_models_numbers(name, options, wanted):
    for seen, number in wanted.items():
        assert factor(name, seen, **options) == pytest.approx(number, abs=0.5e-6), seen


def test_ministral_3_has_the_factor_of_transformers_own_function():
    positions = torch.arange(0, 200, 7)
    theirs = get_llama_4_attn_scale(positions[None], 0.1, 16)[0, 0, :, 0]
    ours = torch.tensor([factor("ministral3-scale", int(position) + 1, floor=16) for position in positions])
    assert_same(ours, theirs, roundings=2)


def test_ssmax_starts_at_a_mean_factor_of_1_and_keeps_the_largest_weight_at_any_length():
    assert lw.make("ssmax", heads=1, width=1, train_length=1024).start == pytest.approx(0.16847, abs=0.5e-5)
    assert lw.make("ssmax", heads=1, width=1, train_length=512).start == pytest.approx(0.19061, abs=0.5e-5)
    mean = sum(factor("ssmax", n, train_length=300) for n in range(1, 301)) / 300
    assert mean == pytest.approx(1.0, abs=300 * EPS32)
    # Figure 1 of the paper: one score of 3 among -2, with s = 0.43, where a plain softmax fades.
    for n in (100, 10_000, 1_000_000):
        scores = torch.full((n,), -2.0)
        scores[0] = 3.0
        assert (factor("ssmax", n, start=0.43) * scores).softmax(0)[0] > 0.99


def test_ssmax_counts_what_a_window_shows_and_adds_its_offset():
    encoding = lw.make("ssmax", heads=2, width=2, start=1.0, offset=True)
    torch.nn.init.constant_(encoding.offset, 0.25)
    got = encoding.logit_scale(torch.zeros(1, 5, 2), lw.layout(5), window=3)
    expected = torch.tensor([1, 2, 3, 3, 3]).log() + 0.25
    assert_same(got.detach(), expected.expand(1, 2, -1), roundings=2)
    padded, two = torch.tensor([[False, True, True, True, True]]), torch.tensor([[0, 0, 0, 1, 1]])
    for layout, seen in (
        (lw.layout(5, causal=False), [2, 3, 3, 3, 2]),
        (lw.layout(5, causal=False, key_mask=padded), [2, 2, 3, 3, 2]),
        (lw.layout(5, causal=False, documents=two), [2, 3, 2, 2, 2]),
    ):
        got = encoding.logit_scale(torch.zeros(1, 5, 2), layout, window=2)[:, :, 1:]
        assert_same(got.detach(), torch.tensor(seen[1:]).log().add(0.25).expand(1, 2, -1), roundings=2)
    bands = lambda: encoding.logit_scale(torch.zeros(1, 5, 2), lw.layout(5), window=lw.Band(1, 3))  # noqa: E731
    assert_refuses(bands, NotImplementedError, "int", "Band")


def counted(layout, mask):
    """How many keys each row of a mask shows, 1 at least."""
    return mask.sum(-1).clamp(min=1).expand(-1, 1, layout.query_count)


LAYOUTS = {
    "plain": {"tokens": 7},
    "decoding": {"tokens": 2, "past": 5},
    "padded": {"tokens": 7, "key_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]).bool()},
    "padded between": {"tokens": 2, "past": 5, "key_mask": torch.tensor([[0, 1, 1, 1, 0, 0, 1]] * 2).bool()},
    "packed": {"tokens": 7, "documents": torch.tensor([[0, 0, 0, 1, 1, 1, 1]])},
    "packed in pieces, padded": {
        "tokens": 7,
        "documents": torch.tensor([[0, 2, 0, 1, 1, 2, 1]]),
        "key_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1]]).bool(),
    },
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("arguments", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_keys_that_a_mask_shows_are_counted(arguments, causal, window):
    layout = lw.layout(**arguments, causal=causal)
    slots = layout.query_slots()
    mask = torch.ones(layout.batch, 1, layout.query_count, layout.key_count, dtype=torch.bool)
    if causal:
        mask &= torch.arange(layout.key_count) <= slots[:, None]
    if layout.key_mask is not None:
        mask &= layout.key_mask[:, None, None]
    if layout.key_documents is not None:
        mask &= (layout.key_documents[:, slots, None] == layout.key_documents[:, None])[:, None]
    if window is not None:
        mask &= (slots[:, None] - torch.arange(layout.key_count)).abs() < window
    seen = visible_counts(layout, window).expand(layout.batch, 1, -1)
    real = mask.diagonal(layout.key_count - layout.query_count, -2, -1)
    assert torch.equal(seen[real], counted(layout, mask)[real])
    explicit = lw.TokenLayout.of(layout.query, layout.key, key_mask=layout.key_mask, mask=mask, causal=causal)
    assert torch.equal(visible_counts(explicit), counted(layout, mask))


def parts(seed=0, dtype=torch.float32, kv_heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, LENGTH, DIM, generator=generator, dtype=dtype) for heads in (HEADS, kv_heads, kv_heads)
    ]


ADDED = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


def test_a_sink_is_gpt_oss_own():
    encoding = lw.make("sink", heads=HEADS, width=WIDTH)
    torch.nn.init.normal_(encoding.logit)
    q, k, v = parts(kv_heads=1)
    module = SimpleNamespace(num_key_value_groups=HEADS, sinks=encoding.logit, training=False)
    theirs, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, ADDED, DIM**-0.5)
    ours = lw.attend(q, k, v, layout=lw.layout(LENGTH), sink=encoding.sink(q))
    assert_same(ours.transpose(1, 2).detach(), theirs.detach(), roundings=8 * LENGTH, scale=float(v.abs().max()))


def test_a_sink_from_0_is_granites_own():
    encoding = lw.make("sink", heads=HEADS, width=WIDTH, start="zero")
    assert not encoding.logit.any()
    q, k, v = parts()
    module = SimpleNamespace(num_key_value_groups=1, sinks=encoding.logit, training=False)
    theirs, _ = modeling_granite_swa.eager_attention_forward(module, q, k, v, ADDED, DIM**-0.5)
    ours = lw.attend(q, k, v, layout=lw.layout(LENGTH), sink=encoding.sink(q))
    assert_same(ours.transpose(1, 2).detach(), theirs.detach(), roundings=8 * LENGTH, scale=float(v.abs().max()))


def test_llama_4_scales_the_queries_of_layers_without_positions_as_we_do():
    config = Llama4TextConfig(
        **{"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": DIM},
        **{"num_hidden_layers": 1, "no_rope_layers": [0], "floor_scale": 2, "attn_scale": 0.7},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = Llama4TextAttention(config, 0).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    wanted, _ = theirs(x, (None, None), ADDED[None, None])
    q, k, v = (
        layer(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    )
    encoding = lw.make("llama4-scale", heads=HEADS, width=WIDTH, strength=0.7, floor=2)
    layout = lw.layout(LENGTH)
    out = lw.attend(q, k, v, layout=layout, logit_scale=encoding.logit_scale(x, layout))
    got = theirs.o_proj(out.transpose(1, 2).flatten(2))
    assert_same(got.detach(), wanted.detach(), roundings=8 * LENGTH, scale=float(wanted.detach().abs().max()))


@pytest.mark.parametrize("attend_current", [False, True])
def test_stick_breaking_is_its_papers_product(attend_current):
    encoding = lw.make("stick-breaking", heads=HEADS, width=WIDTH, attend_current=attend_current)
    q, k, v = parts(dtype=torch.float64)
    x, layout = torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64), lw.layout(LENGTH)
    got = lw.explain(q, k, v, layout=layout, rescore=encoding.rescore(x, layout), sink=encoding.sink(x))
    z = numbers(q @ k.mT * DIM**-0.5)
    for b, h, i in itertools.product(range(2), range(HEADS), range(LENGTH)):
        left = 1.0
        for j in reversed(range(i + attend_current)):
            share = 1 / (1 + math.exp(-z[b][h][i][j]))
            assert float(got.weights[b, h, i, j]) == pytest.approx(share * left, abs=100 * EPS64)
            left *= 1 - share
        assert float(got.sink_weight[b, h, i]) == pytest.approx(left, abs=100 * EPS64)
        assert attend_current or not got.weights[b, h, i, i]


@pytest.mark.parametrize("loud", [0.0, 60.0])
def test_a_stick_is_halved_by_keys_alike_and_gone_after_one_that_takes_all(loud):
    encoding = lw.make("stick-breaking", heads=1, width=1)
    layout, x = lw.layout(6), torch.zeros(1, 6, 1)
    q = torch.full((1, 1, 6, 1), loud)
    got = lw.explain(
        q, torch.ones_like(q), q, layout=layout, rescore=encoding.rescore(x, layout), sink=encoding.sink(x)
    )
    assert got.weights is not None
    expected = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32] if loud == 0 else [1.0, 0.0, 0.0, 0.0, 0.0]
    assert got.weights[0, 0, 5, :5].flip(0).tolist() == pytest.approx(expected, abs=4 * EPS32)
    assert float(got.sink_weight[0, 0, 5]) == pytest.approx(1 / 32 if loud == 0 else 0.0, abs=4 * EPS32)


def path_parts(length):
    """PaTH's unit vectors and betas, of its parameters in plain loops."""
    encoding = make("path", heads=HEADS, width=WIDTH, head_dim=DIM)
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    down, up, taps = numbers(encoding.down.weight), numbers(encoding.up.weight), numbers(encoding.taps)
    gate, start = numbers(encoding.to_beta.weight), numbers(encoding.to_beta.bias)
    low = [[[dot(weight, row) for weight in down] for row in sequence] for sequence in numbers(x)]
    vectors, betas = (torch.empty(2, HEADS, length, *more, dtype=torch.float64) for more in ((DIM,), ()))
    for b, h, t in itertools.product(range(2), range(HEADS), range(length)):
        mixed = [
            sum(taps[h][c][2 - back] * dot(up[h * DIM + c], low[b][t - back]) for back in range(min(3, t + 1)))
            for c in range(DIM)
        ]
        bent = [m / (1 + math.exp(-m)) for m in mixed]
        vectors[b, h, t] = torch.tensor(bent, dtype=torch.float64) / math.sqrt(dot(bent, bent) + 1e-6)
        betas[b, h, t] = 2 / (1 + math.exp(-dot(gate[h], numbers(x[b, t])) - start[h]))
    return encoding, x, vectors, betas


def path_scores(encoding, x, q, k, queries):
    layout = lw.layout(queries, past=x.shape[1] - queries)
    rescore = encoding.rescore(x[:, -queries:], layout, encoding.state(x))
    got = lw.explain(q[:, :, -queries:], k, k, layout=layout, rescore=rescore)
    assert got.scores is not None
    return got.scores.detach()


@pytest.mark.parametrize(("length", "queries"), [(11, 11), (11, 2), (70, 1)])
def test_path_multiplies_by_the_matrix_of_every_token_between(length, queries):
    encoding, x, vectors, betas = path_parts(length)
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 2, HEADS, length, DIM, dtype=torch.float64, generator=generator).unbind()
    got = path_scores(encoding, x, q, k, queries)
    matrices = torch.eye(DIM) - betas[..., None, None] * vectors[..., :, None] * vectors[..., None, :]
    for b, h, i in itertools.product(range(2), range(HEADS), range(length - queries, length)):
        between = torch.eye(DIM, dtype=torch.float64)
        for j in reversed(range(i + 1)):
            expected = float(k[b, h, j] @ between @ q[b, h, i]) * DIM**-0.5
            error = abs(float(got[b, h, i - length + queries, j]) - expected)
            # No factor makes a vector longer; a thousand roundings of the product of two norms.
            assert error <= 1000 * EPS64 * float(k[b, h, j].norm() * q[b, h, i].norm())
            between = matrices[b, h, j] @ between


def test_path_is_its_authors_decoding_in_which_every_token_rewrites_the_cached_keys():
    encoding, x, vectors, betas = path_parts(13)
    q, k = torch.randn(2, 2, HEADS, 13, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    got, cached = path_scores(encoding, x, q, k, 13), k[:, :, :0]
    for t in range(13):
        w, beta = vectors[:, :, t, None], betas[:, :, t, None, None]
        cached = torch.cat([cached - beta * (cached * w).sum(-1, keepdim=True) * w, k[:, :, t : t + 1]], 2)
        expected = (q[:, :, t, None] @ cached.mT)[:, :, 0] * DIM**-0.5
        assert_same(got[:, :, t, : t + 1], expected, roundings=1000, scale=float(expected.abs().max()))


def test_grape_a_is_its_formula_and_alibi_where_nothing_is_said():
    encoding = make("grape-a", heads=HEADS, width=WIDTH, head_dim=DIM)
    q, k, _ = parts(dtype=torch.float64, kv_heads=1)
    x, layout = torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64), lw.layout(LENGTH)
    slopes = [2**-4, 2**-8, 2**-2]  # 3 heads, interleaved: those of 2, and the first of 4
    of_query, of_key = (
        [[c / math.sqrt(dot(row, row)) for c in row] for row in numbers(vector)]
        for vector in (encoding.query_vector, encoding.key_vector)
    )
    scale = [math.log1p(math.exp(w)) for w in numbers(encoding.raw_scale)]

    def gate(vector, row):
        return math.log1p(math.exp(dot(vector, numbers(row)) / math.sqrt(DIM)))

    got = encoding.bias(x, layout, encoding.state(x, q=q, k=k), q=q, k=k).dense().detach()
    expected = torch.empty_like(got)
    for b, h, i, j in itertools.product(range(2), range(HEADS), range(LENGTH), range(LENGTH)):
        both = gate(of_query[h], q[b, h, i]) + gate(of_key[h], k[b, 0, j])
        expected[b, h, i, j] = -abs(i - j) * slopes[h] * scale[h] * both
    assert_same(got, expected, roundings=1000, scale=float(expected.abs().max()))
    fresh = lw.make("grape-a", heads=HEADS, width=WIDTH)
    silent = fresh.bias(x.float(), layout, q=0 * q.float(), k=0 * k.float()).dense()
    alibi = lw.make("alibi", heads=HEADS, width=WIDTH, slopes="interleaved").bias(x, layout).dense()
    assert_same(silent.detach(), 2 * math.log(2) * alibi.expand_as(silent), roundings=8)
    assert_refuses(lambda: fresh.state(x), TypeError, "k must be", "None", "q=q, k=k")
