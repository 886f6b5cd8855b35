"""The tiled C++ kernel against the definition in float64: random calls of everything that it takes, and each part alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lengthwise as lw
from lengthwise.attention import reference
from lengthwise.attention.call import AttentionCall, checked_call
from lengthwise.attention.native import build, tiles
from lengthwise.attention.plan import Plan, Refusal
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, SumBias
from lengthwise.token_layout import Band, TokenLayout

pytestmark = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")

Tensors = dict[str, Tensor]
RANDOM_CALLS = 120


@dataclass
class Case:
    """Tensors by name and how a call is made of them, so that the same case exists in every precision."""

    tensors: Tensors
    make_bias: Callable[[Tensors], Bias | None]
    options: dict[str, Any]
    wants: str = "both"
    dtype: torch.dtype = torch.float32

    def call(self, dtype: torch.dtype, **changes: Any) -> tuple[AttentionCall, list[Tensor]]:
        """The call with numbers that its own precision holds, in `dtype`, and everything that has a gradient."""
        own: Tensors = {}
        for name, x in self.tensors.items():
            given = x if "level" in name else x.to(self.dtype if name in ("q", "k", "v") else torch.float32)
            own[name] = given if "level" in name or (dtype != torch.float64) else given.double()
            own[name] = own[name].detach().clone().requires_grad_()
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
    run: Callable[[AttentionCall], tuple[Tensor, Tensor]], case: Case, dtype: torch.dtype, upstream: Tensors, **changes: Any
) -> list[Tensor]:
    """The output, the log-sum-exp and the gradients of everything."""
    call, learned = case.call(dtype, **changes)
    out, lse = run(call)
    empty = lse == -torch.inf
    heads = {"out": (out, upstream["out"].to(out.dtype)), "lse": (lse, upstream["lse"].to(lse.dtype).masked_fill(empty, 0))}
    wanted = [heads[name] for name in heads if case.wants in (name, "both")]
    gradients = torch.autograd.grad(
        [x for x, _ in wanted], learned, [d for _, d in wanted], allow_unused=True, materialize_grads=True
    )
    return [out.detach(), lse.detach().masked_fill(empty, 0), *gradients]


def make_upstream(case: Case) -> Tensors:
    q, v = case.tensors["q"], case.tensors["v"]
    return {"out": torch.randn(*q.shape[:3], v.shape[3]).to(case.dtype), "lse": torch.randn(q.shape[:3])}


def assert_as_exact(case: Case) -> None:
    """Twice the error that the reference makes at this precision against float64, plus rounding."""
    upstream = make_upstream(case)
    exact = results(run_reference, case, torch.float64, upstream)
    plain = results(run_reference, case, case.dtype, upstream)
    found = results(run_tiles, case, case.dtype, upstream)
    score, units = sizes(case, upstream)
    for name, truth, theirs, ours in zip(["out", "lse", *case.tensors], exact, plain, found, strict=True):
        assert ours.shape == truth.shape and ours.dtype == theirs.dtype, name
        # A score is known to half a unit in its last place, and whatever its weight makes no better.
        rounding = float(truth.norm()) * torch.finfo(ours.dtype).eps if ours.dtype.itemsize < 4 else 0.0
        rounding += max(float(truth.norm()), units.get(name, units["any"])) * 2**-23 * (1 + score / 2)
        error, allowed = float((ours - truth).norm()), 2 * float((theirs - truth).norm()) + rounding
        assert error <= allowed, f"{name}: {error:.3g} where {allowed:.3g} is allowed"


def sizes(case: Case, upstream: Tensors) -> tuple[float, dict[str, float]]:
    """The largest score, and of what size the numbers are that gradients are made of: some cancel to nothing."""
    call, _ = case.call(torch.float64)
    _, _, scores = reference.score_rows(call, reference.of_heads(call.k, call.group))
    score = float(scores.detach().nan_to_num(neginf=0).abs().max())
    q, k, v = (float(case.tensors[name].double().norm(dim=-1).max()) for name in "qkv")
    row = float(upstream["out"].double().norm()) * v + float(upstream["lse"].double().norm())
    return score, {"any": row, "q": row * k * call.scale, "k": row * q * call.scale, "logit_scale": row * (1 + score)}


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
    known = ["level", "log level", "table", "lines"] if follows else ["level", "log level"]
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
    rising = torch.rand(*shape, keys + queries, dtype=torch.float64).cumsum(-1) * pick.choice([0.1, 1, 10])
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
    options = {"layout": layout, "window": make_window(pick, layout), "softcap": pick.choice([None, None, 0.5, 4.0, 50.0])}
    dtype = pick.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    return Case(tensors, make_bias, options, pick.choice(["out", "lse", "both", "both"]), dtype)


@pytest.mark.parametrize("seed", range(RANDOM_CALLS))
def test_a_random_call_is_as_exact_as_the_reference_in_its_precision(seed):
    assert_as_exact(random_case(seed))
