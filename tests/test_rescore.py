"""Rescores against plain definitions; every description taken apart and put together; levels in two floats; sums."""

import math

import pytest
import torch
from random_calls import Draw, blend, product, random_bias, random_place, random_rescore, viewed
from torch.utils import _pytree

import lengthwise as lw
from lengthwise.bias import KINDS, rebuild, running_sums, two_float_sums, two_floats
from lengthwise.bias import registered_name as name_of
from lengthwise.views.described_scores import ContentScores, NetworkBias

BATCH, HEADS, QUERIES, KEYS, DIM, HIDDEN = 2, 3, 5, 9, 4, 7
EPS = torch.finfo(torch.float32).eps


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores_given(mask_heads: int = 1) -> dict[str, torch.Tensor]:
    """Content, bias, queries, keys and a mask; 0 where it hides."""
    g = draws()
    mask = torch.rand(BATCH, mask_heads, QUERIES, KEYS, generator=g) < 0.7
    content, bias = torch.randn(2, BATCH, HEADS, QUERIES, KEYS, generator=g, dtype=torch.float64)
    q = torch.randn(BATCH, HEADS, QUERIES, DIM, generator=g, dtype=torch.float64)
    k = torch.randn(BATCH, HEADS, KEYS, DIM, generator=g, dtype=torch.float64)
    return {"content": content * mask, "bias": bias * mask, "q": q, "k": k, "mask": mask}


def head_network(kernel: int, dtype: torch.dtype = torch.float64) -> lw.HeadNetwork:
    g = draws(1)
    shapes = ((HIDDEN, 2 * HEADS, kernel), (HIDDEN,), (HEADS, HIDDEN, kernel), (HEADS,))
    return lw.HeadNetwork(*(torch.randn(shape, generator=g, dtype=dtype) for shape in shapes))


# Head networks.


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_head_network_is_two_convolutions_along_the_keys(kernel):
    given, network = scores_given(), head_network(kernel)
    content, bias, mask = given["content"], given["bias"], given["mask"]
    first = torch.nn.Conv2d(2 * HEADS, HIDDEN, (1, kernel), padding=(0, kernel // 2), dtype=torch.float64)
    second = torch.nn.Conv2d(HIDDEN, HEADS, (1, kernel), padding=(0, kernel // 2), dtype=torch.float64)
    with torch.no_grad():
        first.weight.copy_(network.weight_in[:, :, None])
        first.bias.copy_(network.bias_in)
        second.weight.copy_(network.weight_out[:, :, None])
        second.bias.copy_(network.bias_out)
        hidden = torch.nn.LeakyReLU()(first(torch.cat([content, bias], 1))) * mask
        expected = content + bias + second(hidden)
    assert torch.allclose(network.scores(**given), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_head_network_s_gradients_are_those_of_finite_differences(kernel):
    given, network = scores_given(), head_network(kernel)
    names = list(network.tensors())

    def run(content, bias, *tensors):
        own = network.rebuilt(dict(zip(names, tensors, strict=True)))
        return own.scores(**given | {"content": content, "bias": bias}).masked_fill(~given["mask"], 0)

    inputs = [x.clone().requires_grad_() for x in (given["content"], given["bias"], *network.tensors().values())]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("kernel", [1, 3])
def test_what_is_hidden_does_not_reach_a_head_network(kernel):
    """A key that the mask hides changes nothing, not even for its neighbours."""
    g = draws(2)
    q, k, v = (torch.randn(1, HEADS, KEYS, DIM, generator=g) for _ in range(3))
    real = torch.ones(1, KEYS, dtype=torch.bool)
    real[0, 4] = False
    bias = lw.DenseBias(torch.randn(1, HEADS, KEYS, KEYS, generator=g))
    network = head_network(kernel, torch.float32)
    before = lw.attend(q, k, v, key_mask=real, bias=bias, rescore=network, backend="reference")
    k[:, :, 4], v[:, :, 4], bias.value[..., 4] = 99, 99, 99
    after = lw.attend(q, k, v, key_mask=real, bias=bias, rescore=network, backend="reference")
    assert torch.equal(after, before)


def test_a_head_network_counts_a_pair_that_some_head_sees():
    """Its hidden layer belongs to no head: under a mask of each head it is 0 where no head sees the pair."""
    g = draws(3)
    q = torch.randn(1, HEADS, KEYS, DIM, generator=g)
    mask = torch.rand(1, HEADS, KEYS, KEYS, generator=g) < 0.5
    layout = lw.TokenLayout.of(torch.arange(KEYS), mask=mask)
    network = head_network(3, torch.float32)
    whole = lw.explain(q, q, q, layout=layout, rescore=network)
    zero = torch.zeros_like(whole.content)
    pairs = mask.any(1, keepdim=True)
    scores = network.apply(whole.content, zero, q, q, pairs).masked_fill(~mask, -torch.inf)
    assert torch.equal(whole.scores, scores)


# Contextual positions.


@pytest.mark.parametrize("positions", [2, 4, 30])
def test_contextual_positions_are_those_of_loops(positions):
    given = scores_given()
    table = torch.randn(DIM, positions, generator=draws(1), dtype=torch.float64)
    got = lw.ContextualPositions(table).scores(**given)
    for b in range(BATCH):
        for h in range(HEADS):
            for i in range(QUERIES):
                passed = 0.0
                for j in reversed(range(KEYS)):
                    if not given["mask"][b, 0, i, j]:
                        continue
                    content = float(given["content"][b, h, i, j])
                    passed += 1 / (1 + math.exp(-content))
                    place = min(passed, positions - 1)
                    below, share = math.floor(place), place - math.floor(place)
                    column = table[:, below] * (1 - share) + table[:, math.ceil(place)] * share
                    expected = content + float(given["bias"][b, h, i, j]) + float(given["q"][b, h, i] @ column)
                    assert abs(float(got[b, h, i, j]) - expected) < 1e-12


def test_contextual_positions_have_the_gradients_of_finite_differences():
    given = scores_given()
    table = torch.randn(DIM, 4, generator=draws(1), dtype=torch.float64)

    def run(content, bias, q, table):
        own = given | {"content": content, "bias": bias, "q": q}
        return lw.ContextualPositions(table).scores(**own).masked_fill(~given["mask"], 0)

    inputs = [x.clone().requires_grad_() for x in (given["content"], given["bias"], given["q"], table)]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("mask_heads", [1, HEADS])
def test_contextual_positions_do_not_count_hidden_keys(mask_heads):
    given = scores_given(mask_heads)
    table = torch.randn(DIM, 30, generator=draws(1), dtype=torch.float64)
    got = lw.ContextualPositions(table).scores(**given)
    b, h, i = 1, 2, 3
    seen = given["mask"][b, h if mask_heads > 1 else 0, i]
    alone = {name: given[name][b : b + 1, h : h + 1, i : i + 1][..., seen] for name in ("content", "bias")}
    alone |= {"q": given["q"][b : b + 1, h : h + 1, i : i + 1], "k": given["k"], "mask": torch.ones(1, 1, 1, 1).bool()}
    assert torch.allclose(
        lw.ContextualPositions(table).scores(**alone)[0, 0, 0], got[b, h, i, seen], rtol=0, atol=1e-12
    )


def test_a_score_function_is_given_the_rows_it_is_asked_for():
    given = scores_given()
    rescore = lw.ScoreFunction(blend, (torch.tensor([0.5]), torch.arange(QUERIES) / 7))
    whole = rescore.scores(**given)
    rows = slice(2, 4)
    part = {name: x if name == "k" else x[:, :, rows] for name, x in given.items()}
    assert torch.equal(rescore.scores(**part, rows=rows), whole[:, :, rows])


# Taken apart and put together again.


def described_things() -> dict[str, lw.Bias | lw.Rescore]:
    """One of every kind, and of every form of those that have several."""
    g = draws(4)
    query, key = torch.arange(4, 9)[None], torch.arange(9)[None]
    step, slope = torch.rand(2, 3, KEYS, generator=g), torch.rand(1, 3, 1, generator=g)
    with torch.no_grad():
        lazy = lw.LevelBias.of_steps(step, slope, start=4, queries=QUERIES, curve="log1p_square")
    levels = lw.LevelBias.of_steps(step, slope, start=4, queries=QUERIES, rising=True)
    high, low = two_floats(levels.key_level)
    distance = lw.DistanceBias(torch.randn(3, 6, generator=g), query, key, first=-2)
    curve = lw.DistanceBias(torch.arange(6.0)[None], query, key)
    content = ContentScores(
        torch.randn(2, 3, QUERIES, DIM, generator=g), torch.randn(2, 3, KEYS, DIM, generator=g), scale=0.5
    )
    return {
        "DistanceBias": distance,
        "QueryDistanceBias": lw.QueryDistanceBias(
            torch.randn(2, 3, QUERIES, 4, generator=g), torch.randn(1, 4, 6, generator=g), query, key, first=-2
        ),
        "QueryDistanceBias of keys": lw.QueryDistanceBias(
            torch.randn(1, 1, KEYS, 4, generator=g), torch.randn(3, 4, 3, generator=g), query, key, 0, "key", "zero"
        ),
        "LevelBias": levels,
        "LevelBias of steps": lazy,
        "LevelBias in two floats": lw.LevelBias(high[..., 4:], high, slope, query_rest=low[..., 4:], key_rest=low),
        "LineBias": lw.LineBias(
            curve,
            torch.rand(2, QUERIES, generator=g),
            torch.tensor([0.5, 1.5]),
            torch.randn(3, 3, generator=g),
            torch.randn(3, 3, generator=g),
        ),
        "FunctionBias": lw.FunctionBias(product, (torch.randn(2, 3, QUERIES), torch.randn(2, 3, KEYS))),
        "DenseBias": lw.DenseBias(torch.randn(1, 3, QUERIES, KEYS, generator=g)),
        "SumBias": lw.SumBias((distance, lw.SumBias((levels, lazy)))),
        "ContentScores": content,
        "NetworkBias": NetworkBias(content, head_network(3, torch.float32), levels),
        "HeadNetwork": head_network(3, torch.float32),
        "ContextualPositions": lw.ContextualPositions(torch.randn(DIM, 5, generator=g)),
        "ScoreFunction": lw.ScoreFunction(blend, (torch.tensor([0.5]), torch.arange(QUERIES) / 7)),
        "ScoreFunction without arguments": lw.ScoreFunction(blend),
    }


THINGS = pytest.mark.parametrize("name", described_things())


def assert_same(a: lw.Bias | lw.Rescore, b: lw.Bias | lw.Rescore) -> None:
    assert type(a) is type(b)
    assert a.static() == b.static()
    assert a.tensors().keys() == b.tensors().keys()
    assert all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))
    if isinstance(a, lw.Bias):
        assert a.shape == b.shape
        assert torch.equal(a.dense(), b.dense())


def test_every_kind_is_among_these():
    assert {type(thing).__name__ for thing in described_things().values()} == set(KINDS)


@THINGS
def test_it_is_rebuilt_from_its_tensors_and_plain_values(name):
    thing = described_things()[name]
    assert all(isinstance(value, str | int | float | bool) for value in thing.static().values())
    assert_same(rebuild(type(thing).__name__, thing.tensors(), thing.static()), thing)


@THINGS
def test_it_is_a_pytree(name):
    thing = described_things()[name]
    leaves, structure = _pytree.tree_flatten(thing)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert_same(_pytree.tree_unflatten(leaves, structure), thing)
    doubled = _pytree.tree_map(lambda x: x * 2, thing)
    for key, tensor in thing.tensors().items():
        assert torch.equal(doubled.tensors()[key], tensor * 2)
    assert _pytree.tree_structure(doubled) == structure


@THINGS
def test_other_tensors_under_the_same_names_make_another_of_its_kind(name):
    thing = described_things()[name]
    other = {key: x + 1 if x.is_floating_point() else x for key, x in thing.tensors().items()}
    assert all(torch.equal(x, other[key]) for key, x in thing.rebuilt(other).tensors().items())
    assert thing.rebuilt(other).static() == thing.static()


@THINGS
def test_its_sources_are_its_floating_point_tensors(name):
    thing = described_things()[name]
    assert len(thing.sources) == sum(x.is_floating_point() for x in thing.tensors().values())
    assert not thing.needs_grad
    if thing.sources:
        learned = thing.rebuilt(
            {key: x.requires_grad_() for key, x in thing.tensors().items() if x.is_floating_point()}
        )
        assert learned.needs_grad
        assert not learned.detached().needs_grad


def test_random_biases_and_rescores_are_rebuilt_too():
    for seed in range(60):
        d = Draw(seed)
        place = random_place(d, 2, 3, 6)
        bias = random_bias(d, (2, 3), place, "bias", torch.float32)
        rescore = random_rescore(d, 3, 6, 4, torch.float32, True)
        tensors = {name: viewed(leaf) for name, leaf in d.leaves.items()}
        layout = place.make().get("layout")
        with torch.no_grad():
            for part in (bias, rescore):
                thing = part.make(tensors, layout)
                assert_same(rebuild(type(thing).__name__, thing.tensors(), thing.static()), thing)


def test_a_part_that_is_missing_is_named():
    table = described_things()["DistanceBias"]
    without = {name: x for name, x in table.tensors().items() if name != "table"}
    with pytest.raises(TypeError, match=r"table must be .*, got None"):
        rebuild("DistanceBias", without, table.static())


def test_a_function_is_rebuilt_by_its_registered_name():
    bias = described_things()["FunctionBias"]
    assert bias.static() == {"function": name_of(product), "sides": "qk"}
    with pytest.raises(ValueError, match="unknown function 'nowhere"):
        rebuild("FunctionBias", bias.tensors(), {"function": "nowhere.nothing"})


# Levels.


@pytest.mark.parametrize("curve", ["linear", "log1p_square"])
@pytest.mark.parametrize(("start", "queries"), [(0, KEYS), (KEYS - 1, 1), (3, 4)])
def test_steps_that_are_summed_late_are_the_same_bias(curve, start, queries):
    step = torch.randn(BATCH, HEADS, KEYS, generator=draws())
    slope = torch.rand(1, HEADS, queries, generator=draws(1))
    options = {"start": start, "queries": queries, "curve": curve}
    now = lw.LevelBias.of_steps(step, slope, **options)
    with torch.no_grad():
        late = lw.LevelBias.of_steps(step, slope, **options)
    assert late.step is not None
    assert now.step is None
    assert late.shape == now.shape == (BATCH, HEADS, queries, KEYS)
    assert torch.equal(late.dense(), now.dense())
    assert torch.equal(late.summed().key_level, now.key_level)
    assert torch.equal(late.summed().query_level, now.query_level)
    assert torch.equal(late.tile(slice(0, 1), slice(2, 6)), now.dense()[:, :, :1, 2:6])
    assert torch.equal(late.first_sequence().dense(), now.first_sequence().dense())
    by_tensor = lw.LevelBias.of_steps(step, slope, **options | {"start": torch.tensor(start)})
    assert torch.equal(by_tensor.dense(), now.dense())


def test_steps_get_the_gradient_of_their_sums():
    step = torch.rand(1, 2, KEYS, generator=draws(), dtype=torch.float64).requires_grad_()
    slope = torch.rand(1, 2, 1, generator=draws(1), dtype=torch.float64).requires_grad_()

    def run(step, slope):
        return lw.LevelBias.of_steps(step, slope, start=3, queries=4, curve="log1p_square").dense()

    assert torch.autograd.gradcheck(run, (step, slope))


@pytest.mark.parametrize("length", [1, 2, 3, 1000, 4097])
def test_sums_in_two_floats_are_float64_s(length):
    """Each doubling rounds once, by 2 ** -48 of the size of what is summed: two floats hold 48 bits."""
    step = torch.rand(2, 3, length, generator=draws()) * torch.tensor([1.0, 1e3, 1e-3])[:, None]
    high, low = two_float_sums(step)
    assert high.dtype == low.dtype == torch.float32
    exact = step.cumsum(-1, dtype=torch.float64)
    error = (high.double() + low.double() - exact).abs()
    doublings = max(1, math.ceil(math.log2(length)))
    # Each level of doubling adds about two roundings of the rest, 2 ** -24 of 2 ** -24.
    assert (error <= 4 * doublings * 2**-48 * exact.abs() + length * torch.finfo(torch.float64).eps * exact).all()
    assert ((high.double() - exact).abs() <= EPS * exact).all()


def test_sums_with_two_signs_in_two_floats_are_float64_s():
    step = torch.randn(4, 3000, generator=draws())
    high, low = two_float_sums(step)
    exact, sizes = step.cumsum(-1, dtype=torch.float64), step.abs().cumsum(-1, dtype=torch.float64)
    assert ((high.double() + low.double() - exact).abs() <= 4 * 12 * 2**-48 * sizes).all()


def test_levels_in_two_floats_are_float64_s_levels():
    """A difference of levels is off by their 48 bits, not by their 24: at 1e6 that is 4e-9 instead of 0.06."""
    g = draws()
    level = torch.rand(1, 2, 500, generator=g).double().cumsum(2) + 1e6
    slope = torch.rand(1, 2, 1, generator=g)
    exact = lw.LevelBias(level[..., 300:], level, slope)
    (query, query_rest), (key, key_rest) = two_floats(level[..., 300:]), two_floats(level)
    halves = lw.LevelBias(query, key, slope, query_rest=query_rest, key_rest=key_rest)
    everything = (slice(None), slice(None))
    difference = (halves.difference(*everything).double() - exact.difference(*everything)).abs()
    # The difference itself is float32: two roundings of its own size and of the rests', 2 ** -24 of 1e6.
    allowed = 2 * EPS * exact.difference(*everything).abs() + 4 * 2**-48 * 1e6 + EPS * 2**-24 * 1e6
    assert (difference <= allowed).all()
    wanted = exact.dense()
    assert ((halves.dense() - wanted).abs() <= slope[..., None] * allowed + 2 * EPS * wanted.abs()).all()


def test_without_float64_steps_become_two_floats(monkeypatch):
    step, slope = torch.rand(2, 3, 600, generator=draws()), torch.rand(1, 3, 1, generator=draws(1))
    wanted = lw.LevelBias.of_steps(step, slope, start=500, queries=100)
    for module in ("level", "precision"):
        monkeypatch.setattr(f"lengthwise.bias.{module}.has_float64", lambda device: False)
    sums, rest = running_sums(step)
    assert rest is not None
    with torch.no_grad():
        got = lw.LevelBias.of_steps(step, slope, start=500, queries=100)
    assert got.step is None
    assert torch.equal(got.key_level, sums)
    assert torch.equal(got.key_rest, rest)
    assert got.query_level.dtype == got.query_rest.dtype == torch.float32
    # A difference of levels is rounded once, and so is its product with the slope.
    assert ((got.dense() - wanted.dense()).abs() <= 2 * EPS * wanted.dense().abs() + 4 * 2**-48 * 600).all()


# Sums.


def test_a_sum_is_the_sum_of_its_terms():
    things = described_things()
    terms = tuple(things[name] for name in ("DistanceBias", "LevelBias", "LineBias", "DenseBias", "FunctionBias"))
    whole = lw.SumBias(terms)
    assert whole.shape == (2, 3, QUERIES, KEYS)
    assert torch.equal(whole.dense(), sum(term.dense() for term in terms))
    assert torch.equal(whole.tile(slice(1, 3), slice(2, 7)), whole.dense()[:, :, 1:3, 2:7])
    first = whole.first_sequence()
    assert torch.equal(first.dense(), whole.dense()[:1])
    assert not whole.is_compact
    assert lw.SumBias(terms[:2]).is_compact


def test_a_sum_holds_the_positions_of_its_terms():
    things = described_things()
    whole = lw.SumBias((things["DenseBias"], things["DistanceBias"]))
    assert whole.positions() == (things["DistanceBias"].query, things["DistanceBias"].key)
    assert lw.SumBias((things["DenseBias"],)).positions() is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((3, 3, QUERIES, KEYS), "batch"),
        ((1, 2, QUERIES, KEYS), "heads"),
        ((1, 3, QUERIES, KEYS + 1), "queries and keys"),
    ],
)
def test_terms_of_other_sizes_are_refused(other, words):
    with pytest.raises(ValueError, match=words):
        lw.SumBias((lw.DenseBias(torch.zeros(2, 3, QUERIES, KEYS)), lw.DenseBias(torch.zeros(other))))


@pytest.mark.parametrize("terms", [(), (torch.zeros(1),), (None,)])
def test_a_sum_of_anything_else_is_refused(terms):
    with pytest.raises(TypeError, match="one Bias or more"):
        lw.SumBias(terms)
