"""Encodings whose bias is mixed of profiles by distance: formulas in plain loops, and layers of transformers."""

import functools
import math

import pytest
import torch
from test_witness_formulas import assert_formula
from transformers.models.deberta_v2 import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position
from transformers.models.inkling import InklingTextConfig, modeling_inkling
from transformers.models.wav2vec2_bert import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.xlnet import XLNetConfig, XLNetModel
from witness import BATCH, HEADS, SCENES, WIDTH, dot, make, numbers

import lengthwise as lw
from lengthwise.encodings.deberta import signed_buckets
from lengthwise.testing import assert_near

DIM = WIDTH // HEADS


def transposed(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def of_heads(layer, vector):
    """W x + b, head by head."""
    rows = numbers(layer.weight)
    added = [0.0] * len(rows) if layer.bias is None else numbers(layer.bias)
    whole = [dot(row, vector) + more for row, more in zip(rows, added, strict=True)]
    return [whole[h * len(whole) // HEADS : (h + 1) * len(whole) // HEADS] for h in range(HEADS)]


def shaw(encoding, x, q, k, reach=16):
    table = numbers(encoding.table)
    first = 0 if encoding.shape.causal else -reach

    def value(b, h, i, j, distance):
        return dot(q[b][h][i], table[min(max(distance, first), reach) - first]) / math.sqrt(DIM)

    return value


def transformer_xl(encoding, x, q, k, reach=math.inf):
    added = numbers(encoding.distance_query)

    @functools.cache
    def keys(distance):
        angles = [distance * 10000 ** (-2 * n / WIDTH) for n in range((WIDTH + 1) // 2)]
        waves = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        return of_heads(encoding.to_key, waves[:WIDTH])

    def value(b, h, i, j, distance):
        query = [a + c for a, c in zip(q[b][h][i], added[h], strict=True)]
        return dot(query, keys(min(max(distance, -reach), reach))[h]) / math.sqrt(DIM)

    return value


def inkling(encoding, x, q, k, extent=1024):
    curves = transposed(numbers(encoding.profiles))
    rows = [[of_heads(encoding.to_rows, token) for token in sequence] for sequence in x]
    first = 0 if encoding.shape.causal else 1 - extent

    def value(b, h, i, j, distance):
        if not first <= distance < extent:
            return 0.0
        return dot(rows[b][len(x[b]) - len(q[b][h]) + i][h], curves[distance - first])

    return value


def deberta(encoding, x, q, k, buckets=256, max_distance=512, order="paper"):
    middle, table = buckets // 2, numbers(encoding.table)
    keys, queries = ([of_heads(layer, row) for row in table] for layer in (encoding.to_key, encoding.to_query))

    def bucket(distance):
        apart = abs(distance)
        if apart > middle:
            steps = math.log(apart / middle) / math.log((max_distance - 1) / middle) * (middle - 1)
            apart = math.ceil(steps - 1e-9) + middle
        return min(max(int(math.copysign(apart, distance)) + buckets, 0), 2 * buckets - 1)

    def value(b, h, i, j, distance):
        back = distance if order == "released" else -distance
        products = dot(q[b][h][i], keys[bucket(distance)][h]), dot(k[b][h][j], queries[bucket(back)][h])
        return sum(products) / math.sqrt(3 * DIM)

    return value


CASES = [
    (shaw, "shaw", {}),
    (shaw, "shaw", {"reach": 5}),
    (transformer_xl, "transformer-xl", {}),
    (transformer_xl, "transformer-xl", {"reach": 7}),
    (inkling, "inkling", {"extent": 9}),
    (deberta, "deberta", {"buckets": 8, "max_distance": 11}),
    (deberta, "deberta", {"buckets": 8, "max_distance": 30, "order": "released"}),
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
@pytest.mark.parametrize(("witness", "name", "options"), CASES, ids=[f"{name} {options}" for _, name, options in CASES])
def test_a_bias_of_profiles_is_its_papers_formula(witness, name, options, scene, causal):
    encoding, x = make(name, causal=causal, **options), scene.tokens()
    q, k = torch.randn(
        2, BATCH, HEADS, scene.keys, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(6)
    )
    layout = lw.TokenLayout.of(torch.tensor(scene.query), torch.tensor(scene.key), causal=causal)
    own = slice(scene.keys - scene.queries, None)
    state = encoding.state(x, **encoding.own_qk("state", q, k))
    bias = encoding.bias(x[:, own], layout, state, **encoding.own_qk("bias", q[:, :, own], k[:, :, own]))
    of_distance = witness(encoding, numbers(x), numbers(q[:, :, own]), numbers(k), **options)

    def value(b, h, i, j):
        query, key = scene.at(b, i, j)
        return of_distance(b, h, i, j, query - key)

    assert_formula(bias, scene, value, causal=causal)


def heads_of(x, count):
    """(batch, position, width) as (batch, head, position, dim)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def drawn(module):
    """With parameters of size 0.4, so that no fault can hide."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def attended(encoding, x, q, k, v, **options):
    layout = lw.layout(x.shape[1], causal=encoding.shape.causal)
    state = encoding.state(x, **encoding.own_qk("state", q, k))
    bias = encoding.bias(x, layout, state, **encoding.own_qk("bias", q, k))
    return lw.attend(*encoding.rotate(q, k, layout), v, layout=layout, bias=bias, **options)


@torch.no_grad()
def test_shaw_is_the_relative_keys_of_wav2vec2_bert():
    reach, heads, width, length = 6, 3, 12, 31
    config = Wav2Vec2BertConfig(
        hidden_size=width,
        num_attention_heads=heads,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=reach,
        right_max_position_embeddings=reach,
        attn_implementation="eager",
    )
    theirs = drawn(Wav2Vec2BertSelfAttention(config))
    ours = lw.make("shaw", heads=heads, width=width, causal=False, reach=reach)
    ours.table.copy_(theirs.distance_embedding.weight.flip(0))  # they count from the query to the key
    x = torch.randn(2, length, width)
    q, k, v = (heads_of(layer(x), heads) for layer in (theirs.linear_q, theirs.linear_k, theirs.linear_v))
    out = theirs.linear_out(attended(ours, x, q, k, v).transpose(1, 2).flatten(2))
    assert_near(out, theirs(x)[0], "relative_key")


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
def test_transformer_xl_is_the_relative_attention_of_xlnet(causal):
    heads, width, length, batch = 3, 12, 31, 2
    config = XLNetConfig(vocab_size=5, d_model=width, n_layer=1, n_head=heads, d_inner=8, attn_type="bi", dropout=0)
    model = drawn(XLNetModel(config))
    theirs = model.layer[0].rel_attn
    ours = lw.make("transformer-xl", heads=heads, width=width, causal=causal)
    ours.content_query.copy_(theirs.r_w_bias)
    ours.distance_query.copy_(theirs.r_r_bias)
    ours.to_key.weight.copy_(theirs.r.flatten(1).T)
    x = torch.randn(batch, length, width)
    q, k, v = (torch.einsum("bth,hnd->bntd", x, weight) for weight in (theirs.q, theirs.k, theirs.v))
    waves = torch.einsum("ibh,hnd->ibnd", model.relative_positional_encoding(length, length, bsz=batch), theirs.r)
    later = torch.ones(length, length).triu(1)[:, :, None, None].expand(-1, -1, batch, heads)
    mask = later if causal else None
    want = theirs.rel_attn_core(*(t.permute(2, 0, 1, 3) for t in (q, k, v)), waves, attn_mask=mask)
    assert_near(attended(ours, x, q, k, v), want.permute(1, 2, 0, 3), "XLNet")


@torch.no_grad()
def test_deberta_is_the_disentangled_attention_of_transformers():
    heads, width, length, buckets, longest = 3, 12, 61, 8, 32
    config = DebertaV2Config(
        hidden_size=width,
        num_attention_heads=heads,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=buckets,
        max_relative_positions=longest,
        share_att_key=False,
    )
    theirs = drawn(DisentangledSelfAttention(config))
    sizes = {"heads": heads, "width": width, "buckets": buckets, "max_distance": longest}
    ours = lw.make("deberta", causal=False, order="released", **sizes)
    paper = lw.make("deberta", causal=False, **sizes)
    ours.table.copy_(torch.randn(2 * buckets, width))
    for mine, layer in ((ours.to_key, theirs.pos_key_proj), (ours.to_query, theirs.pos_query_proj)):
        mine.load_state_dict(layer.state_dict())
    paper.load_state_dict(ours.state_dict())
    x = torch.randn(2, length, width)
    q, k, v = (heads_of(layer(x), heads) for layer in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
    want = theirs(x, torch.ones(2, 1, length, length), rel_embeddings=ours.table)[0]
    assert_near(attended(ours, x, q, k, v).transpose(1, 2).flatten(2), want, "DeBERTa")
    assert (attended(paper, x, q, k, v).transpose(1, 2).flatten(2) - want).abs().max() > 0.01


@pytest.mark.parametrize(("buckets", "longest"), [(8, 32), (256, 512), (32, 40), (4, 9)])
def test_deberta_has_the_buckets_of_transformers(buckets, longest):
    distance = torch.arange(longest)
    theirs = make_log_bucket_position(distance, buckets, longest).long()
    # The last distance is on the border in exact arithmetic, where theirs depends on a rounding.
    assert signed_buckets(buckets, longest)[:-2] == theirs[:-1].tolist()
    assert signed_buckets(buckets, longest)[-2:] == [buckets - 1, buckets]


@torch.no_grad()
@pytest.mark.parametrize("floor", [None, 8], ids=["plain", "with its logit scale"])
def test_inkling_is_the_relative_bias_of_transformers(floor, monkeypatch):
    heads, width, dim, length, extent = 4, 16, 8, 31, 12
    config = InklingTextConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=dim,
        d_rel=5,
        rel_extent=extent,
        num_hidden_layers=1,
        layer_types=["hybrid"],
        log_scaling_n_floor=floor,
        attn_implementation="eager",
    )
    theirs = drawn(modeling_inkling.InklingAttention(config, 0))
    given = {}
    plain = modeling_inkling.eager_attention_forward

    def report(module, query, key, value, mask, **options):
        given.update(q=query, k=key, v=value, bias=options["position_bias"])
        given["out"] = plain(module, query, key, value, mask, **options)[0]
        return given["out"], None

    monkeypatch.setattr(modeling_inkling, "eager_attention_forward", report)
    x = torch.randn(2, length, width)
    mask = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    theirs(x, mask[None, None])
    ours = lw.make("inkling", heads=heads, width=width, head_dim=dim, profiles=5, extent=extent)
    ours.to_rows.weight.copy_(theirs.r_proj.weight)
    ours.profiles.copy_(theirs.rel_logits_proj.proj)
    factor = torch.ones(1, 1, length)
    if floor is not None:
        factor = 1 + 0.1 * (torch.arange(1, length + 1) / floor).clamp(min=1).log()[None, None]
    layout = lw.layout(length)
    bias = ours.bias(x, layout)
    q = given["q"] / factor[..., None]
    out = lw.attend(q, given["k"], given["v"], layout=layout, bias=bias, scale=1 / dim, logit_scale=factor)
    assert_near(out.transpose(1, 2), given["out"], "Inkling")
    visible = torch.ones(length, length).tril()
    assert_near(bias.dense() * factor[..., None] * visible, given["bias"] * visible, "its bias")
