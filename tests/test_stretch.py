"""Stretching a RoPE model beyond its trained length: every method is its definition, cached or not, and is undone."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from model_kit import LENGTH, assert_decodes, by_chunks, loud_model, make_cache, tokens

import lengthwise as lw
from lengthwise.attention import checked_call, choose
from lengthwise.encodings import AttentionShape
from lengthwise.encodings.rope import Rope
from lengthwise.errors import OptionError
from lengthwise.model import LengthwiseEncoderConfig, LengthwiseForMaskedLM
from lengthwise.model.attention import attend_zones
from lengthwise.model.stretch import stretched
from lengthwise.model.stretch.bands import METHODS
from lengthwise.model.stretch.rope import StretchedRope
from lengthwise.model.stretch.spec import parse_stretch

TRAINED = 24
SPECS = [
    "window:9",
    "rerope:7",
    "leaky-rerope:7:3",
    "self-extend:4:7",
    "self-extend:3",
    "dca",
    "dca:6:9",
    "dca:5:20",
    "lm-infinite:7:3",
    "streaming:7:3",
]


def numbers_of(spec: str) -> list[int]:
    return [int(word) for word in spec.split(":")[1:]]


def distance(spec: str, i: int, j: int, length: int = TRAINED) -> float | None:
    """How far key j is from query i by the definition; None where it is not seen."""
    name, numbers, d = spec.partition(":")[0], numbers_of(spec), i - j
    if name == "window":
        return d if d < numbers[0] else None
    if name == "rerope":
        return min(d, numbers[0])
    if name == "leaky-rerope":
        window, factor = numbers
        return d if d < window else window + (d - window) / factor
    if name == "self-extend":
        group, window = (*numbers, length // 4)[:2]
        return d if d < window else i // group - j // group + window - window // group
    if name == "dca":
        furthest = numbers[1] if len(numbers) > 1 else 3 * length // 4
        chunk = numbers[0] if numbers else furthest - length // 16
        apart = i // chunk - j // chunk
        query = [i % chunk, min(i % chunk + chunk, furthest), min(2 * chunk - 1, furthest)][min(apart, 2)]
        return query - j % chunk
    window, first = numbers
    if name == "lm-infinite":
        return d if d < window else window if j < first else None
    assert name == "streaming"
    # A cache of the first and the latest tokens, in which positions are places.
    cache = list(range(i + 1))
    if len(cache) > window + first:
        cache = cache[:first] + cache[-window:]
    return len(cache) - 1 - cache.index(j) if j in cache else None


def stretched_distance(spec: str, i: int, j: int, length: int = TRAINED) -> list[float]:
    """What the bands of ours give for one pair: one number for every band that has it."""
    method = parse_stretch(spec).bands(length)
    values = []
    for turning in method.turnings(torch.tensor([[i]]), torch.tensor([[j]])):
        band = turning.band
        d = i // band.chunk - j // band.chunk
        inside = band.nearest <= d and (band.farthest is None or d < band.farthest)
        if inside and (band.first is None or j < band.first):
            values.append((int(turning.query) - (0 if turning.key is None else int(turning.key))) / turning.divisor)
    return values


@pytest.mark.parametrize("spec", SPECS)
def test_every_pair_is_at_the_distance_of_the_definition_and_in_one_band(spec):
    for i in range(61):
        for j in range(i + 1):
            wanted = distance(spec, i, j)
            assert stretched_distance(spec, i, j) == pytest.approx([] if wanted is None else [wanted]), (i, j)


def test_distances_are_those_of_the_papers():
    for pair, wanted in {(2000, 1500): 500, (2000, 976): 1024, (2000, 975): 1025, (4000, 0): 1396}.items():
        assert stretched_distance("self-extend:8:1024", *pair, length=4096) == [wanted]
    # Figure 2 of the paper on dual chunks: chunks of 6, 10 positions.
    rows = [[stretched_distance("dca:6:9", i, j) for j in range(0, i + 1, 6)] for i in (5, 6, 9, 11, 12)]
    assert rows == [[[5]], [[6], [0]], [[9], [3]], [[9], [5]], [[9], [6], [0]]]


def turned(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """The halves of every head turned, in float64."""
    pairs = x.shape[-1] // 2
    angles = positions.double()[:, None] * base ** (-torch.arange(pairs).double() / pairs)
    a, b = x.double().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def published_scores(spec: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores as the published programs go about it: with two matrices, by chunks, or token by token with a cache."""
    name, numbers, n = spec.partition(":")[0], numbers_of(spec), q.shape[-2]
    place = torch.arange(n)
    d = place[:, None] - place
    near, hidden = turned(q, place) @ turned(k, place).mT, -math.inf
    if name in ("rerope", "leaky-rerope", "self-extend"):
        window = numbers[0] if name != "self-extend" else numbers[1]
        if name == "rerope":
            far = turned(q, place * 0 + window) @ k.double().mT
        elif name == "leaky-rerope":
            slow = lambda x, p: turned(x, p / numbers[1])  # noqa: E731
            far = slow(q, place + window * (numbers[1] - 1)) @ slow(k, place).mT
        else:
            group = numbers[0]
            far = turned(q, place // group + window - window // group) @ turned(k, place // group).mT
        return near.where(d < window, far).masked_fill(d < 0, hidden)
    if name == "dca":
        chunk, furthest = numbers
        keys, rows = turned(k, place % chunk), []
        for begin in range(0, n, chunk):
            part = q[..., begin : begin + chunk, :]
            own = place[: part.shape[-2]]
            same = turned(part, own) @ keys[..., begin : begin + chunk, :].mT
            succeeding = (
                turned(part, (own + chunk).clamp(max=furthest)) @ keys[..., max(0, begin - chunk) : begin, :].mT
            )
            others = turned(part, own * 0 + min(2 * chunk - 1, furthest)) @ keys[..., : max(0, begin - chunk), :].mT
            row = torch.cat([others, succeeding, same], -1)
            rows.append(torch.nn.functional.pad(row, (0, n - row.shape[-1])))
        return torch.cat(rows, -2).masked_fill(d < 0, hidden)
    if name == "window":
        return near.masked_fill((d < 0) | (d >= numbers[0]), hidden)
    window, first = numbers
    if name == "lm-infinite":
        far = turned(q, place * 0 + window) @ k.double().mT
        return near.where(d < window, far.masked_fill(place >= first, hidden)).masked_fill(d < 0, hidden)
    scores = near.new_full(near.shape, hidden)
    cache: list[int] = []
    for i in range(n):
        cache = [*cache, i]
        if len(cache) > first + window:
            del cache[first]
        places = torch.arange(len(cache))
        scores[..., i, cache] = (turned(q[..., i : i + 1, :], places[-1:]) @ turned(k[..., cache, :], places).mT)[
            ..., 0, :
        ]
    return scores


WITNESSED = [spec for spec in SPECS if spec not in ("dca", "self-extend:3")]


@pytest.mark.parametrize("spec", WITNESSED)
def test_bands_give_the_attention_of_the_published_programs_and_its_gradients(spec):
    torch.manual_seed(0)
    n, dim = 53, 8
    q = torch.randn(2, 4, n, dim, requires_grad=True)
    k, v = (torch.randn(2, 2, n, dim, requires_grad=True) for _ in range(2))
    rope = Rope(AttentionShape(4, 32, dim, TRAINED))
    layout = lw.layout(n)
    zones = StretchedRope(rope, parse_stretch(spec), TRAINED).zones(q, k, layout)
    for zone in zones:
        call = checked_call(zone.q, zone.k, v, layout=layout, window=zone.window, return_lse=True)
        assert choose(call)[0] in ("native", "row_block"), "no matrix is filled in"
    out = attend_zones(zones, v, layout=layout)[0].transpose(1, 2)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide = [x if x.shape[1] == 4 else x.repeat_interleave(2, 1) for x in exact]
    scores = published_scores(spec, wide[0], wide[1]) / math.sqrt(dim)
    wanted = scores.softmax(-1) @ wide[2]
    given = torch.randn_like(wanted)
    (wanted * given).sum().backward()
    (out * given).sum().backward()

    # Angles are float32: a product of position and frequency has two roundings, on either side. What a score is off by
    # moves each weight relatively by twice that, and so an output by that of the largest value.
    eps = torch.finfo(torch.float32).eps
    size = (wide[0].norm(dim=-1).max() * wide[1].norm(dim=-1).max() / math.sqrt(dim)).item()
    allowed = 2 * (4 * n * eps * size + 4 * eps * size)
    assert (out - wanted).abs().max() <= allowed * wide[2].abs().max()
    for ours, theirs in zip((q, k, v), exact, strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= n * allowed * max(1.0, theirs.grad.abs().max().item())


MODEL_SPECS = [*SPECS, "yarn:4", "rerope:7+logn", "logn"]


def stretched_model(spec: str, case: str = "rope", **changes: object):
    return lw.stretch(loud_model(case, **changes), spec)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("spec", MODEL_SPECS)
@torch.no_grad()
def test_cached_decoding_is_one_pass(spec, kind):
    model, ids = stretched_model(spec), tokens()
    whole = model(ids).logits
    cache = make_cache(kind, model)
    assert_decodes(by_chunks(model, ids, [11, 1, 1, 9, 1, 6], cache), whole, spec, model, ids)


@pytest.mark.parametrize("spec", ["self-extend:4:7", "dca:6:9", "streaming:7:3"])
@torch.no_grad()
def test_padding_and_packing_change_nothing(spec):
    model, ids = stretched_model(spec), tokens(batch=1)
    whole = model(ids).logits
    mask = torch.ones(1, LENGTH + 5, dtype=torch.long)
    mask[:, :5] = 0
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    assert_decodes(model(padded, attention_mask=mask).logits[:, 5:], whole, "left padding", model, ids)
    places = torch.cat([torch.arange(LENGTH), torch.arange(LENGTH)])[None]
    packed = model(torch.cat([tokens(1, seed=5), ids], 1), position_ids=places, use_cache=False).logits[:, LENGTH:]
    assert_decodes(packed, whole, "packing", model, ids)


@torch.no_grad()
def test_generate_writes_what_one_pass_after_the_other_would():
    model, ids = stretched_model("self-extend:4:7"), tokens(batch=1)
    written = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for count in range(8):
        assert model(written[:, : LENGTH + count]).logits[0, -1].argmax() == written[0, LENGTH + count]


@pytest.mark.parametrize(
    "changes",
    [
        {"encoding": "rope+fox"},
        {"encoding": "alibi+rope+sink"},
        {"n_head": 4, "n_kv_head": 2, "head_dim": 8, "softcap": 5.0},
        {"qk_norm": "rms", "qk_norm_place": "after", "share_encoding": True},
        {"encoding_options": {"part": 0.5, "layout": "interleaved", "scaling": {"type": "yarn", "factor": 2.0}}},
    ],
    ids=str,
)
@torch.no_grad()
def test_up_to_the_window_a_stretched_model_is_the_plain_one_whatever_stands_beside_rope(changes):
    model, ids = loud_model("rope", **changes), tokens()
    plain = model(ids[:, :13]).logits
    longer = model(ids).logits
    for spec in ("rerope:13", "leaky-rerope:13:2", "self-extend:4:13", "dca:13:20", "streaming:13", "lm-infinite:13"):
        lw.stretch(model, spec)
        assert_decodes(model(ids[:, :13]).logits, plain, spec, model, ids[:, :13])
        assert not torch.allclose(model(ids).logits, longer, rtol=1e-3, atol=1e-3), "beyond it something must change"
        lw.unstretch(model)
    assert torch.equal(model(ids).logits, longer)


@torch.no_grad()
def test_weights_that_are_asked_for_are_those_of_all_bands_together():
    model, ids = stretched_model("self-extend:4:7"), tokens()
    out = model(ids, output_attentions=True)
    assert_decodes(out.logits, model(ids).logits, "with weights", model, ids)
    for weights in out.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


@torch.no_grad()
def test_layers_that_see_no_further_than_the_trained_length_stay_as_they_are():
    model = loud_model("window and none")
    with pytest.raises(NotImplementedError, match="has none"):
        lw.stretch(model, "rerope:7")
    model = loud_model("rope", encoding=None, layers="rope:7,rope")
    lw.stretch(model, "rerope:7")
    assert [type(block.attn.encoding) for block in model.transformer.h] == [Rope, StretchedRope]


@torch.no_grad()
def test_a_model_comes_back_bit_for_bit_and_a_copy_is_stretched_by_itself(tmp_path):
    model, ids = loud_model("rope"), tokens()
    plain = model(ids).logits
    lw.stretch(model, "self-extend:4:7")
    far = model(ids).logits
    assert stretched(model).spec.label == "self-extend:4:7"
    twin = lw.unstretch(copy.deepcopy(model))
    assert torch.equal(twin(ids).logits, plain)
    assert torch.equal(model(ids).logits, far)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, plain), "a saved model is the plain one"
    assert torch.equal(lw.unstretch(model)(ids).logits, plain)
    assert stretched(model) is None


BAD_FACTORS = ("inf", "nan", "0", "-2", "1e300")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("self-extent:8", OptionError, "unknown stretching method 'self-extent'; did you mean 'self-extend'"),
        (
            "self-extend",
            OptionError,
            r"must be written self-extend:G\[:W\], with positive whole numbers, got 'self-extend'",
        ),
        ("rerope:many", OptionError, "must be written rerope:W, .* got 'rerope:many'"),
        ("rerope:0", OptionError, "positive whole numbers, got 'rerope:0'"),
        ("dca:1:2:3", OptionError, "got 'dca:1:2:3'"),
        ("yarn", OptionError, "TYPE:FACTOR, such as 'yarn:8', got 'yarn'"),
        ("rerope:7+alibi", OptionError, r"can be '\+logn' and nothing else"),
        ("dca:18", OptionError, "S of .* must be at least C, .* got C = 18 and S = 17, which is 3/4 of the trained"),
        ("dca:6:5", OptionError, "got C = 6 and S = 5"),
        ("rerope:99", OptionError, "below the trained length, 23, as they are, got 99"),
        (8, OptionError, "must be written such as 'self-extend:8', got 8"),
        *((f"yarn:{factor}", OptionError, f"from 1 to 16,777,216, got 'yarn:{factor}'") for factor in BAD_FACTORS),
        ({"type": "yarn", "factor": float("inf")}, OptionError, "from 1 to 16,777,216, got 'yarn:inf'"),
        ("self-extend:99999999999999999999", OptionError, "at most 16,777,216, got 'self-extend:9{20}'"),
        ({"type": "longrope"}, ValueError, "rope scaling 'longrope' lacks 'short_factor'"),
    ],
    ids=str,
)
def test_a_way_to_stretch_that_cannot_be_is_refused_in_words(spec, error, words):
    model = loud_model("rope")
    with pytest.raises(error, match=words):
        lw.stretch(model, spec)
    assert stretched(model) is None


@pytest.mark.parametrize("numbers", [(6, 6), (6, 9), (1, 1), (17,), ()], ids=str)
def test_no_key_comes_behind_its_query_under_dual_chunk_attention(numbers):
    place = torch.arange(60)[None]
    turnings = METHODS["dca"](23, *numbers).turnings(place, place)
    d = place.T - place
    for chunks, turning in enumerate(turnings):
        apart = (place.T // turning.band.chunk) - (place // turning.band.chunk)
        met = (apart == chunks if chunks < 2 else apart >= 2) & (d > 0)
        query, key = turning.query.expand(1, 60), turning.key
        assert ((query.T - key)[met] > 0).all()


def test_models_that_cannot_be_stretched_are_refused_by_name():
    for case, spec, words in (
        ("alibi", "rerope:7", "needs RoPE in layers that see beyond the trained length, 23"),
        ("rope-dynamic", "rerope:7", "angles that do not depend on the length, got .* DynamicNtk"),
        ("rope-dynamic", "yarn:4", "needs a RoPE without one, got DynamicNtk"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            lw.stretch(loud_model(case), spec)
    with pytest.raises(NotImplementedError, match="replaces the scores"):
        lw.stretch(loud_model("rope", encoding="rope+dapev2"), "rerope:7")
    lw.stretch(loud_model("rope", encoding=None, layers="rope,carope+dapev2"), "rerope:7")  # no RoPE with the scores
    encoder = LengthwiseForMaskedLM(LengthwiseEncoderConfig(encoding="rope", n_layer=1, n_embd=24, n_head=3))
    for spec in ("rerope:7", "window"):
        with pytest.raises(NotImplementedError, match="bands are for causal models, got LengthwiseForMaskedLM"):
            lw.stretch(encoder, spec)
    for layers, words in (("rope:7,rope", "all must see beyond"), ("rope:99,rope", "got a window beyond it")):
        with pytest.raises(NotImplementedError, match=words):
            lw.stretch(loud_model("rope", encoding=None, layers=layers, share_encoding=True), "rerope:7")
    model = lw.stretch(loud_model("rope"), "rerope:7")
    with pytest.raises(ValueError, match=r"stretched by 'rerope:7' already; call lw\.unstretch"):
        lw.stretch(model, "yarn:4")
    with pytest.raises(ValueError, match="must have been stretched"):
        lw.unstretch(lw.unstretch(model))
    model.set_attn_implementation("sdpa")
    with pytest.raises(NotImplementedError, match="runs under attention 'lengthwise' or 'eager', got 'sdpa'"):
        lw.stretch(model, "rerope:7")


def test_every_method_says_how_it_is_written():
    assert set(METHODS) == {spec.partition(":")[0] for spec in SPECS}


def test_the_example_of_the_docs_runs():
    page = (Path(__file__).parents[1] / "docs/stretching.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(block, "stretching.md", "exec"), {})


@pytest.mark.parametrize("spec", ["window:4", "streaming:4:3", "lm-infinite:4:3"])
@torch.no_grad()
def test_keys_that_are_dropped_are_not_seen_through_layers_without_rope(spec):
    for layers in ("rope,none", "rope,alibi"):
        model, ids = loud_model("rope", encoding=None, layers=layers), tokens()[:1]
        plain = model(ids).logits
        whole = lw.stretch(model, spec)(ids).logits
        other = ids.clone()
        other[:, 5] = (other[:, 5] + 1) % 90
        assert torch.equal(model(other).logits[:, 12:], whole[:, 12:]), layers
        assert torch.equal(lw.unstretch(model)(ids).logits, plain)
    model = loud_model("rope", encoding=None, layers="rope,path")
    with pytest.raises(
        NotImplementedError, match="layers without RoPE must be able to have its window, got one with 'path'"
    ):
        lw.stretch(model, spec)
    assert stretched(model) is None
