"""First witness, continued: encodings that act on tokens, on queries and keys, or on the scores, in plain loops."""

import functools
import itertools
import math

import pytest
import torch
from witness import HEADS, SCENES, WIDTH, assert_same, dot, make, numbers

import lengthwise as lw

EPS32 = torch.finfo(torch.float32).eps

# base ** (-2k / d) in float32: the exponent is rounded (half a unit), which the logarithm of the base, 9.3, multiplies;
# the power, its reciprocal and the product with the position take one or two more each. No more than 10 in all.
ANGLE_ROUNDINGS = 10


def wave_error(position, frequency):
    """How far the cosine or sine of a float32 angle may be from the true one."""
    return (ANGLE_ROUNDINGS * abs(position) * frequency + 2) * EPS32


def assert_within(got, expected, allowed):
    excess = ((got - expected).abs() - allowed).max()
    assert excess <= 0, f"off by {excess:.3g} more than the angles' rounding"


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_learned_positions_add_the_row_of_each_token(scene):
    encoding = make("learned", train_length=211)
    x = scene.tokens()[:, : scene.queries]
    weight, tokens = numbers(encoding.weight), numbers(x)
    got = encoding.embed(x, lw.TokenLayout.of(torch.tensor(scene.query)))
    for b, i, c in itertools.product(*map(range, x.shape)):
        position, _ = scene.at(b, i, 0)
        assert got[b, i, c].item() == tokens[b][i][c] + weight[position][c]


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_sinusoidal_positions_add_sine_and_cosine_in_turn(scene):
    amplitude = 0.7
    x = scene.tokens()[:, : scene.queries]
    expected, allowed = torch.empty_like(x), torch.empty_like(x)
    for b, i, c in itertools.product(*map(range, x.shape)):
        position, _ = scene.at(b, i, 0)
        frequency = 10000 ** (-(c - c % 2) / WIDTH)
        wave = math.cos(position * frequency) if c % 2 else math.sin(position * frequency)
        expected[b, i, c] = x[b, i, c].item() + amplitude * wave
        allowed[b, i, c] = amplitude * wave_error(position, frequency)
    got = make("sinusoidal", amplitude=amplitude).embed(x, lw.TokenLayout.of(torch.tensor(scene.query)))
    assert_within(got, expected, allowed)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_turns_pairs_of_channels_by_position(layout, scene):
    dim, base = 6, 500.0
    encoding = make("rope", head_dim=dim, layout=layout, base=base)
    generator = torch.Generator().manual_seed(11)
    q, k = (
        torch.randn(3, heads, length, dim, dtype=torch.float64, generator=generator)
        for heads, length in ((HEADS, scene.queries), (1, scene.keys))
    )
    turned = encoding.rotate(q, k, lw.TokenLayout.of(torch.tensor(scene.query), torch.tensor(scene.key)))
    for before, after, of_query in ((q, turned[0], True), (k, turned[1], False)):
        expected, allowed = torch.empty_like(before), torch.empty_like(before)
        for b, h, i, pair in itertools.product(*map(range, (*before.shape[:3], dim // 2))):
            position = scene.at(b, i, 0)[0] if of_query else scene.at(b, 0, i)[1]
            frequency = base ** (-2 * pair / dim)
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            first, second = (pair, pair + dim // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
            x, y = before[b, h, i, first].item(), before[b, h, i, second].item()
            expected[b, h, i, first] = x * cos - y * sin
            expected[b, h, i, second] = y * cos + x * sin
            allowed[b, h, i, [first, second]] = (abs(x) + abs(y)) * wave_error(position, frequency)
        assert_within(after, expected, allowed)


def rescored(encoding, *, rows, keys, causal):
    """Random content, bias and queries as attention gives them, the scores made of them, and the mask as lists."""
    generator = torch.Generator().manual_seed(13)
    slots, columns = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
    padding = torch.tensor([0, 2])[:, None, None, None]
    mask = (columns >= padding).expand(-1, -1, rows, -1) & ((columns <= slots) | (not causal))
    content, bias = (
        torch.randn(2, HEADS, rows, keys, dtype=torch.float64, generator=generator).masked_fill(~mask, 0)
        for _ in range(2)
    )
    q = torch.randn(2, HEADS, rows, encoding.shape.head_dim, dtype=torch.float64, generator=generator)
    k = torch.zeros(2, HEADS, keys, encoding.shape.head_dim, dtype=torch.float64)
    layout = lw.layout(keys, causal=causal)
    rescore = encoding.rescore(torch.zeros(2, keys, WIDTH, dtype=torch.float64), layout)
    return content, bias, q, mask, rescore.scores(content, bias, q, k, mask)


def assert_rescored(got, mask, content, bias, value):
    """Content plus bias plus the witness's value wherever the mask allows."""
    expected = got.detach().clone()
    for b, i, j in mask[:, 0].nonzero().tolist():
        for h in range(HEADS):
            expected[b, h, i, j] = content[b, h, i, j].item() + bias[b, h, i, j].item() + value(b, h, i, j)
    # float64: a few hundred products of numbers near the result's own size.
    assert_same(got.detach(), expected, roundings=1000, scale=expected.abs().max())


SHAPES = pytest.mark.parametrize(("rows", "keys"), [(11, 11), (3, 11), (1, 1)])


@SHAPES
@pytest.mark.parametrize("positions", [4, 64], ids=["beyond the table", "within the table"])
def test_cope_counts_back_over_its_gates(positions, rows, keys):
    encoding = make("cope", positions=positions)
    content, bias, q, mask, got = rescored(encoding, rows=rows, keys=keys, causal=True)
    table, queries, allowed = list(zip(*numbers(encoding.table), strict=True)), numbers(q), mask[:, 0].tolist()

    def value(b, h, i, j):
        gates = [1 / (1 + math.exp(-content[b, h, i, t].item())) for t in range(j, keys) if allowed[b][i][t]]
        position = min(sum(gates), positions - 1)
        below = math.floor(position)
        above = min(below + 1, positions - 1)
        weight = position - below
        of_below, of_above = (dot(queries[b][h][i], table[whole]) for whole in (below, above))
        return (1 - weight) * of_below + weight * of_above

    assert_rescored(got, mask, content, bias, value)


@SHAPES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize(("name", "reach"), [("dape", 0), ("dapev2", 1)])
def test_dape_corrects_scores_by_a_network_across_the_heads(name, reach, causal, rows, keys):
    encoding = make(f"alibi+{name}", causal=causal, **{name: {"hidden": 5}})
    content, bias, _, mask, got = rescored(encoding, rows=rows, keys=keys, causal=causal)
    both, allowed = numbers(torch.cat([content, bias], 1)), mask[:, 0].tolist()
    (w1, b1), (w2, b2) = ([numbers(p) for p in layer.parameters()] for layer in encoding.parts[name].children())

    def layer(weight, constant, channels, i, j):
        """One output of a convolution along row i: channels are [channel](row, key)."""
        seen = range(max(0, j - reach), min(keys, j + reach + 1))
        return constant + sum(
            weight[c][0][t - j + reach] * channel(i, t) for c, channel in enumerate(channels) for t in seen
        )

    def hidden_of(b):
        inputs = [lambda i, t, c=c: both[b][c][i][t] for c in range(2 * HEADS)]

        def unit(n):
            def at(i, j):
                u = layer(w1[n], b1[n], inputs, i, j)
                return (u if u > 0 else 0.01 * u) if allowed[b][i][j] else 0.0

            return functools.cache(at)

        return [unit(n) for n in range(5)]

    hidden = [hidden_of(b) for b in range(2)]
    assert_rescored(got, mask, content, bias, lambda b, h, i, j: layer(w2[h], b2[h], hidden[b], i, j))
