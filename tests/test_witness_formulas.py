"""First witness: every additive encoding against its paper's formula, in plain loops that share no code with it."""

import math

import pytest
import torch
from witness import BATCH, HEADS, SCENES, assert_same, dot, make, numbers

import lengthwise as lw

# 7 heads: the slopes of 4, then the first, third and fifth of 8.
INTERLEAVED = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3, 2**-5]


def alibi(encoding, causal, slopes="geometric", learned=False, sides="alike"):
    slope = [2 ** (-8 * h / 7) for h in range(1, 8)] if slopes == "geometric" else INTERLEAVED
    if learned and (causal or sides == "alike"):
        slope = [math.exp(number) for number in numbers(encoding.log_slope)]
    if sides == "apart" and not causal:
        both = [[math.exp(number) for number in row] for row in numbers(encoding.log_slope)]
        return lambda h, query, key, last: -both[h][key > query] * abs(query - key)
    return lambda h, query, key, last: -slope[h] * abs(query - key)


def of_sides(encoding, causal, sides, value):
    """A function of p, a and distance whose numbers are those of the key's side, where it has two."""
    p, a = numbers(encoding.p), numbers(encoding.a)
    if causal or sides == "alike":
        p, a = ([[number] * 2 for number in every] for every in (p, a))
    return lambda h, query, key, last: value(p[h][key > query], a[h][key > query], abs(query - key))


def kerple(encoding, causal, sides="alike"):
    return of_sides(encoding, causal, sides, lambda p, a, distance: -p * math.log(1 + a * distance))


def kerple_power(encoding, causal, sides="alike"):
    return of_sides(encoding, causal, sides, lambda p, a, distance: -a * distance**p)


def sandwich(encoding, causal, dim=128):
    waves = [10000 ** (-2 * k / dim) for k in range(dim // 2)]
    return lambda h, query, key, last: 7 / (8 * (h + 1)) * sum(math.cos((query - key) * wave) for wave in waves)


def bam(encoding, causal, learned="shape"):
    shape = [math.exp(number) for number in numbers(encoding.log_shape)]
    scale, location = INTERLEAVED, [0.0] * HEADS
    if learned == "all":
        scale = [math.exp(number) for number in numbers(encoding.log_scale)]
        location = [math.exp(number) - math.exp(-number) for number in numbers(encoding.sinh_location)]
    return lambda h, query, key, last: -((abs((key - query - location[h]) * scale[h]) + 1e-5) ** shape[h])


def fire(encoding, causal, threshold, sides="alike"):
    c, limit = abs(encoding.c.item()), abs(encoding.multiplier.item() * threshold)
    (w1, b1), (w2, b2) = ([numbers(p) for p in layer.parameters()] for layer in (encoding.into, encoding.out))

    def psi(x):
        return math.log(c * x + 1)

    def value(h, query, key, last):
        furthest = query if causal else max(query, last - query)
        sign = -1 if sides == "apart" and key > query else 1
        relative = sign * psi(abs(query - key)) / (psi(max(limit, furthest)) + 1e-6)
        hidden = [max(0.0, w * relative + bias) for (w,), bias in zip(w1, b1, strict=True)]
        return dot(w2[h], hidden) + b2[h]

    return value


def t5(encoding, causal, buckets=32, max_distance=128, sides="apart"):
    table = numbers(encoding.table)
    one = causal or sides == "alike"
    side = buckets if one else buckets // 2
    exact = side // 2

    def bucket(distance):
        if distance < exact:
            return distance
        # A border that is a whole number must not be lost to the rounding of the two logarithms.
        grown = math.log(distance / exact) / math.log(max_distance / exact) * (side - exact) + 1e-9
        return min(exact + math.floor(grown), side - 1)

    return lambda h, query, key, last: table[bucket(abs(query - key)) + (side if key > query and not one else 0)][h]


def t5_clamped(encoding, causal, reach=256, sides="apart"):
    table = numbers(encoding.table)
    if sides == "alike":
        return lambda h, query, key, last: table[h][min(abs(query - key), reach)]
    return lambda h, query, key, last: table[h][min(max(query - key, -reach), reach) + (0 if causal else reach)]


OF_POSITIONS = [
    (alibi, "alibi", {}),
    (alibi, "alibi", {"slopes": "interleaved"}),
    (alibi, "alibi", {"learned": True}),
    (sandwich, "sandwich", {}),
    (sandwich, "sandwich", {"dim": 6}),
    (bam, "bam", {}),
    (bam, "bam", {"learned": "all"}),
    (kerple, "kerple", {}),
    (kerple_power, "kerple-power", {}),
    (fire, "fire", {"threshold": 1e6}),
    (fire, "fire", {"threshold": 3.0}),
    (t5, "t5", {}),
    (t5, "t5", {"buckets": 12, "max_distance": 17}),
    (t5_clamped, "t5-clamped", {}),
    (t5_clamped, "t5-clamped", {"reach": 5}),
    (alibi, "alibi", {"learned": True, "sides": "apart"}),
    (kerple, "kerple", {"sides": "apart"}),
    (kerple_power, "kerple-power", {"sides": "apart"}),
    (fire, "fire", {"threshold": 1e6, "sides": "apart"}),
    (fire, "fire", {"threshold": 3.0, "sides": "apart"}),
    (t5, "t5", {"sides": "alike"}),
    (t5_clamped, "t5-clamped", {"reach": 5, "sides": "alike"}),
]


def assert_formula(bias, scene, value, *, causal):
    """Every pair that may meet has the witness's value."""
    dense = bias.dense().expand(BATCH, HEADS, -1, -1).detach()
    expected = dense.double().clone()
    for b, i, j in scene.pairs(causal=causal):
        expected[b, :, i, j] = torch.tensor([value(b, h, i, j) for h in range(HEADS)], dtype=torch.float64)
    # In float64 no formula takes more than 1,000 roundings of a number as large as its largest value. ALiBi has float32
    # slopes whatever the module's precision; slope and product are each off by half a unit of their own last place.
    if dense.dtype == torch.float64:
        assert_same(dense, expected, roundings=1000, scale=expected.abs().max())
    else:
        assert_same(dense, expected, roundings=1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "two-sided"])
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
@pytest.mark.parametrize(
    ("witness", "name", "options"), OF_POSITIONS, ids=[f"{name} {options}" for _, name, options in OF_POSITIONS]
)
def test_a_bias_of_positions_is_its_papers_formula(witness, name, options, scene, causal):
    encoding = make(name, causal=causal, **options)
    of_positions = witness(encoding, causal, **options)

    def value(b, h, i, j):
        return of_positions(h, *scene.at(b, i, j), last=scene.last(b, i))

    assert_formula(scene.bias(encoding, with_state=False), scene, value, causal=causal)


def relu(u):
    return max(0.0, u)


def softplus(u):
    return math.log(1 + math.exp(u))


def forgotten(u):
    """Minus the logarithm of a forget gate."""
    return -math.log(1 / (1 + math.exp(-u)))


def projected(layer, tokens):
    """W x + b as [sequence][head][slot]."""
    rows = list(zip(numbers(layer.weight), numbers(layer.bias), strict=True))
    return [[[dot(weight, x) + bias for x in sequence] for weight, bias in rows] for sequence in numbers(tokens)]


# How far a token walks, how steep a query is, and what becomes of the way between the two.
OF_STEPS = {
    "cable": (relu, softplus, lambda way: way),
    "cable-nw": (relu, None, lambda way: way),
    "k-cable": (relu, softplus, lambda way: math.log(1 + way**2)),
    "fox": (forgotten, None, lambda way: way),
}


@pytest.mark.parametrize("with_state", [True, False], ids=["with a state", "without a state"])
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
@pytest.mark.parametrize(
    ("name", "causal", "options"),
    [(name, True, {}) for name in OF_STEPS]
    + [(name, False, {"sides": sides}) for name in OF_STEPS for sides in ("apart", "alike") if name != "fox"],
    ids=str,
)
def test_a_bias_of_steps_is_its_papers_formula(name, scene, causal, options, with_state):
    step, slope, shape = OF_STEPS[name]
    encoding = make(name, causal=causal, **options)
    moves = projected(encoding.to_step, scene.tokens())
    steepness = projected(encoding.to_slope, scene.tokens()) if slope else None
    resting = scene.padding if with_state else (0,) * BATCH  # only a state knows the mask

    def value(b, h, i, j):
        slot = scene.keys - scene.queries + i
        walked = range(min(slot, j) + 1, max(slot, j) + 1)
        steps = [step(moves[b][h][token]) if token >= resting[b] else 0.0 for token in range(scene.keys)]
        way = sum(steps[token] for token in walked)
        if options.get("sides") == "alike" and slot != j:
            way += (steps[min(slot, j)] - steps[max(slot, j)]) / 2
        return -(slope(steepness[b][h][slot]) if slope else 1.0) * shape(way)

    assert_formula(scene.bias(encoding, with_state=with_state), scene, value, causal=causal)


@pytest.mark.parametrize("name", OF_STEPS)
def test_masked_tokens_walk_nowhere_wherever_they_stand(name):
    x = SCENES["one new token"].tokens()
    key_mask = torch.arange(17) % 3 != torch.arange(BATCH)[:, None]
    encoding = make(name)
    free, masked = encoding.state(x)["step"], encoding.state(x, key_mask)["step"]
    for b in range(BATCH):
        assert torch.equal(masked[b][:, key_mask[b]], free[b][:, key_mask[b]])
        assert not masked[b][:, ~key_mask[b]].any()


@pytest.mark.parametrize("name", ["cable-nw", "fox"])
def test_the_way_is_summed_in_float64_however_long_it_is(name):
    length = 4001
    x, positions = torch.randn(1, length, 21, generator=torch.Generator().manual_seed(3)), torch.arange(length)
    encoding = make(name).float()
    state = encoding.state(x)
    got = encoding.bias(x[:, -1:], lw.TokenLayout.of(positions[-1:], positions), state).dense()[0, :, 0].detach()
    steps = numbers(state["step"][0])
    way = [[math.fsum(row[slot + 1 :]) for slot in range(0, length, 97)] for row in steps]
    # One rounding to float32 at the end; before it, as many to float64 as there are steps, each of the level.
    level = max(map(math.fsum, steps))
    summed = length * torch.finfo(torch.float64).eps * level / torch.finfo(torch.float32).eps
    assert_same(got[:, ::97], -torch.tensor(way, dtype=torch.float64), roundings=1, scale=summed)


def test_fire_is_a_table_within_its_threshold_and_straight_lines_beyond():
    positions = torch.arange(23)
    x = torch.zeros(1, 23, 21)
    within, at_the_end, beyond = (
        lw.make("fire", heads=7, width=21, threshold=threshold).bias(x, lw.TokenLayout.of(positions))
        for threshold in (1000.0, 22.0, 21.0)
    )
    assert isinstance(within, lw.DistanceBias)
    assert isinstance(at_the_end, lw.DistanceBias)
    assert isinstance(beyond, lw.LineBias)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("kerple", {}), ("kerple-power", {}), ("fire", {})),
        *((name, {"causal": False, "sides": "apart"}) for name in ("kerple", "kerple-power", "fire")),
        ("alibi", {"causal": False, "sides": "apart", "learned": True}),
    ],
    ids=str,
)
def test_positions_with_gaps_are_not_clamped_to_a_table(name, options):
    gaps = torch.tensor([[0, 3, 1000]])
    encoding = make(name, **options)
    causal = options.get("causal", True)
    bias = encoding.bias(torch.zeros(1, 3, 21), lw.TokenLayout.of(gaps, causal=causal)).dense()
    plain = torch.arange(1001)[None]
    every = lw.TokenLayout.of(plain, causal=causal)
    whole = encoding.bias(torch.zeros(1, 1001, 21), every).dense()[:, :, gaps[0]][..., gaps[0]]
    seen = torch.ones(3, 3).tril() if causal else torch.ones(3, 3)
    assert_same(bias * seen, whole * seen, roundings=1000, scale=whole.abs().max())
