"""RoPE and every way to stretch it, against transformers' own."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

import lengthwise as lw

EPS = torch.finfo(torch.float32).eps
HEADS, DIM, TRAINED = 3, 26, 211

# A frequency is base ** exponent in float32. Two programs each round the exponent (half a unit, which log(base), 9.2,
# multiplies), the power, its stretching, and the product with the position: no more than 10 units each.
ANGLE_ROUNDINGS = 20

SHORT, LONG = ([1 + pair / slowness for pair in range(DIM // 2)] for slowness in (7, 0.3))

YARN = {"type": "yarn", "factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}

SCALINGS = [
    {"type": "default"},
    {"type": "linear", "factor": 3.0},
    {"type": "dynamic", "factor": 1.0},
    {"type": "dynamic", "factor": 2.5},
    YARN,
    YARN | {"factor": 1.0},
    YARN | {"attention_factor": 0.7},
    YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    YARN | {"mscale": 0.707},
    YARN | {"truncate": False},
    YARN | {"beta_fast": 3.0, "beta_slow": 0.5},
    YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "truncate": False},
    LONGROPE | {"factor": 4.0},
    LONGROPE | {"factor": 1.0},
    LONGROPE | {"factor": 4.0, "attention_factor": 1.3},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "llama3", "factor": 2.0, "low_freq_factor": 0.25, "high_freq_factor": 1.5},
    {"type": "proportional"},
    {"type": "proportional", "partial_rotary_factor": 0.5},
    {"type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
]


def said(scaling):
    """A scaling in a test's name, without its lists."""
    return " ".join(f"{name}={v}" for name, v in (scaling or {}).items() if not isinstance(v, list)) or "plain"


LENGTH_DEPENDENT = [{"type": "dynamic", "factor": 2.5}, LONGROPE | {"factor": 4.0}]


def ours(scaling, *, layout="half", base=10000.0):
    return lw.make(
        "rope", heads=HEADS, width=HEADS * DIM, train_length=TRAINED, layout=layout, base=base, scaling=scaling
    )


def theirs(scaling, base=10000.0):
    parameters = {"rope_theta": base} | {"rope_type" if name == "type" else name: v for name, v in scaling.items()}
    if parameters["rope_type"] in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = TRAINED
    config = LlamaConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=TRAINED,
        rope_parameters=parameters,
    )
    return modeling_llama.LlamaRotaryEmbedding(config)


def queries_and_keys(length, *, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, heads, length, DIM, generator=generator).to(dtype) for heads in (HEADS, 1))


def pair_sums(x, layout):
    """|a| + |b| of the pair that each channel belongs to, and the pair's number, per channel."""
    if layout == "half":
        a, b = x.abs().chunk(2, -1)
        return (a + b).repeat(1, 1, 1, 2), torch.arange(DIM // 2).repeat(2)
    a, b = x.abs()[..., 0::2], x.abs()[..., 1::2]
    return (a + b).repeat_interleave(2, -1), torch.arange(DIM // 2).repeat_interleave(2)


def assert_turned_alike(got, expected, before, *, layout, positions, frequencies, factor=1.0):
    """Equal but for the rounding of float32 angles, cosines and products."""
    sums, pair = pair_sums(before, layout)
    angle_error = ANGLE_ROUNDINGS * positions[:, None] * frequencies[pair]
    allowed = factor * sums * (angle_error + 4) * EPS
    excess = ((got - expected).abs() - allowed).max()
    assert excess <= 0, f"off by {excess:.3g} more than rounding explains"


def test_every_scaling_of_transformers_is_witnessed_here():
    assert {scaling["type"] for scaling in SCALINGS} >= {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("length", [1, 23, TRAINED, TRAINED + 1, 401])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=said)
def test_rope_turns_as_transformers_does(scaling, layout, length):
    q, k = queries_and_keys(length)
    positions = torch.arange(length)
    rotary = theirs(scaling)
    cos, sin = rotary(q, positions[None])
    if layout == "half":
        expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    else:
        cos, sin = cos[..., : DIM // 2], sin[..., : DIM // 2]
        expected = tuple(
            modeling_gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k)
        )
    got = ours(scaling, layout=layout).rotate(q, k, lw.TokenLayout.of(positions))
    for before, after, wanted in zip((q, k), got, expected, strict=True):
        assert_turned_alike(
            after,
            wanted,
            before,
            layout=layout,
            positions=positions,
            frequencies=rotary.inv_freq,
            factor=rotary.attention_scaling,
        )


@pytest.mark.parametrize("base", [100.0, 500000.0])
def test_the_base_is_a_choice(base):
    q, k = queries_and_keys(101)
    positions = torch.arange(101)
    rotary = theirs({"type": "default"}, base=base)
    wanted, _ = modeling_llama.apply_rotary_pos_emb(q, k, *rotary(q, positions[None]))
    got, _ = ours(None, base=base).rotate(q, k, lw.TokenLayout.of(positions))
    assert_turned_alike(got, wanted, q, layout="half", positions=positions, frequencies=rotary.inv_freq)


@pytest.mark.parametrize("length", [23, 101])
def test_static_ntk_enlarges_the_base_whatever_the_length(length):
    factor = 3.0
    base = 10000.0 * factor ** (DIM / (DIM - 2))
    q, k = queries_and_keys(length)
    positions = torch.arange(length)
    frequencies = torch.tensor([base ** (-2 * pair / DIM) for pair in range(DIM // 2)], dtype=torch.float64)
    cos, sin = ((positions[:, None] * frequencies).apply_(wave).float() for wave in (math.cos, math.sin))
    a, b = q.chunk(2, -1)
    wanted = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    got, _ = ours({"type": "ntk", "factor": factor}).rotate(q, k, lw.TokenLayout.of(positions))
    assert_turned_alike(got, wanted, q, layout="half", positions=positions, frequencies=frequencies)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3"])
def test_the_original_length_may_differ_from_the_training_length(kind):
    scaling = next(scaling for scaling in SCALINGS if scaling["type"] == kind)
    q, k = queries_and_keys(307)
    positions = torch.arange(307)
    sizes = {"heads": HEADS, "width": HEADS * DIM, "train_length": 4 * TRAINED}
    stretched = lw.make("rope", scaling=scaling | {"original_max_position_embeddings": TRAINED}, **sizes)
    got = stretched.rotate(q, k, lw.TokenLayout.of(positions))
    for after, wanted in zip(got, ours(scaling).rotate(q, k, lw.TokenLayout.of(positions)), strict=True):
        assert torch.equal(after, wanted)


def test_a_scaling_may_be_named_as_transformers_names_it():
    named = {"rope_type" if name == "type" else name: value for name, value in YARN.items()}
    assert ours(named).scaling == ours(YARN).scaling


def test_longrope_changes_lists_just_beyond_the_training_length():
    q = torch.zeros(1, 1, TRAINED + 1, DIM)
    q[..., : DIM // 2] = 1
    encoding = ours(LONGROPE | {"attention_factor": 1.0})
    for length, divisor in ((TRAINED, SHORT), (TRAINED + 1, LONG)):
        positions = torch.arange(length)
        turned, _ = encoding.rotate(q[:, :, :length], q[:, :, :length], lw.TokenLayout.of(positions))
        for pair in range(DIM // 2):
            angle = 1 / (divisor[pair] * 10000 ** (2 * pair / DIM))
            assert turned[0, 0, 1, pair].item() == pytest.approx(math.cos(angle), abs=ANGLE_ROUNDINGS * EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, YARN, LENGTH_DEPENDENT[0]], ids=said)
def test_half_precision_is_turned_in_float32_and_rounded_once(scaling, layout, dtype):
    # At positions near 8,000 an angle in bfloat16 would be off by whole turns.
    positions = torch.arange(8000, 8023)
    q, k = queries_and_keys(23, dtype=dtype)
    encoding = ours(scaling, layout=layout)
    got = encoding.rotate(q, k, lw.TokenLayout.of(positions))
    for after, wanted in zip(got, encoding.rotate(q.float(), k.float(), lw.TokenLayout.of(positions)), strict=True):
        assert after.dtype == dtype
        assert torch.equal(after, wanted.to(dtype))


@pytest.mark.parametrize("scaling", SCALINGS, ids=said)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_product_of_query_and_key_depends_on_their_distance_alone(layout, scaling):
    encoding = ours(scaling, layout=layout)
    q, k = (x[:, :1].double() for x in queries_and_keys(23))
    shift, positions = 11, torch.arange(23)
    # Both stretches end below the training length, so that rules that depend on the length give both the same angles.
    here, there = (
        a @ b.transpose(-1, -2)
        for a, b in (encoding.rotate(q, k, lw.TokenLayout.of(p)) for p in (positions, positions + shift))
    )
    # Four float32 angles enter a product, each off by 10 units of at most its position: no pair turns faster than 1.
    lengths = q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :] * encoding.scaling.factor**2
    allowed = 4 * (10 * (23 + shift) + 2) * EPS * lengths
    assert ((here - there).abs() <= allowed).all()


@pytest.mark.parametrize("scaling", LENGTH_DEPENDENT, ids=said)
@pytest.mark.parametrize("lengths", [(307, 23), (23, 307), (212, 229), (1, 307)])
def test_packed_documents_turn_as_each_would_alone(scaling, lengths):
    encoding = ours(scaling)
    q, k = queries_and_keys(sum(lengths))
    packed = torch.cat([torch.arange(length) for length in lengths])
    together = encoding.rotate(q, k, lw.TokenLayout.of(packed))
    for document in (slice(0, lengths[0]), slice(lengths[0], None)):
        alone = encoding.rotate(q[:, :, document], k[:, :, document], lw.TokenLayout.of(packed[document]))
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[:, :, document], part)


@pytest.mark.parametrize("scaling", LENGTH_DEPENDENT, ids=said)
def test_each_sequence_has_its_own_length(scaling):
    encoding = ours(scaling)
    q, k = queries_and_keys(29, batch=2)
    positions = torch.stack([torch.arange(29), torch.arange(TRAINED, TRAINED + 29)])
    together = encoding.rotate(q, k, lw.TokenLayout.of(positions))
    for row in range(2):
        alone = encoding.rotate(q[row : row + 1], k[row : row + 1], lw.TokenLayout.of(positions[row]))
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[row : row + 1], part)


@pytest.mark.parametrize("scaling", [*LENGTH_DEPENDENT, None], ids=said)
@pytest.mark.parametrize("room", [0, 31], ids=["no room", "room behind the newest key"])
def test_a_cached_decoder_turns_all_keys_as_one_pass_does(scaling, room):
    encoding = ours(scaling)
    q, k = queries_and_keys(TRAINED + 1 + room)
    slots = torch.arange(TRAINED + 1 + room)
    now = slots[: TRAINED + 1]
    whole = encoding.rotate(q[:, :, : TRAINED + 1], k[:, :, : TRAINED + 1], lw.TokenLayout.of(now))
    last, keys = encoding.rotate(q[:, :, TRAINED : TRAINED + 1], k, lw.TokenLayout.of(now[-1:], slots))
    assert torch.equal(last, whole[0][:, :, -1:])
    assert torch.equal(keys[:, :, : TRAINED + 1], whole[1])


@pytest.mark.parametrize("scaling", SCALINGS, ids=said)
def test_a_rope_says_whether_its_angles_change_as_a_sequence_grows(scaling):
    assert ours(scaling).length_dependent == (scaling["type"] in ("dynamic", "longrope"))
