"""The four kinds of bias: each is what its first line says, whole or in part."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from witness import assert_refuses, assert_same

import lengthwise as lw

EPS = torch.finfo(torch.float32).eps


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def distance_bias(batch=3, heads=7, queries=5, keys=11, *, first=0, length=4, dtype=torch.float32, seed=0):
    """Random positions; `batch` is that of the queries and of the keys, or a pair."""
    g = draws(seed)
    of_query, of_key = batch if isinstance(batch, tuple) else (batch, batch)
    return lw.DistanceBias(
        torch.randn(heads, length, generator=g).to(dtype),
        torch.randint(0, 13, (of_query, queries), generator=g),
        torch.randint(-3, 13, (of_key, keys), generator=g),
        first,
    )


def level_bias(batch=3, heads=7, queries=5, keys=11, *, slopes=None, dtype=torch.float32, seed=0):
    g = draws(seed)
    return lw.LevelBias(
        torch.randn(batch, heads, queries, generator=g, dtype=torch.float64),
        torch.randn(batch, heads, keys, generator=g, dtype=torch.float64),
        torch.rand(slopes or (batch, heads, queries), generator=g).to(dtype),
    )


def product_tile(rows, columns, query, key, weight):
    return weight[:, None, None] * query[:, None, rows, None] * key[:, None, None, columns]


def function_bias(batch=3, heads=7, queries=5, keys=11, *, dtype=torch.float32, seed=0):
    g = draws(seed)
    query, key = (torch.randint(0, 13, (batch, length), generator=g) for length in (queries, keys))
    return lw.FunctionBias(product_tile, (query, key, torch.randn(heads, generator=g).to(dtype)))


def dense_bias(batch=3, heads=7, queries=5, keys=11, *, dtype=torch.float32, seed=0):
    return lw.DenseBias(torch.randn(batch, heads, queries, keys, generator=draws(seed)).to(dtype))


KINDS = pytest.mark.parametrize("kind", [distance_bias, level_bias, function_bias, dense_bias])


def filled(bias, value):
    """The matrix by plain loops; value(b, h, i, j) takes the bias's own numbers."""
    whole = torch.empty(bias.shape, dtype=torch.float64)
    for index in itertools.product(*map(range, bias.shape)):
        whole[index] = value(*index)
    return whole


@pytest.mark.parametrize("batch", [3, 1, (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize(("first", "length"), [(0, 4), (0, 1), (-2, 5), (-20, 41), (3, 2)])
def test_a_distance_bias_looks_up_the_distance_and_is_constant_beyond_the_tables_ends(batch, first, length):
    bias = distance_bias(batch, first=first, length=length)
    table, query, key = (tensor.tolist() for tensor in (bias.table, bias.query, bias.key))

    def value(b, h, i, j):
        distance = query[b % len(query)][i] - key[b % len(key)][j]
        return table[h][min(max(distance - first, 0), length - 1)]

    assert torch.equal(bias.dense().double(), filled(bias, value))


@pytest.mark.parametrize("beyond", ["clamp", "zero"])
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(("batch", "heads"), [((3, 1, 3), (7, 1)), ((1, 3, 1), (1, 7)), ((1, 1, 1), (7, 7))], ids=str)
@pytest.mark.parametrize(("first", "length", "queries"), [(0, 4, 5), (-2, 5, 5), (-20, 41, 2), (3, 1, 5)])
def test_a_query_distance_bias_mixes_profiles_by_query_or_by_key(first, length, queries, batch, heads, side, beyond):
    g = draws()
    of_rows, of_query, of_key = batch
    query, key = torch.randint(0, 13, (of_query, queries), generator=g), torch.randint(0, 13, (of_key, 11), generator=g)
    # Small whole numbers: their sums are exact in any order.
    rows = torch.randint(-9, 9, (of_rows, heads[0], queries if side == "query" else 11, 4), generator=g).float()
    profiles = torch.randint(-9, 9, (heads[1], 4, length), generator=g).float()
    bias = lw.QueryDistanceBias(rows, profiles, query, key, first, side, beyond)

    def value(b, h, i, j):
        column = int(query[b % of_query, i] - key[b % of_key, j]) - first
        if beyond == "zero" and not 0 <= column < length:
            return 0.0
        own = rows[b % of_rows, h % heads[0], i if side == "query" else j].tolist()
        curves = profiles[h % heads[1]].tolist()
        return sum(x * curve[min(max(column, 0), length - 1)] for x, curve in zip(own, curves, strict=True))

    whole = bias.dense()
    assert torch.equal(whole.double(), filled(bias, value))
    for rows, columns in ((slice(1, 4), slice(2, 9)), (torch.tensor([1, 0]), slice(0, 0)), (slice(0, 1), slice(None))):
        assert torch.equal(bias.tile(rows, columns), whole[:, :, rows][..., columns])


def test_one_row_of_positions_may_come_without_its_batch():
    bias = distance_bias(1)
    same = lw.DistanceBias(bias.table, bias.query[0], bias.key[0])
    assert same.shape == bias.shape
    assert torch.equal(same.dense(), bias.dense())


@pytest.mark.parametrize("slopes", [None, (1, 1, 1), (1, 7, 1), (3, 1, 5)], ids=str)
@pytest.mark.parametrize(("batch", "heads"), [(3, 7), (1, 7), (3, 1)])
def test_a_level_bias_falls_with_the_difference_of_levels(batch, heads, slopes):
    bias = level_bias(batch, heads, slopes=slopes)

    def at(tensor, b, h, i):
        return tensor[tuple(n % size for n, size in zip((b, h, i), tensor.shape, strict=True))].item()

    def value(b, h, i, j):
        return -at(bias.slope, b, h, i) * abs(at(bias.query_level, b, h, i) - at(bias.key_level, b, h, j))

    # The difference is rounded to float32 and so is its product with the slope: half a unit each.
    assert_same(bias.dense(), filled(bias, value), roundings=1)


def test_a_function_bias_is_its_function_of_every_row_and_column():
    bias = function_bias()
    query, key, weight = (tensor.tolist() for tensor in bias.arguments)
    expected = filled(bias, lambda b, h, i, j: weight[h] * query[b][i] * key[b][j])
    assert_same(bias.dense(), expected, roundings=1)


def test_a_dense_bias_is_its_value():
    bias = dense_bias()
    assert torch.equal(bias.dense(), bias.value)


SIZES = st.integers(1, 7)


@KINDS
@settings(max_examples=40, deadline=None)
@given(data=st.data(), batch=SIZES, heads=SIZES, queries=SIZES, keys=SIZES, seed=st.integers(0, 99))
def test_a_tile_is_that_part_of_the_whole(kind, data, batch, heads, queries, keys, seed):
    bias = kind(batch, heads, queries, keys, seed=seed)
    parts = []
    for length in (queries, keys):
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, length))
        places = torch.tensor(data.draw(st.lists(st.integers(0, length - 1), max_size=9)), dtype=torch.long)
        parts.append(data.draw(st.sampled_from([slice(start, stop), slice(None), places])))
    rows, columns = parts
    assert bias.shape == (batch, heads, queries, keys)
    assert torch.equal(bias.tile(rows, columns), bias.dense()[:, :, rows][..., columns])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [distance_bias, level_bias, dense_bias])
def test_a_bias_is_float32_or_better_whatever_it_is_made_of(kind, dtype):
    wanted = dtype if dtype == torch.float64 else torch.float32
    assert kind(dtype=dtype).dense().dtype == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_slope_does_not_round_the_bias(dtype):
    bias = level_bias(dtype=dtype)
    again = lw.LevelBias(bias.query_level, bias.key_level, bias.slope.float())
    assert torch.equal(bias.dense(), again.dense())


def test_levels_keep_their_precision_however_high_they_have_climbed():
    # 1e7 + 0.001 n: a float32 level has a unit of 1 here; a float64 one of 2e-9, a millionth of a step's half.
    level = 1e7 + 1e-3 * torch.arange(101, dtype=torch.float64)[None, None]
    bias = lw.LevelBias(level, level, torch.ones(1, 1, 1)).dense()[0, 0]
    steps = torch.arange(101, dtype=torch.float64)
    expected = -1e-3 * (steps[:, None] - steps).abs()
    # Two levels are each rounded to half a unit of float64 at 1e7; the difference to half a unit of float32.
    allowed = expected.abs() * EPS + 1e7 * torch.finfo(torch.float64).eps
    assert ((bias.double() - expected).abs() <= allowed).all()


@KINDS
def test_a_bias_is_frozen(kind):
    bias = kind()
    for field in dataclasses.fields(bias):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(bias, field.name, None)


@pytest.mark.parametrize(
    ("kind", "learned"),
    [
        (distance_bias, ["table"]),
        (level_bias, ["query_level", "key_level", "slope"]),
        (dense_bias, ["value"]),
    ],
)
def test_a_gradient_flows_to_every_source(kind, learned):
    bias = kind(dtype=torch.float64)
    assert not bias.needs_grad
    for name in learned:
        leaf = getattr(bias, name).clone().requires_grad_()
        with_leaf = dataclasses.replace(bias, **{name: leaf})
        assert with_leaf.needs_grad
        assert any(source is leaf for source in with_leaf.sources)
        (gradient,) = torch.autograd.grad(with_leaf.dense().sum(), leaf)
        assert gradient.abs().sum() > 0
    assert len(bias.sources) == len(learned)


def test_the_sources_of_a_function_are_its_floating_point_tensors():
    bias = function_bias()
    query, key, weight = bias.arguments
    assert [source is weight for source in bias.sources] == [True]
    assert not bias.needs_grad
    assert lw.FunctionBias(product_tile, (query, key, weight.requires_grad_())).needs_grad


POSITIONS = torch.arange(5)
LEVEL = torch.zeros(1, 7, 5, dtype=torch.float64)

MALFORMED = {
    "a table without heads": (lambda: lw.DistanceBias(torch.zeros(4), POSITIONS, POSITIONS), ValueError, "(4,)"),
    "a table of integers": (
        lambda: lw.DistanceBias(torch.zeros(7, 4).long(), POSITIONS, POSITIONS),
        TypeError,
        "torch.int64",
    ),
    "a table without distances": (lambda: lw.DistanceBias(torch.zeros(7, 0), POSITIONS, POSITIONS), ValueError, "none"),
    "a table that is a list": (lambda: lw.DistanceBias([1.0], POSITIONS, POSITIONS), TypeError, "list"),
    "positions that are a list": (lambda: lw.DistanceBias(torch.zeros(7, 4), [0, 1], POSITIONS), TypeError, "list"),
    "positions that are real": (
        lambda: lw.DistanceBias(torch.zeros(7, 4), POSITIONS.float(), POSITIONS),
        TypeError,
        "torch.float32",
    ),
    "positions that are true or false": (
        lambda: lw.DistanceBias(torch.zeros(7, 4), POSITIONS, POSITIONS > 2),
        TypeError,
        "torch.bool",
    ),
    "positions per head": (
        lambda: lw.DistanceBias(torch.zeros(7, 4), POSITIONS[None, None], POSITIONS),
        ValueError,
        "(1, 1, 5)",
    ),
    "queries of two sequences and keys of three": (
        lambda: lw.DistanceBias(torch.zeros(7, 4), POSITIONS.expand(2, 5), POSITIONS.expand(3, 5)),
        ValueError,
        "2 and 3",
    ),
    "rows without heads": (
        lambda: lw.QueryDistanceBias(torch.zeros(1, 5, 4), torch.zeros(1, 4, 3), POSITIONS, POSITIONS),
        ValueError,
        "rows must be",
    ),
    "rows of three profiles for four": (
        lambda: lw.QueryDistanceBias(torch.zeros(1, 1, 5, 3), torch.zeros(1, 4, 3), POSITIONS, POSITIONS),
        ValueError,
        "(1, 1, 5, 3)",
    ),
    "rows of queries for the keys": (
        lambda: lw.QueryDistanceBias(torch.zeros(1, 1, 5, 4), torch.zeros(1, 4, 3), POSITIONS, POSITIONS[:2], 0, "key"),
        ValueError,
        "One for each key",
    ),
    "a side that there is not": (
        lambda: lw.QueryDistanceBias(torch.zeros(1, 1, 5, 4), torch.zeros(1, 4, 3), POSITIONS, POSITIONS, 0, "both"),
        ValueError,
        "'query' or 'key'",
    ),
    "profiles without distances": (
        lambda: lw.QueryDistanceBias(torch.zeros(1, 1, 5, 4), torch.zeros(1, 4, 0), POSITIONS, POSITIONS),
        ValueError,
        "none",
    ),
    "profiles of seven heads and rows of three": (
        lambda: lw.QueryDistanceBias(torch.zeros(1, 3, 5, 4), torch.zeros(7, 4, 2), POSITIONS, POSITIONS),
        ValueError,
        "3 and 7",
    ),
    "levels without a batch": (lambda: lw.LevelBias(LEVEL[0], LEVEL, LEVEL), ValueError, "(7, 5)"),
    "levels of integers": (lambda: lw.LevelBias(LEVEL, LEVEL.long(), LEVEL), TypeError, "torch.int64"),
    "levels of float32": (lambda: lw.LevelBias(LEVEL.float(), LEVEL, LEVEL), TypeError, "got torch.float32"),
    "key levels of half precision": (lambda: lw.LevelBias(LEVEL, LEVEL.half(), LEVEL), TypeError, "key_level must be"),
    "levels of seven heads and of three": (lambda: lw.LevelBias(LEVEL, LEVEL[:, :3], LEVEL), ValueError, "7 and 3"),
    "four slopes for five queries": (lambda: lw.LevelBias(LEVEL, LEVEL, LEVEL[..., :4]), ValueError, "got 4"),
    "a function of one tensor": (lambda: lw.FunctionBias(product_tile, (POSITIONS,)), ValueError, "got 1 arguments"),
    "a function that is a number": (lambda: lw.FunctionBias(3, (POSITIONS, POSITIONS)), TypeError, "got 3"),
    "a matrix without a batch": (lambda: lw.DenseBias(torch.zeros(7, 5, 5)), ValueError, "(7, 5, 5)"),
    "a matrix of booleans": (lambda: lw.DenseBias(torch.ones(1, 7, 5, 5).bool()), TypeError, "torch.bool"),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_bias_is_refused_when_it_is_made(case):
    make, error, got = case
    assert_refuses(make, error, got)
