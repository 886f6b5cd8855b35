"""Rescored attention in the C++ kernel: as exact as the reference for every bias and mask, the same in every run."""

import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rounding import Inside, Tensors, assert_within_rounding, rounding_noise
from torch import Tensor

import lengthwise as lw
from lengthwise.attention import checked_call
from lengthwise.attention.backend import Refusal
from lengthwise.attention.native import build, rescore
from lengthwise.bias import Bias, DenseBias, DistanceBias, FunctionBias, LevelBias, LineBias, SumBias, registered
from lengthwise.rescore import ContextualPositions, HeadNetwork, Rescore, ScoreFunction
from lengthwise.token_layout import Band, TokenLayout

pytestmark = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")

RESCORES = ("network", "wide network", "positions")
BIASES = (
    *("none", "distance", "one head", "two-sided", "gaps", "level", "one level", "steps"),
    *("logarithm", "lines", "function", "dense", "one dense", "sum"),
)
MASKS = (
    "causal",
    "two-sided",
    "window",
    "band",
    "bands",
    "documents",
    "padding",
    "holes",
    "everything",
    "shared layout",
)
CALLS = 90


@registered
def wave(rows: Any, columns: Any, query: Tensor, key: Tensor, speed: Tensor) -> Tensor:
    return torch.sin(speed[:, None, None] * (query[:, None, rows, None] - key[:, None, None, columns]).to(speed.dtype))


@dataclass
class Case:
    """One call by its tensors, so that it exists in every precision."""

    tensors: Tensors
    layout: TokenLayout
    rescore: str
    bias: str
    options: dict[str, Any]

    def rounded(self, dtype: torch.dtype) -> "Case":
        """Numbers of this precision; levels are always float64."""
        own = {name: x if name.startswith("level") else x.to(dtype) for name, x in self.tensors.items()}
        return Case(own, self.layout, self.rescore, self.bias, self.options)

    def arguments(self, t: Tensors) -> dict[str, Any]:
        extras = {name: t[name] for name in ("logit_scale", "sink") if name in t}
        rescored: Rescore
        if self.rescore == "positions":
            rescored = ContextualPositions(t["positions"])
        else:
            rescored = HeadNetwork(t["weight_in"], t["bias_in"], t["weight_out"], t["bias_out"])
        given = {"layout": self.layout, "bias": self.make_bias(t), "rescore": rescored}
        return given | extras | self.options

    def make_bias(self, t: Tensors) -> Bias | None:
        query, key = self.layout.query, self.layout.key
        made: dict[str, Any] = {
            "none": lambda: None,
            "distance": lambda: DistanceBias(t["table"], query, key),
            "one head": lambda: DistanceBias(t["table"][:1], query, key),
            "two-sided": lambda: DistanceBias(t["table"], query, key, first=-9),
            "gaps": lambda: DistanceBias(t["table"], query, key),
            "level": lambda: LevelBias(t["level_query"], t["level_key"], t["slope"]),
            "one level": lambda: LevelBias(t["level_query"][:1, :1], t["level_key"][:, :1], t["slope"][:, :, :1]),
            "steps": lambda: LevelBias.of_steps(
                t["step"], t["slope"], start=int(self.layout.start), queries=query.shape[1]
            ),
            "logarithm": lambda: LevelBias(t["level_query"], t["level_key"], t["slope"], "log1p_square"),
            "lines": lambda: LineBias(
                DistanceBias(t["curve"].abs().cumsum(1), query, key), t["factor"], t["knots"], t["slopes"], t["ends"]
            ),
            "function": lambda: FunctionBias(wave, (query, key, t["speed"])),
            "dense": lambda: DenseBias(t["value"]),
            "one dense": lambda: DenseBias(t["value"][:1, :1]),
            "sum": lambda: SumBias((DistanceBias(t["table"], query, key), DenseBias(t["value"][:, :1]))),
        }
        return made[self.bias]()


def random_case(seed: int, rescored: str | None = None, bias: str | None = None, masks: str | None = None) -> Case:
    """A random call; every rescore meets every bias and every mask over the seeds."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rescored, bias, masks = rescored or RESCORES[seed % 3], bias or dice.choice(BIASES), masks or dice.choice(MASKS)
    batch, kv_heads, group = dice.choice((1, 2)), dice.choice((1, 2, 3)), dice.choice((1, 1, 2))
    heads, dim, value = kv_heads * group, dice.choice((3, 8, 16)), dice.choice((5, 16))
    keys = dice.choice((1, 7, 33, 64, 65, 130, 190))
    queries = keys if dice.random() < 0.6 else dice.randint(1, min(keys, 60))
    layout, options = random_layout(dice, generator, masks, batch, queries, keys, gaps=bias == "gaps")
    t = {"q": normal(batch, heads, queries, dim), "k": normal(batch, kv_heads, keys, dim)}
    t["v"] = normal(batch, kv_heads, keys, value)
    if rescored == "positions":
        t["positions"] = normal(dim, dice.choice((2, 9, 20)))
    else:
        hidden, kernel = dice.choice((5, 32)), 1 if rescored == "network" else 3
        t |= {"weight_in": 0.3 * normal(hidden, 2 * heads, kernel), "bias_in": 0.3 * normal(hidden)}
        t |= {"weight_out": 0.3 * normal(heads, hidden, kernel), "bias_out": normal(heads)}
    t |= random_bias(bias, normal, batch, heads, queries, keys, int(layout.start))
    if dice.random() < 0.4:
        t["logit_scale"] = normal(dice.choice((1, batch)), dice.choice((1, heads)), dice.choice((1, queries)))
    if dice.random() < 0.4:
        t["sink"] = (
            normal(heads) if dice.random() < 0.5 else normal(dice.choice((1, batch)), heads, dice.choice((1, queries)))
        )
    if dice.random() < 0.4:
        options["softcap"] = dice.choice((0.7, 20.0))
    if dice.random() < 0.3:
        options["scale"] = 0.4
    return Case(t, layout, rescored, bias, options)


def random_bias(kind: str, normal: Any, batch: int, heads: int, queries: int, keys: int, start: int) -> Tensors:
    if kind in ("distance", "one head", "two-sided", "gaps"):
        return {"table": normal(heads, 21)}
    if kind in ("level", "one level", "logarithm"):
        key = normal(batch, heads, keys, dtype=torch.float64).abs().cumsum(-1) / 4
        own = key[..., start : start + queries] + 0.01
        return {"level_key": key, "level_query": own, "slope": normal(batch, 1, queries)}
    if kind == "steps":
        return {"step": normal(batch, heads, keys).abs() / 4, "slope": normal(1, heads, 1)}
    if kind == "lines":
        return {
            "curve": normal(1, 200) / 20,
            "factor": normal(1, queries).abs(),
            "knots": torch.tensor([0.2, 0.7]),
            "slopes": normal(heads, 3),
            "ends": normal(heads, 3),
        }
    if kind == "function":
        return {"speed": normal(heads)}
    if kind in ("dense", "one dense"):
        return {"value": normal(batch, heads, queries, keys)}
    return {"table": normal(heads, 21), "value": normal(batch, 1, queries, keys)} if kind == "sum" else {}


def random_layout(
    dice: random.Random, generator: torch.Generator, masks: str, batch: int, queries: int, keys: int, *, gaps: bool
) -> tuple[TokenLayout, dict[str, Any]]:
    options: dict[str, Any] = {}
    given: dict[str, Any] = {}
    own = 1 if masks == "shared layout" else batch
    if masks in ("two-sided",):
        given["causal"] = False
    if masks in ("window", "everything"):
        options["window"] = dice.choice((1, 5, 40))
    if masks == "band":
        options["window"] = Band(dice.choice((0, 2)), dice.choice((None, 9)), chunk=dice.choice((1, 4)))
    if masks == "bands":
        options["window"] = (Band(0, 5), Band(first=3))
    if masks in ("documents", "everything", "shared layout"):
        given["documents"] = (torch.rand(own, keys, generator=generator) < 0.06).cumsum(1)
    if masks in ("padding", "everything"):
        given["key_mask"] = torch.arange(keys) >= torch.randint(0, keys, (own, 1), generator=generator)
    if masks == "holes":
        given["key_mask"] = torch.rand(own, keys, generator=generator) < 0.7
    if gaps:
        key = torch.randint(1, 4, (own, keys), generator=generator).cumsum(1)
        return TokenLayout.of(key[:, keys - queries :], key, **given), options
    return lw.layout(queries, past=keys - queries, **given), options


def results(case: Case, tensors: Tensors, backend: str, d_out: Tensor, d_lse: Tensor) -> Tensors:
    """The output, the log-sum-exp and every gradient."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = lw.attend(q, k, v, **case.arguments(leaves), return_lse=True, backend=backend)
    loss = (out.double() * d_out).sum() + (lse.double() * d_lse).where(lse != -torch.inf, 0).sum()
    names = [name for name in leaves if name != "knots"]
    found = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
    grads = {name: torch.zeros_like(leaves[name]) if x is None else x for name, x in zip(names, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def explained(case: Case) -> tuple[Tensors, Any]:
    t = {name: x.double() for name, x in case.tensors.items()}
    return t, lw.explain(t["q"], t["k"], t["v"], **case.arguments(t))


def kink(case: Case) -> float:
    """How near some number is to where a gradient jumps: a hidden unit to 0, a position to a whole number."""
    t, seen = explained(case)
    mask = seen.scores != -torch.inf
    if case.rescore == "positions":
        gates = seen.content.sigmoid().masked_fill(~mask, 0)
        near = gates.flip(-1).cumsum(-1).flip(-1)
        near = (near - near.round()).abs().where(near < t["positions"].shape[1] - 0.5, 1)
    else:
        kernel = t["weight_in"].shape[2]
        x = torch.cat([seen.content, seen.bias], 1)
        near = F.conv2d(x, t["weight_in"][:, :, None], t["bias_in"], padding=(0, kernel // 2)).abs()
        mask = mask.any(1, keepdim=True)
    return float(near.masked_fill(~mask, 1).amin()) if near.numel() else 1.0


def assert_as_exact(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Twice the error that the reference makes at this precision against float64, plus rounding."""
    case = case.rounded(dtype)
    q, v = case.tensors["q"], case.tensors["v"]
    generator = torch.Generator().manual_seed(1)
    above = {
        "d_out": torch.randn(*q.shape[:3], v.shape[3], generator=generator).double(),
        "d_lse": torch.randn(*q.shape[:3], generator=generator).double(),
    }
    wide = {name: x.double() for name, x in case.tensors.items()}
    exact = results(case, wide, "reference", **above)
    plain, ours = (results(case, case.tensors, backend, **above) for backend in ("reference", "native"))
    leaves = {name: x.clone().requires_grad_() for name, x in wide.items()}
    call = checked_call(*(leaves[name] for name in "qkv"), **case.arguments(leaves))
    learned = {name: x for name, x in leaves.items() if name != "knots"}
    noise = rounding_noise(Inside.of(call), above["d_out"], above["d_lse"], learned)
    assert_within_rounding(ours, plain, exact, noise, terms=call.keys)


def smooth_case(seed: int) -> Case:
    """The first of some random calls in which no gradient jumps nearby: there float32 may take the other side."""
    return next(case for attempt in range(50) if kink(case := random_case(seed + 100_000 * attempt)) > 1e-6)


@pytest.mark.parametrize("seed", range(CALLS))
def test_random_calls_and_all_their_gradients_are_as_exact_as_the_reference(seed):
    assert_as_exact(smooth_case(seed))


@pytest.mark.prove
@pytest.mark.parametrize("hundred", range(20))
def test_two_thousand_more_random_calls_are_as_exact_as_the_reference(hundred):
    for seed in range(CALLS + 100 * hundred, CALLS + 100 * (hundred + 1)):
        assert_as_exact(smooth_case(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rescored", RESCORES)
def test_half_precision_is_as_exact_as_the_reference(rescored, dtype):
    assert_as_exact(random_case(3, rescored, "distance", "causal"), dtype)
    assert_as_exact(random_case(5, rescored, "level", "holes"), dtype)


@pytest.mark.parametrize("rescored", RESCORES)
@pytest.mark.parametrize("bias", ["function", "sum", "lines", "gaps"])
def test_a_bias_that_is_filled_in_by_chunks_of_rows_is_exact_in_every_chunk(monkeypatch, rescored, bias):
    monkeypatch.setattr(rescore, "CHUNK", 1)
    monkeypatch.setattr(rescore, "LEAST_ROWS", 29)
    assert_as_exact(next(case for seed in range(50) if kink(case := random_case(seed, rescored, bias)) > 1e-6))


@pytest.mark.parametrize("rescored", RESCORES)
@pytest.mark.parametrize("bias", ["none", "distance", "level", "function"])
def test_decoding_token_by_token_gives_the_bits_of_one_pass_even_with_loud_weights(rescored, bias):
    case = next(
        case
        for seed in range(200)
        if (case := random_case(seed, rescored, bias, "causal")).tensors["q"].shape[2] == 190
    )
    by_row = ("level_query", "slope", "logit_scale", "sink")
    loud = {name: x if name in "qkv" else 5 * x for name, x in case.tensors.items()}

    def attend(first: int, last: int) -> Tensor:
        t = dict(loud)
        t |= {name: t[name][..., first:last] for name in by_row if name in t and t[name].shape[-1] == 190}
        t |= {"level_key": t["level_key"][..., :last]} if "level_key" in t else {}
        part = Case(t, lw.layout(last - first, past=first), rescored, bias, case.options)
        return lw.attend(
            *(t["q"][:, :, first:last], t["k"][:, :, :last], t["v"][:, :, :last]), **part.arguments(t), backend="native"
        )

    with torch.no_grad():
        steps = [attend(0, 60), attend(60, 64), *(attend(n, n + 1) for n in range(64, 190))]
        assert torch.equal(torch.cat(steps, 2), attend(0, 190))


def deterministic_bytes() -> bytes:
    """Outputs and gradients of long enough calls that threads share them."""
    parts = []
    for rescored, bias, masks in [
        *(("network", "distance", "causal"), ("wide network", "level", "causal"), ("wide network", "gaps", "holes")),
        *(("network", "lines", "two-sided"), ("positions", "distance", "documents"), ("positions", "level", "causal")),
    ]:
        seeds = (case for seed in range(200) if (case := random_case(seed, rescored, bias, masks)))
        case = next(case for case in seeds if case.tensors["q"].shape[2] > 120)
        d_out = torch.ones(*case.tensors["q"].shape[:3], case.tensors["v"].shape[3]).double()
        found = results(case, case.tensors, "native", d_out, d_out[..., 0])
        parts += [x.contiguous().numpy().tobytes() for x in found.values()]
    return b"".join(parts)


def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads():
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 2, 5):
            torch.set_num_threads(count)
            found.append(deterministic_bytes())
    finally:
        torch.set_num_threads(threads)
    assert all(x == found[0] for x in found)


@pytest.mark.parametrize("rescored", RESCORES)
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_not_finite_stays_in_the_rows_that_see_it(rescored, name):
    case = next(
        case
        for seed in range(50)
        if (case := random_case(seed, rescored, "distance", "causal")).tensors["q"].shape[2] == 65
    )
    clean = case.arguments(case.tensors)
    case.tensors[name] = case.tensors[name].clone()
    case.tensors[name][0, 0, 40] = torch.nan
    q, k, v = (case.tensors[part] for part in "qkv")
    found = [lw.attend(q, k, v, **clean, return_lse=True, backend=backend) for backend in ("native", "reference")]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours.isnan().any()
        assert not ours.isnan().all()


@pytest.mark.parametrize("rescored", RESCORES)
def test_a_query_that_is_not_finite_spoils_its_own_rows_alone(rescored):
    case = random_case(0, rescored, "none", "causal")
    q, k, v = (case.tensors[part].clone() for part in "qkv")
    q[0, 0, -1] = torch.nan
    out = lw.attend(q, k, v, **case.arguments(case.tensors), backend="native")
    assert out[0, 0, -1].isnan().all()
    assert out[:, :, :-1].isfinite().all()


@pytest.mark.parametrize("rescored", RESCORES)
def test_second_derivatives_are_refused_in_words(rescored):
    case = random_case(1, rescored, "distance", "causal")
    q, k, v = (case.tensors[part].requires_grad_() for part in "qkv")
    out = lw.attend(q, k, v, **case.arguments(case.tensors), backend="native")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(first.sum(), k)


def test_a_score_function_is_refused_with_the_backend_that_takes_it():
    q = torch.randn(1, 2, 5, 8)
    call = checked_call(q, q, q, rescore=ScoreFunction(lambda content, bias, *_: content))
    refused = rescore.plan(call)
    assert isinstance(refused, Refusal)
    assert "row_block" in refused.reasons[0]


@pytest.mark.parametrize("rescored", RESCORES)
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_calls_without_queries_or_keys_give_zeros(rescored, queries, keys):
    case = random_case(2, rescored, "none", "causal")
    given = case.arguments(case.tensors) | {"layout": None, "causal": False}
    given = {name: x for name, x in given.items() if name not in ("logit_scale", "sink") and x is not None}
    heads, kv_heads = (case.tensors[part].shape[1] for part in "qk")
    q, k, v = (
        torch.randn(1, h, n, case.tensors["q"].shape[3], requires_grad=True)
        for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )
    out, lse = lw.attend(q, k, v, **given, return_lse=True, backend="native")
    out.sum().backward()
    assert out.shape[2] == lse.shape[2] == queries
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not q.grad.any()


def peak_bytes(rescored: str, keys: int) -> int:
    """The most memory that a process needs for forward and backward, beyond what it needs for a short call."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(__file__).rpartition("/")[0]!r})
import torch
torch.set_num_threads(1)
import lengthwise as lw
def run(keys):
    encoding = lw.make({rescored!r}, heads=4, width=64, train_length=64)
    layout = lw.layout(keys)
    q, k, v = (torch.randn(1, 4, keys, 16, requires_grad=True) for _ in range(3))
    x = torch.zeros(1, keys, 64)
    bias, rescore = encoding.bias(x, layout), encoding.rescore(x, layout)
    lw.attend(q, k, v, layout=layout, bias=bias, rescore=rescore, backend="native").sum().backward()
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run({keys})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("rescored", ["dapev2", "cope"])
def test_memory_is_linear_in_length(rescored):
    keys = 4096
    one_matrix = 4 * keys * keys * 4
    assert peak_bytes(rescored, keys) < one_matrix / 4
