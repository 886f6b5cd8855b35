"""Rotary encodings of two witnesses: the formula in plain loops, and the authors' or transformers' own numbers."""

import cmath
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from witness import assert_refuses, assert_same, dot, make, numbers

import lengthwise as lw

HEADS, DIM, TRAINED, LENGTH = 2, 12, 40, 11
WIDTH = HEADS * DIM
EPS32, EPS64 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64))

ANGLE_ROUNDINGS = 10
"""As in test_witness_scores: a frequency in float32, its product with the position, a cosine."""


def rotary(name, **options):
    """In float64, every parameter a random number."""
    return make(name, heads=HEADS, width=WIDTH, head_dim=DIM, train_length=TRAINED, **options)


def tokens(length=LENGTH, batch=2):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator)


def queries_and_keys(length=LENGTH):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(2, 2, HEADS, length, DIM, dtype=torch.float64, generator=generator).unbind()


def products(encoding, x, layout=None):
    """The product of every query with every key after `rotate`."""
    q, k = queries_and_keys(x.shape[1])
    layout = lw.layout(x.shape[1]) if layout is None else layout
    q, k = encoding.rotate(q, k, layout, encoding.state(x))
    return (q @ k.mT).detach()


def frequency(pair, dim=DIM, base=10000.0):
    return base ** (-2 * pair / dim)


# What a pair of channels, as a complex number, is multiplied by: of a query and of a key at position t.
def rope(encoding, x, part=1.0, resonance=False):
    turning = int(DIM * part)

    def factor(b, h, t, pair, side):
        wave = frequency(pair, turning)
        return cmath.exp(1j * t * (2 * math.pi / round(2 * math.pi / wave) if resonance else wave))

    return factor


def hope(encoding, x):
    return lambda b, h, t, pair, side: (
        cmath.exp(1j * t * frequency(pair)) if frequency(pair) >= 2 * math.pi / TRAINED else 1.0
    )


def xpos(encoding, x, decay=512.0):
    def factor(b, h, t, pair, side):
        zeta = (2 * pair + 0.4 * DIM) / (1.4 * DIM)
        return cmath.exp(1j * t * frequency(pair)) * zeta ** (side * t / decay)

    return factor


def fope(encoding, x, learned=False, sine_of_rest=0):
    of_cos, of_sin = numbers(encoding.mixture if learned else encoding.drawn)
    waves = [frequency(pair) for pair in range(DIM // 2) if frequency(pair) >= 2 * math.pi / TRAINED]

    def factor(b, h, t, pair, side):
        if pair >= min(len(waves), DIM // 4):
            return complex(1, sine_of_rest)
        cos = sum(of_cos[h][n][pair] * math.cos(t * wave) for n, wave in enumerate(waves))
        return complex(cos, sum(of_sin[h][n][pair] * math.sin(t * wave) for n, wave in enumerate(waves)))

    return factor


def grape_m(encoding, x, per_head=False):
    learned = numbers(encoding.log_frequency)
    return lambda b, h, t, pair, side: cmath.exp(1j * t * math.exp(learned[h if per_head else 0][pair]))


def grape_m_ctx(encoding, x):
    (weight,), (start,) = numbers(encoding.to_step.weight), numbers(encoding.to_step.bias)
    learned, rows = numbers(encoding.log_frequency)[0], numbers(x)

    def factor(b, h, t, pair, side):
        steps = (1 / (1 + math.exp(-(dot(weight, rows[b][s]) + start) / 16)) for s in range(t))
        return cmath.exp(1j * sum(steps) * math.exp(learned[pair]))

    return factor


def carope(encoding, x):
    weight, start, rows = numbers(encoding.to_step.weight), numbers(encoding.to_step.bias), numbers(x)

    def factor(b, h, t, pair, side):
        steps = [1 / (math.log1p(math.exp(dot(weight[h], rows[b][s]) + start[h])) + 1) for s in range(t + 1)]
        return cmath.exp(1j * sum(step**pair for step in steps))

    return factor


def repo(encoding, x):
    gate, content, out = (numbers(layer.weight) for layer in (encoding.gate, encoding.content, encoding.out))

    def factor(b, h, t, pair, side):
        row = numbers(x[b, t])
        gates, contents = ([dot(weight, row) for weight in layer] for layer in (gate, content))
        hidden = [g / (1 + math.exp(-g)) * c for g, c in zip(gates, contents, strict=True)]
        return cmath.exp(1j * dot(out[h], hidden) * frequency(pair))

    return factor


def selective_rope(encoding, x):
    down, up, taps = numbers(encoding.down.weight), numbers(encoding.up.weight), numbers(encoding.taps)
    width = WIDTH // HEADS

    def entering(b, t, h, pair):
        row = numbers(x[b, t])
        slices = [row[own * width : (own + 1) * width] for own in range(HEADS)]
        normed = [value / math.sqrt(dot(own, own) + 1e-6) for own in slices for value in own]
        return dot(up[h * DIM // 2 + pair], [dot(weight, normed) for weight in down])

    def factor(b, h, t, pair, side):
        total = sum(
            taps[h][pair][3 - back] * entering(b, s - back, h, pair)
            for s in range(t + 1)
            for back in range(min(4, s + 1))
        )
        return cmath.exp(1j * total * frequency(pair, base=500_000.0))

    return factor


WITNESSES = [
    (rope, "rope", {"part": 0.5}),
    (rope, "rope", {"resonance": True}),
    (hope, "hope", {}),
    (xpos, "xpos", {}),
    (xpos, "xpos", {"decay": 7.0}),
    (fope, "fope", {}),
    (fope, "fope", {"learned": True}),
    (fope, "fope", {"sine_of_rest": 1}),
    (grape_m, "grape-m", {}),
    (grape_m, "grape-m", {"per_head": True}),
    (grape_m_ctx, "grape-m-ctx", {}),
    (carope, "carope", {}),
    (repo, "repo", {}),
    (selective_rope, "selective-rope", {}),
]


@pytest.mark.parametrize(("witness", "name", "options"), WITNESSES, ids=[f"{name} {o}" for _, name, o in WITNESSES])
def test_a_rotation_is_its_papers_formula(witness, name, options):
    encoding, x = rotary(name, **options), tokens()
    factor = witness(encoding, x, **options)
    interleaved = getattr(encoding, "layout", "half") == "interleaved"
    turning = int(DIM * options.get("part", 1.0))
    q, k = queries_and_keys()
    got = products(encoding, x)
    for b, h, i in itertools.product(range(2), range(HEADS), range(LENGTH)):
        for j in range(i + 1):
            expected, size = dot(numbers(q[b, h, i, turning:]), numbers(k[b, h, j, turning:])), 0.0
            for pair in range(turning // 2):
                a, c = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turning // 2)
                of_query, of_key = (complex(z[a].item(), z[c].item()) for z in (q[b, h, i], k[b, h, j]))
                of_query *= factor(b, h, i, pair, 1)
                of_key *= factor(b, h, j, pair, -1)
                expected += (of_query * of_key.conjugate()).real
                size += abs(of_query) * abs(of_key)
            # Where angles are float32, each of two is off by so many roundings; the rest is float64.
            exact = name in ("grape-m", "grape-m-ctx", "carope")
            allowed = size * (1000 * EPS64 if exact else 2 * (ANGLE_ROUNDINGS * LENGTH + 2) * EPS32)
            assert abs(got[b, h, i, j].item() - expected) <= allowed, (b, h, i, j)


def test_pope_scores_lengths_by_the_cosine_of_the_distance_and_its_own_angle():
    encoding, x = rotary("pope"), tokens()
    q, k = queries_and_keys()
    got = products(encoding, x)
    delta = [[min(max(number, -2 * math.pi), 0.0) for number in head] for head in numbers(encoding.delta)]
    for b, h, i, j in itertools.product(range(2), range(HEADS), range(LENGTH), range(LENGTH)):
        lengths = [
            math.log1p(math.exp(a)) * math.log1p(math.exp(c))
            for a, c in zip(numbers(q[b, h, i]), numbers(k[b, h, j]), strict=True)
        ]
        expected = sum(
            length * math.cos((i - j) * 10000 ** (-c / DIM) - delta[h][c]) for c, length in enumerate(lengths)
        )
        assert abs(got[b, h, i, j].item() - expected) <= 1000 * EPS64 * sum(lengths)


def test_pope_is_the_product_of_complex_numbers_in_polar_form():
    encoding = rotary("pope")
    q, k = queries_and_keys()
    angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(DIM).double() / DIM)
    delta = encoding.delta.detach().clamp(-2 * math.pi, 0)[:, None]
    of_query, of_key = torch.polar(F.softplus(q), angles + 0 * q), torch.polar(F.softplus(k), angles + delta + 0 * k)
    expected = (of_query @ of_key.mH).real
    assert_same(products(encoding, tokens()), expected, roundings=1000, scale=float(expected.abs().max()))


def test_partial_rope_is_gpt_neox_own():
    config = GPTNeoXConfig(hidden_size=WIDTH, num_attention_heads=HEADS, rotary_pct=1 / 3)
    q, k = (x.float() for x in queries_and_keys())
    positions = torch.arange(LENGTH)[None]
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, positions)
    theirs = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    ours = lw.make("rope", heads=HEADS, width=WIDTH, part=1 / 3).rotate(q, k, lw.layout(LENGTH))
    for own, their in zip(ours, theirs, strict=True):
        assert_same(own, their, roundings=2 * ANGLE_ROUNDINGS * LENGTH, scale=float(q.abs().max()))
    assert torch.equal(ours[0][..., 4:], q[..., 4:]), "the channels behind must not turn"


def test_resonance_gives_every_pair_a_period_of_whole_tokens():
    encoding = lw.make("rope", heads=1, width=8, resonance=True)
    periods = 2 * math.pi / encoding.frequencies(torch.zeros(1, 1))
    assert_same(periods, torch.tensor([6.0, 63.0, 628.0, 6283.0]), roundings=2)
    stretched = lw.make("rope", heads=1, width=8, resonance=True, scaling={"type": "linear", "factor": 3.0})
    assert_same(
        2 * math.pi / stretched.frequencies(torch.zeros(1, 1)),
        torch.tensor([19.0, 188.0, 1885.0, 18850.0]),
        roundings=2,
    )


def test_xpos_decays_as_torchscale_does():
    encoding = lw.make("xpos", heads=1, width=64, head_dim=64)
    layout = lw.TokenLayout.of(torch.tensor([0, 512, 1024]))
    # Alone in its channels a pair's product is its decay times the cosine of its angle.
    for pair, decays in ((0, (0.285714, 0.081633)), (31, (0.977679, 0.977679**2))):
        q = torch.zeros(1, 1, 3, 64)
        q[..., 2 * pair] = 1.0
        q, k = encoding.rotate(q, q, layout)
        for row, decay in enumerate(decays, 1):
            turned = decay * math.cos(512 * row * 10000 ** (-pair / 32))
            assert float(q[0, 0, row] @ k[0, 0, 0]) == pytest.approx(turned, abs=1e-4 + 0.5e-6)


def test_xpos_says_how_far_a_pass_may_reach():
    encoding = lw.make("xpos", heads=1, width=8)
    q = torch.ones(1, 1, 2, 8)
    for dtype, far in ((torch.float16, 3_966), (torch.float32, 35_694)):
        within, beyond = (lw.TokenLayout.of(torch.tensor([0, end])) for end in (far, far + 1))
        assert all(x.isfinite().all() for x in encoding.rotate(q.to(dtype), q.to(dtype), within))
        call = lambda: encoding.rotate(q.to(dtype), q.to(dtype), beyond)  # noqa: B023, E731
        assert_refuses(call, lw.PositionError, str(far), "chunks")


@pytest.mark.parametrize("name", ["grape-m", "carope", "repo", "fope", "hope"])
def test_an_encoding_that_contains_rope_is_rope_where_it_says_so(name):
    x, layout = tokens(), lw.layout(LENGTH)
    q, k = queries_and_keys()
    sizes = {"heads": HEADS, "width": WIDTH, "train_length": TRAINED}
    encoding, options = lw.make(name, **sizes).double(), {}
    state = encoding.state(x)
    if name == "repo":
        state = {"position": torch.arange(LENGTH).double().expand(2, HEADS, -1)}
    if name == "hope":
        part = sum(frequency(pair) >= 2 * math.pi / TRAINED for pair in range(DIM // 2)) / (DIM // 2)
        options = {"scaling": {"type": "proportional", "partial_rotary_factor": part}}
    if name == "fope":  # Without noise, of two waves the first pair has one, its own; the others must say nothing.
        encoding = lw.make(name, gain=1e-30, **sizes)
        assert (encoding.waves_in, encoding.waves_out) == (2, 2)
        keep = torch.arange(DIM) % (DIM // 2) < 2
        q, k = q * keep, k * keep
    ours, theirs = encoding.rotate(q, k, layout, state), lw.make("rope", **options, **sizes).rotate(q, k, layout)
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    difference = (ours[0] @ ours[1].mT - theirs[0] @ theirs[1].mT).abs()
    assert (difference <= 4 * (ANGLE_ROUNDINGS * LENGTH + 2) * EPS32 * size).all()


def test_a_context_aware_phase_starts_where_the_published_code_does():
    encoding = lw.make("grape-m-ctx", heads=HEADS, width=WIDTH)
    step = encoding.state(torch.zeros(1, 3, WIDTH))["step"]
    assert step[0, 0].tolist() == pytest.approx([0.3937] * 3, abs=0.5e-4)


def test_selective_rope_is_its_authors_pipeline_of_convolution_and_cumulative_sum():
    encoding, x = rotary("selective-rope"), tokens()
    normed = F.normalize(x.unflatten(2, (HEADS, -1)), dim=-1, eps=0).flatten(2)
    phi = (normed @ encoding.down.weight.T @ encoding.up.weight.T).mT
    filtered = F.conv1d(phi, encoding.taps.flatten(0, 1)[:, None], padding=3, groups=phi.shape[1])[..., :LENGTH]
    angles = filtered.cumsum(-1).unflatten(1, (HEADS, -1)).mT * 500_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    q, k = (torch.complex(*z.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles) for z in queries_and_keys())
    expected = (q @ k.mH).real
    # Their norm adds 1e-6 to the square, ours as well; here nothing is added.
    got, size = products(encoding, x), (q.abs() @ k.abs().mT)
    assert ((got - expected).abs() <= size.detach() * 1e-5).all()


@pytest.mark.parametrize("name", ["carope", "selective-rope", "grape-m-ctx"])
def test_angles_that_are_sums_are_the_same_on_a_device_without_float64(name, monkeypatch):
    length = 64
    encoding, layout, (q, k) = rotary(name), lw.layout(length), queries_and_keys(length)
    state = encoding.state(tokens(length))

    def met():
        turned = encoding.rotate(q, k, layout, state)
        return (turned[0] @ turned[1].mT).detach()

    wanted = met()
    for module in ("bias", "encodings.grape_m"):
        monkeypatch.setattr(f"lengthwise.{module}.has_float64", lambda device: False)
    # No token turns a pair by more than a few radians, each rounded to float32 as is the sum; the angle enters twice.
    most = 4 * length
    size = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    assert ((met() - wanted).abs() <= size * 2 * 2 * most * EPS32).all()


@pytest.mark.parametrize("name", ["carope", "repo", "selective-rope", "grape-m-ctx"])
def test_a_rotation_by_state_says_what_it_needs(name):
    encoding, layout = rotary(name), lw.layout(LENGTH)
    q, k = queries_and_keys()
    assert_refuses(lambda: encoding.rotate(q, k, layout), ValueError, "state", "encoding.state(x)")
    short = encoding.state(tokens(LENGTH - 1))
    assert_refuses(lambda: encoding.rotate(q, k, layout, short), ValueError, f"all {LENGTH} keys", str(LENGTH - 1))
    if name != "grape-m-ctx":
        state = encoding.state(tokens())
        assert_refuses(lambda: encoding.rotate(q, k[:, :1], layout, state), ValueError, "key head")


@pytest.mark.parametrize(
    ("name", "options", "phrases"),
    [
        ("rope", {"part": 0.25}, ["part", "even", "3"]),
        ("rope", {"part": 1.5}, ["part", "1.5"]),
        ("fope", {"sine_of_rest": 2}, ["sine_of_rest", "2"]),
        ("selective-rope", {"rank": 0}, ["rank", "0"]),
        ("xpos", {"decay": -1.0}, ["decay", "-1"]),
        ("llama4-scale", {"floor": 0}, ["floor", "0"]),
    ],
)
def test_options_that_cannot_be_are_refused(name, options, phrases):
    assert_refuses(lambda: lw.make(name, heads=HEADS, width=WIDTH, **options), ValueError, *phrases)


@pytest.mark.parametrize("name", ["xpos", "selective-rope", "stick-breaking", "path"])
def test_what_looks_back_only_is_refused_two_sided(name):
    make_two_sided = lambda: lw.make(name, heads=HEADS, width=WIDTH, causal=False)  # noqa: E731
    assert_refuses(make_two_sided, ValueError, "causal attention only")
