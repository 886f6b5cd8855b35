"""The tiled C++ kernel against the definition in float64: random calls of all that it takes, and each part alone."""

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from rounding import Inside, Tensors, assert_within_rounding, rounding_noise
from torch import Tensor

import lengthwise as lw
from lengthwise.attention import reference
from lengthwise.attention.backend import Plan
from lengthwise.attention.call import AttentionCall, checked_call
from lengthwise.attention.native import build, tiles
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, QueryDistanceBias, SumBias
from lengthwise.token_layout import Band, TokenLayout

pytestmark = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")

RANDOM_CALLS = 120


@dataclass
class Case:
    """Tensors by name and how a call is made of them, so that the same case exists in every precision."""

    tensors: Tensors
    make_bias: Callable[[Tensors], Bias | None]
    options: dict[str, Any]
    wants: str = "both"
    dtype: torch.dtype = torch.float32

    def rounded(self) -> Tensors:
        """Numbers that the case's own precision holds; levels are float64."""
        return {
            name: x if "level" in name else x.to(self.dtype if name in ("q", "k", "v") else torch.float32)
            for name, x in self.tensors.items()
        }

    def call(self, dtype: torch.dtype, **changes: Any) -> tuple[AttentionCall, list[Tensor]]:
        """The call in `dtype`, and everything that has a gradient."""
        exact = dtype == torch.float64
        return self.of({name: x.double() if exact else x for name, x in self.rounded().items()}, **changes)

    def of(self, tensors: Tensors, **changes: Any) -> tuple[AttentionCall, list[Tensor]]:
        """The call with other tensors of the same names."""
        own = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
        extras = {name: own[name] for name in ("sink", "logit_scale") if name in own}
        bias = self.make_bias(own)
        options = {"return_lse": True} | self.options | extras | changes
        return checked_call(own["q"], own["k"], own["v"], bias=bias, **options), list(own.values())


def run_tiles(call: AttentionCall) -> tuple[Tensor, Tensor]:
    plan = tiles.plan(call)
    assert isinstance(plan, tiles.TilesPlan), plan
    out, lse = plan.run(call)
    assert lse is not None
    return out, lse


def run_reference(call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse = reference.run(call, Plan())
    assert lse is not None
    return out, lse


def results(
    run: Callable[[AttentionCall], tuple[Tensor, Tensor]],
    case: Case,
    call: AttentionCall,
    learned: list[Tensor],
    upstream: Tensors,
) -> Tensors:
    """The output, the log-sum-exp and the gradients of everything, by name."""
    out, lse = run(call)
    above = {"out": (out, upstream["out"].to(out.dtype)), "lse": (lse, upstream["lse"].to(lse.dtype))}
    above["lse"] = lse, above["lse"][1].masked_fill(lse == -torch.inf, 0)
    wanted = [above[name] for name in above if case.wants in (name, "both")]
    gradients = torch.autograd.grad(
        [x for x, _ in wanted], learned, [d for _, d in wanted], allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(case.tensors, gradients, strict=True))


def make_upstream(case: Case) -> Tensors:
    q, v = case.tensors["q"], case.tensors["v"]
    return {"out": torch.randn(*q.shape[:3], v.shape[3]).to(case.dtype), "lse": torch.randn(q.shape[:3])}


def assert_as_exact(case: Case) -> None:
    """Twice the error that the reference makes at this precision against float64, plus rounding."""
    upstream = make_upstream(case)
    exact = results(run_reference, case, *case.call(torch.float64), upstream)
    plain = results(run_reference, case, *case.call(case.dtype), upstream)
    ours = results(run_tiles, case, *case.call(case.dtype), upstream)
    call, learned = case.call(torch.float64)
    d_out, d_lse = (upstream[name] if case.wants in (name, "both") else None for name in ("out", "lse"))
    noise = rounding_noise(Inside.of(call), d_out, d_lse, dict(zip(case.tensors, learned, strict=True)))
    assert_within_rounding(ours, plain, exact, noise, terms=call.keys)


def no_bias(_: Tensors) -> None:
    return None


def make_layout(pick: random.Random, batch: int, queries: int, keys: int) -> TokenLayout:
    """Positions that follow the slots, under some masks; queries among the keys, behind them or partly before them."""
    causal = pick.random() < 0.75
    place = pick.choice(["last", "last", "last", "among", "behind", "cut"])
    if place == "behind":
        start = keys + pick.randint(0, 40)
        offset = torch.tensor([[0], [7], [40]])[:batch]
        query = start + torch.arange(queries)[None] + offset
        return TokenLayout.of(query, torch.arange(keys)[None], start=start, causal=causal)
    total = keys if place != "cut" else keys + 60
    start = total - queries if place == "last" else pick.randint(0, total - queries)
    positions = torch.arange(total)[None]
    mask = documents = None
    padding = pick.choice(["none", "none", "ends", "holes"])
    if padding == "ends":
        ends = torch.tensor([[pick.randint(0, total // 2), pick.randint(0, total // 3)] for _ in range(batch)])
        mask = (positions >= ends[:, :1]) & (positions < total - ends[:, 1:])
    elif padding == "holes":
        mask = torch.rand(batch, total) < pick.choice([0.5, 0.98])
    if pick.random() < 0.25:
        documents = (torch.rand(pick.choice([1, batch]), total) < 0.03).cumsum(1)
        documents = pick.choice([documents, documents.max() - documents])
    layout = TokenLayout.of(
        positions[:, start : start + queries], positions, key_mask=mask, documents=documents, start=start, causal=causal
    )
    return layout.keys(pick.randint(0, 60), keys) if place == "cut" else layout


def make_window(pick: random.Random, layout: TokenLayout) -> Any:
    among = isinstance(layout.start, int) and 0 <= layout.start <= layout.key_count - layout.query_count
    counted = among or layout.key_index is not None or (layout.key_mask is None and layout.key_documents is None)
    windows: list[Any] = [None, None, None, 5, 70]
    if counted:
        windows += [Band(0, 40), Band(3), Band(1, 90, chunk=7), (Band(0, 20), Band(30, 130), Band(0, first=4))]
    return pick.choice(windows)


def make_terms(pick: random.Random, batch: int, heads: int, layout: TokenLayout) -> tuple[Tensors, Callable[..., Any]]:
    """The tensors of a bias, and the bias that is made of them."""
    sum_of = pick.choice([0, 1, 1, 1, 2, 4])
    follows = layout.facts is not None and layout.facts.offsets is not None
    known = ["level", "log level", "table", "lines", "profiles"] if follows else ["level", "log level"]
    kinds = [pick.choice(known) for _ in range(sum_of)]
    tensors: Tensors = {}
    makers = []
    for n, kind in enumerate(kinds):
        b, h = pick.choice([1, batch]), pick.choice([1, heads])
        own, make = make_term(pick, kind, (b, h), heads, layout)
        tensors |= {f"{n} {name}": x for name, x in own.items()}
        makers.append((n, make))

    def make_bias(all_tensors: Tensors) -> Bias | None:
        terms = tuple(
            make({name.partition(" ")[2]: x for name, x in all_tensors.items() if name.startswith(f"{n} ")})
            for n, make in makers
        )
        return SumBias(terms) if len(terms) > 1 else terms[0] if terms else None

    return tensors, make_bias


def make_term(
    pick: random.Random, kind: str, shape: tuple[int, int], heads: int, layout: TokenLayout
) -> tuple[Tensors, Callable[[Tensors], Bias]]:
    queries, keys, query, key = layout.query_count, layout.key_count, layout.query, layout.key
    if kind == "table":
        first = pick.choice([0, 0, -20, 5])
        return {"table": torch.randn(shape[1], 71)}, lambda t: DistanceBias(t["table"], query, key, first)
    if kind == "profiles":
        side, beyond, first = pick.choice(["query", "key"]), pick.choice(["clamp", "zero"]), pick.choice([0, -20, 5])
        count, length = pick.choice([3, 16, 21]), pick.choice([1, 40, 400])
        own = {"rows": torch.randn(*shape, queries if side == "query" else keys, count)}
        own |= {"profiles": torch.randn(pick.choice([1, heads]), count, length) / count**0.5}
        return own, lambda t: QueryDistanceBias(t["rows"], t["profiles"], query, key, first, side, beyond)
    if kind == "lines":
        curve = torch.rand(1, keys + queries + 120).cumsum(1) / 30
        own = {"curve": curve, "factor": torch.rand(shape[0], queries), "lines slope": torch.randn(heads, 6)}
        knots = torch.tensor([0.1, 0.4, 0.9, 1.3, torch.inf])

        def make_lines(t: Tensors) -> LineBias:
            slope = t["lines slope"]
            steps = slope.diff(dim=1) * knots.nan_to_num(posinf=0).to(slope.dtype)
            start = torch.nn.functional.pad(-steps.cumsum(1), (1, 0))  # the lines meet at the knots
            return LineBias(DistanceBias(t["curve"], query, key), t["factor"], knots, slope, start)

        return own, make_lines
    rising = torch.rand(*shape, keys + queries, dtype=torch.float64).cumsum(-1) * pick.choice([0.1, 1, 30])
    start = min(max(int(layout.start), 0), keys)
    levels = {
        "level of queries": rising[..., start : start + queries].clone() + 0.01,
        "level of keys": rising[..., :keys].clone(),
        "slope": torch.rand(pick.choice([1, shape[0]]), shape[1], pick.choice([1, queries])),
    }
    if pick.random() < 0.3:
        levels |= {"level of queries": torch.randn(*shape, queries, dtype=torch.float64)}
        levels |= {"level of keys": torch.randn(1, 1, keys, dtype=torch.float64), "slope": levels["slope"] - 0.5}
    curve = "linear" if kind == "level" else "log1p_square"
    return levels, lambda t: LevelBias(t["level of queries"], t["level of keys"], t["slope"], curve)


def random_case(seed: int) -> Case:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    batch, shared, group = pick.choice([1, 2, 3]), pick.choice([1, 2]), pick.choice([1, 1, 3])
    heads, dim, value = shared * group, pick.choice([3, 16, 20]), pick.choice([5, 16, 33])
    keys = pick.choice([1, 17, 130, 300])
    queries = pick.randint(1, keys)
    layout = make_layout(pick, batch, queries, keys)
    tensors = {
        "q": torch.randn(batch, queries, heads, dim).transpose(1, 2) * pick.choice([1, 4]),
        "k": torch.randn(batch, shared, keys, dim),
        "v": torch.randn(batch, shared, keys, value),
    }
    own, make_bias = make_terms(pick, batch, heads, layout)
    tensors |= own
    if pick.random() < 0.4:
        shape = pick.choice([(heads,), (1, heads, queries), (batch, heads, 1)])
        tensors["sink"] = 2 * torch.randn(shape)
    if pick.random() < 0.4:
        shape = pick.choice([(1, 1, queries), (batch, heads, queries), (batch, 1, 1)])
        factor = torch.rand(shape) * 2
        tensors["logit_scale"] = pick.choice([factor, factor - 0.5, factor * (torch.rand(shape) < 0.5)])
    options = {
        "layout": layout,
        "window": make_window(pick, layout),
        "softcap": pick.choice([None, None, 0.5, 4.0, 50.0]),
    }
    dtype = pick.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    return Case(tensors, make_bias, options, pick.choice(["out", "lse", "both", "both"]), dtype)


@pytest.mark.parametrize("seed", range(RANDOM_CALLS))
def test_a_random_call_is_as_exact_as_the_reference_in_its_precision(seed):
    assert_as_exact(random_case(seed))


def make_case(length: int = 200, heads: int = 3, dim: int = 16, keys: int | None = None, **extra: Tensor) -> Case:
    torch.manual_seed(length)
    q = torch.randn(2, heads, length, dim)
    k, v = torch.randn(2, 2, heads, keys or length, dim)
    return Case({"q": q, "k": k, "v": v} | extra, no_bias, {})


def steep_levels(case: Case, by: float) -> Case:
    """The case with levels so steep that most keys are skipped."""
    length = case.tensors["q"].shape[2]
    level = torch.rand(2, 3, length, dtype=torch.float64).cumsum(2) * by
    own = {"level of queries": level, "level of keys": level.clone(), "slope": torch.rand(1, 3, 1) + 0.5}
    return replace(
        case,
        tensors=case.tensors | own,
        make_bias=lambda t: LevelBias(t["level of queries"], t["level of keys"], t["slope"]),
    )


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("extra", [{}, {"sink": torch.randn(3)}, {"logit_scale": torch.rand(1, 3, 700) + 1}])
def test_the_square_of_the_log_sum_exp_has_its_gradient_under_steep_levels(extra, skip):
    case = steep_levels(make_case(700, **extra), 0.5)
    found = []
    for run, dtype in ((run_reference, torch.float64), (run_reference, torch.float32), (run_tiles, torch.float32)):
        call, learned = case.call(dtype)
        _, lse = run(replace(call, skip=skip))
        found.append(torch.autograd.grad(lse.square().sum(), learned, allow_unused=True, materialize_grads=True))
    call, _ = case.call(torch.float32)
    assert tiles.skipped_share(call) > 0.2
    for name, truth, theirs, ours in zip(case.tensors, *found, strict=True):
        rounding = 700 * 2**-23 * max(1.0, float(truth.norm())) if name == "slope" else 2**-23 * float(truth.norm())
        assert float((ours - truth).norm()) <= 2 * float((theirs - truth).norm()) + rounding, name


def test_the_gradient_of_the_log_sum_exp_is_that_of_finite_differences():
    case = make_case(9, sink=torch.randn(3), logit_scale=torch.rand(2, 3, 9))
    call, learned = case.call(torch.float32, softcap=3.0)
    _, lse = run_tiles(call)
    gradients = torch.autograd.grad(lse.sum(), learned, allow_unused=True, materialize_grads=True)
    step = 1e-6
    for name, gradient in zip(case.tensors, gradients, strict=True):
        direction = torch.randn(gradient.shape, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            call, own = case.call(torch.float64, softcap=3.0)
            with torch.no_grad():
                own[list(case.tensors).index(name)].add_(sign * step * direction)
                ends.append(float(run_reference(call)[1].sum()))
        expected = (ends[0] - ends[1]) / (2 * step)
        assert abs(float((gradient * direction).sum()) - expected) <= 1e-4 * max(1.0, float(gradient.norm())), name


def test_a_sink_of_minus_infinity_is_none_and_has_no_gradient():
    bare, barred = make_case(), make_case(sink=torch.full((3,), -torch.inf))
    call, learned = barred.call(torch.float32)
    out, lse = run_tiles(call)
    expected, expected_lse = run_tiles(bare.call(torch.float32)[0])
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    gradients = torch.autograd.grad(out.square().sum() + lse.sum(), learned)
    assert gradients[-1].eq(0).all()


def test_with_a_sink_weights_sum_to_less_than_one_and_the_sink_takes_the_rest():
    case = make_case(sink=torch.tensor([-1.0, 0.0, 3.0]))
    case.tensors["v"] = torch.ones_like(case.tensors["v"])
    out, lse = run_tiles(case.call(torch.float32)[0])
    taken = (case.tensors["sink"][None, :, None] - lse).exp()
    assert torch.allclose(out[..., 0] + taken, torch.ones_like(taken), atol=1e-6)


@pytest.mark.parametrize("extra", [{}, {"sink": torch.tensor([0.5, -1.0, 2.0])}])
def test_a_row_that_sees_nothing_is_zero_and_gives_no_gradient_even_from_an_infinite_one(extra):
    case = make_case(150, **extra)
    hidden = torch.arange(150)[None] >= 100
    call, learned = case.call(torch.float32, key_mask=hidden)
    out, lse = run_tiles(call)
    empty = -torch.inf if not extra else extra["sink"][None, :, None].expand(2, 3, 100)
    assert out[:, :, :100].eq(0).all()
    assert torch.equal(lse[:, :, :100], torch.as_tensor(empty).expand(2, 3, 100))
    gradients = torch.autograd.grad((out.sum() + lse.square().sum()), learned)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, :, :100].eq(0).all()
    assert gradients[1][:, :, :100].eq(0).all()


@pytest.mark.parametrize("kind", ["nothing", "table", "level", "log level", "lines"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_logit_scale_has_its_gradient_where_it_is_zero_or_negative(kind, softcap):
    case = make_case(150, logit_scale=torch.linspace(-1, 1, 150).mul(5).round().div(5).expand(2, 3, 150).clone())
    assert (case.tensors["logit_scale"] == 0).any()
    layout = lw.layout(150)
    if kind != "nothing":
        own, make = make_term(random.Random(0), kind, (1, 3), 3, layout)
        case = replace(case, tensors=case.tensors | own, make_bias=make)
    assert_as_exact(replace(case, options={"layout": layout, "softcap": softcap}))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_factor_that_is_nan_stays_in_its_row_and_with_the_keys_that_it_sees(softcap):
    case = make_case(150, logit_scale=torch.ones(2, 3, 150))
    case.tensors["logit_scale"][0, 0, 70] = torch.nan
    call, learned = case.call(torch.float32, softcap=softcap)
    out, lse = run_tiles(call)
    assert out[0, 0, 70].isnan().all()
    assert lse[0, 0, 70].isnan()
    rest = torch.ones(2, 3, 150, dtype=torch.bool)
    rest[0, 0, 70] = False
    assert out[rest].isfinite().all()
    assert lse[rest].isfinite().all()
    d_q, d_k, d_v, d_scale = torch.autograd.grad(out.sum() + lse.sum(), learned)
    assert d_q[rest].isfinite().all()
    assert d_scale[rest].isfinite().all()
    assert d_scale[0, 0, 70].isnan()
    for d in (d_k, d_v):
        assert d[0, 0, :71].isnan().all()
        assert d[0, 0, 71:].isfinite().all()
        assert d[0, 1:].isfinite().all()


@pytest.mark.parametrize("softcap", [1e-6, 1e-3, 0.05, 1.0, 3.5, 8.0, 14.0, 30.0, 1e4, 1e9])
def test_a_softcap_is_exact_however_small_or_large_it_is(softcap):
    assert_as_exact(replace(make_case(140), options={"softcap": softcap}))


def test_a_softcap_leaves_a_bias_of_minus_three_hundred_one():
    case = replace(make_case(60, table=-300 * torch.ones(3, 60)), options={"softcap": 2.0, "layout": lw.layout(60)})
    case.tensors["table"][:, 0] = 0
    layout = case.options["layout"]
    case = replace(case, make_bias=lambda t: DistanceBias(t["table"], layout.query, layout.key))
    out, _ = run_tiles(case.call(torch.float32)[0])
    assert torch.allclose(out, case.tensors["v"])


@pytest.mark.parametrize("reach", [1e-4, 0.3, 20.0, 1e6])
def test_the_logarithmic_curve_of_levels_is_exact_from_tiny_to_huge_differences(reach):
    level = torch.rand(2, 3, 300, dtype=torch.float64).cumsum(2) * reach
    own = {"level of queries": level, "level of keys": level.clone(), "slope": torch.rand(2, 3, 300)}
    bias = lambda t: LevelBias(t["level of queries"], t["level of keys"], t["slope"], "log1p_square")  # noqa: E731
    case = make_case(300)
    assert_as_exact(replace(case, tensors=case.tensors | own, make_bias=bias))


def test_levels_that_are_not_finite_are_not_finite_in_the_scores():
    level = torch.arange(20.0, dtype=torch.float64).expand(2, 3, 20).clone()
    for bad, seen in ((torch.inf, torch.isfinite), (torch.nan, torch.isnan)):
        own = level.clone()
        own[..., 3] = bad
        bias = LevelBias(level, own, torch.ones(1, 1, 1), "log1p_square")
        call, _ = replace(make_case(20), make_bias=lambda t, bias=bias: bias).call(torch.float32)
        out, _ = run_tiles(call)
        assert out[:, :, :3].isfinite().all()
        assert seen(out[:, :, 3:][..., 1:, :]).all()


def test_every_term_of_a_sum_has_its_own_gradient_and_tables_may_be_many():
    layout, pick = lw.layout(200), random.Random(1)
    kinds = ("table", "table", "level", "table", "log level", "lines")
    made = [make_term(pick, kind, (1, 3), 3, layout) for kind in kinds]
    own = {f"{n} {name}": x for n, (tensors, _) in enumerate(made) for name, x in tensors.items()}

    def make_bias(t: Tensors) -> Bias:
        return SumBias(
            tuple(
                make({name.partition(" ")[2]: x for name, x in t.items() if name.startswith(f"{n} ")})
                for n, (_, make) in enumerate(made)
            )
        )

    case = make_case()
    assert_as_exact(replace(case, tensors=case.tensors | own, make_bias=make_bias, options={"layout": layout}))


@pytest.mark.parametrize("first", [0, 37, 130])
def test_parts_of_the_keys_merge_into_all_of_them(first):
    """Queries partly before, among and behind the keys of a part; a sink goes to one of them."""
    case = steep_levels(make_case(260), 0.2)
    layout = lw.layout(260)
    call, _ = case.call(torch.float32, layout=layout, sink=torch.zeros(3))
    whole = run_tiles(call)
    parts = []
    for keys, sink in (
        (slice(0, first), None),
        (slice(first, first + 100), torch.zeros(3)),
        (slice(first + 100, 260), None),
    ):
        t = case.tensors
        bias = LevelBias(t["level of queries"], t["level of keys"][..., keys], t["slope"])
        part = layout.keys(keys.start, keys.stop - keys.start)
        parts.append(
            run_tiles(
                checked_call(
                    t["q"], t["k"][:, :, keys], t["v"][:, :, keys], bias=bias, layout=part, sink=sink, return_lse=True
                )
            )
        )
    for joined, expected in zip(lw.merge(*parts), whole, strict=True):
        assert torch.allclose(joined, expected, atol=2e-6)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys_are_an_empty_sum(sizes):
    queries, keys = sizes
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (queries, keys, keys))
    layout = TokenLayout.of(torch.arange(queries), torch.arange(keys), causal=False)
    out, lse = run_tiles(checked_call(q, k, v, layout=layout, return_lse=True))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert all(d.eq(0).all() for d in torch.autograd.grad(out.sum(), (q, k, v)))


def test_every_gradient_has_the_same_bits_in_every_run():
    case = random_case(0)
    for seed in (3, 8, 21, 34):
        case = random_case(seed)
        upstream = make_upstream(case)
        first, second = (results(run_tiles, case, *case.call(case.dtype), upstream) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_second_derivative_is_refused_in_words():
    call, learned = make_case(50).call(torch.float32)
    out, lse = run_tiles(call)
    first = torch.autograd.grad(out.sum() + lse.sum(), learned, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative was asked for"):
        first[0].square().sum().backward()


def test_steps_that_were_not_yet_summed_have_a_gradient_too():
    step = torch.rand(1, 3, 120).requires_grad_()
    case = make_case(120)
    with torch.no_grad():
        lazy = LevelBias.of_steps(step, torch.ones(1, 3, 1), start=0, queries=120)
    assert lazy.step is not None
    eager = LevelBias.of_steps(step, torch.ones(1, 3, 1), start=0, queries=120)
    gradients = []
    for bias in (lazy, eager):
        call, _ = replace(case, make_bias=lambda t, bias=bias: bias).call(torch.float32)
        gradients.append(torch.autograd.grad(run_tiles(call)[0].square().sum(), step)[0])
    assert torch.equal(*gradients)


def large_case() -> Case:
    """Everything that a plan can hold: levels, lines, a table, a sink, factors and padding with holes."""
    layout = TokenLayout.of(torch.arange(300)[None], key_mask=torch.rand(2, 300) < 0.9)
    made = [make_term(random.Random(n), kind, (2, 3), 3, layout) for n, kind in enumerate(("table", "level", "lines"))]
    own = {f"{n} {name}": x for n, (tensors, _) in enumerate(made) for name, x in tensors.items()}

    def make_bias(t: Tensors) -> Bias:
        terms = [
            make({name.partition(" ")[2]: x for name, x in t.items() if name.startswith(f"{n} ")})
            for n, (_, make) in enumerate(made)
        ]
        return SumBias(tuple(terms))

    case = make_case(300, sink=torch.randn(2, 3, 300), logit_scale=torch.rand(2, 3, 300))
    return replace(case, tensors=case.tensors | own, make_bias=make_bias, options={"layout": layout})


def tensors_held_by(node: Any) -> list[Tensor]:
    """The tensors that a node of the graph holds as attributes, in containers too, and not as saved ones."""
    found, seen, todo = [], set(), [value for name, value in vars(node).items() if name != "saved_tensors"]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple | set):
            todo += value
        elif hasattr(value, "__dict__"):
            todo += vars(value).values()
    return found


def test_a_node_of_the_graph_holds_nothing_but_saved_tensors():
    call, _ = large_case().call(torch.float32)
    out, _ = run_tiles(call)
    assert out.grad_fn is not None
    assert tensors_held_by(out.grad_fn) == []


def test_offloading_sees_every_tensor_and_gives_the_same_gradients():
    case = large_case()
    upstream = make_upstream(case)
    expected = results(run_tiles, case, *case.call(torch.float32), upstream)
    offloaded: list[int] = []

    def pack(x: Tensor) -> Tensor:
        offloaded.append(x.numel())
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        offloaded_results = results(run_tiles, case, *case.call(torch.float32), upstream)
    assert all(torch.equal(expected[name], offloaded_results[name]) for name in expected)
    assert sum(offloaded) > sum(case.tensors[name].numel() for name in ("q", "k", "v")) + 2 * 3 * 300 * 16


def test_under_checkpointing_nothing_of_a_layer_stays_alive():
    case, kept = large_case(), []

    def layer(x: Tensor) -> Tensor:
        call, _ = case.call(torch.float32)
        inner = replace(call, q=call.q + x, k=call.k + x, v=call.v + x)
        kept.extend(weakref.ref(tensor) for tensor in (inner.q, inner.k, inner.v))
        return run_tiles(inner)[0]

    x = torch.zeros(2, 3, 300, 16, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    out.sum().backward()
    assert x.grad is not None


def test_after_the_backward_pass_nothing_large_is_alive_though_the_graph_is():
    call, _ = make_case(300).call(torch.float32)
    inner = replace(call, q=call.q * 2, k=call.k * 2, v=call.v * 2)
    kept = [weakref.ref(x) for x in (inner.q, inner.k, inner.v)]
    out, _ = run_tiles(inner)
    out.sum().backward()
    del inner
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    assert out.grad_fn is not None
    assert tensors_held_by(out.grad_fn) == []
