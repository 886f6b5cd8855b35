"""row_block agrees with the reference for every kind of bias and mask, skips only what cannot matter, stays small."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import reference, row_block
from lengthwise.attention.call import Call, checked_call
from lengthwise.attention.row_block import few_rows, tiles
from lengthwise.bias import Bias, DenseBias, DistanceBias, FunctionBias, LevelBias, registered_tile

HEADS, DIM, VALUE = 3, 7, 5
NO_MASK: dict[str, Any] = dict.fromkeys(("rescore", "key_mask", "documents", "window", "scale", "start")) | {
    "causal": True
}


@registered_tile
def kernel_tile(rows: Any, columns: Any, query: Tensor, key: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    way = (query[..., rows, None] - key[..., None, columns]).abs().to(inner.dtype)
    x = torch.log1p(way) / torch.log1p(query[..., rows, None].clamp(min=31).to(inner.dtype))
    return (torch.relu(x[..., None] * inner - 0.3) @ outer).movedim(-1, -3)


@dataclass
class Case:
    """Tensors by name, and how a bias is made of them, so that the same case exists in every precision."""

    tensors: dict[str, Tensor]
    make: Callable[[dict[str, Tensor]], Bias | None]
    masks: dict[str, Any]

    def call(self, dtype: torch.dtype, grad: bool = True) -> tuple[Call, list[Tensor]]:
        own = {
            n: x.clone() if n.startswith("level") or not x.is_floating_point() else x.to(dtype)
            for n, x in self.tensors.items()
        }
        learned = [x.requires_grad_(grad) for x in own.values() if x.is_floating_point()]
        masks = NO_MASK | self.masks
        return checked_call(own["q"], own["k"], own["v"], bias=self.make(own), **masks), learned


KINDS = ["none", "strip", "two-sided strip", "gaps", "level", "shared level", "wild level", "function", "dense"]
SITUATIONS = [
    "causal",
    "two-sided",
    "window",
    "two-sided window",
    "documents",
    "padding",
    "everything",
    "few",
    "start",
    "grouped",
]


def case(kind: str, situation: str = "causal", keys: int = 100, batch: int = 2) -> Case:
    torch.manual_seed(len(kind) + 31 * len(situation) + keys)
    queries = max(1, keys // 3) if situation in ("few", "start") else keys
    shared = 1 if situation == "grouped" else HEADS
    x = {
        "q": torch.randn(batch, HEADS, queries, DIM),
        "k": torch.randn(batch, shared, keys, DIM),
        "v": torch.randn(batch, shared, keys, VALUE),
    }
    documents = (torch.rand(batch, keys) < 0.05).cumsum(1)
    padding = torch.arange(keys) >= torch.tensor([[keys // 5], [0]])[:batch]
    first = max(0, keys - queries - 2) if situation == "start" else keys - queries
    masks: dict[str, Any] = {
        "two-sided": {"causal": False},
        "window": {"window": 23},
        "two-sided window": {"window": 23, "causal": False},
        "documents": {"documents": documents},
        "padding": {"key_mask": padding},
        "everything": {"documents": documents, "key_mask": padding, "window": 30},
        "start": {"start": torch.tensor(first)},
    }.get(situation, {})
    at = torch.arange(keys)
    rows = slice(first, first + queries)
    make: Callable[[dict[str, Tensor]], Bias | None] = lambda _: None  # noqa: E731
    if kind in ("strip", "two-sided strip"):
        x["table"] = torch.randn(HEADS, 41)
        low = -20 if kind == "two-sided strip" else 0
        make = lambda t: DistanceBias(t["table"], at[rows], at, first=low)  # noqa: E731
    elif kind == "gaps":
        x["table"] = torch.randn(HEADS, 41)
        gaps = torch.randint(1, 4, (batch, keys)).cumsum(1)
        make = lambda t: DistanceBias(t["table"], gaps[:, rows], gaps)  # noqa: E731
    elif kind == "level":
        x["level_k"] = torch.rand(batch, HEADS, keys, dtype=torch.float64).cumsum(-1)
        x["level_q"] = x["level_k"][..., rows] + 0.01
        x["slope"] = torch.rand(batch, HEADS, queries)
        make = lambda t: LevelBias(t["level_q"], t["level_k"], t["slope"])  # noqa: E731
    elif kind == "shared level":
        x["slope"] = torch.rand(1, HEADS, 1)
        make = lambda t: LevelBias(at[rows].double()[None, None], at.double()[None, None], t["slope"])  # noqa: E731
    elif kind == "wild level":
        x["level_k"], x["level_q"] = torch.randn(1, 1, keys).double(), torch.randn(1, HEADS, queries).double()
        x["slope"] = torch.randn(batch, 1, queries)
        make = lambda t: LevelBias(t["level_q"], t["level_k"], t["slope"])  # noqa: E731
    elif kind == "function":
        x["inner"], x["outer"] = torch.randn(11), torch.randn(11, HEADS)
        own = torch.stack([at] * batch)
        make = lambda t: FunctionBias(kernel_tile, (own[:, rows], own, t["inner"], t["outer"]))  # noqa: E731
    elif kind == "dense":
        x["value"] = torch.randn(1, HEADS, queries, keys)
        make = lambda t: DenseBias(t["value"])  # noqa: E731
    return Case(x, make, masks)


def results(attend: Callable[[Call], Tensor], call: Call, learned: list[Tensor], d_out: Tensor) -> list[Tensor]:
    out = attend(call)
    return [out.detach(), *torch.autograd.grad(out, learned, d_out.to(out.dtype))]


def assert_as_exact(case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Twice the error that the reference makes at this precision against float64, plus rounding."""
    given = replace(
        case,
        tensors={
            n: x if not x.is_floating_point() or n.startswith("level") else x.to(dtype) for n, x in case.tensors.items()
        },
    )
    q, v = case.tensors["q"], case.tensors["v"]
    d_out = torch.randn(*q.shape[:3], v.shape[3]).to(dtype)
    exact, theirs, ours = (
        results(attend, *given.call(precision), d_out)
        for attend, precision in (
            (reference.attend, torch.float64),
            (reference.attend, dtype),
            (row_block.attend, dtype),
        )
    )
    floating = [n for n, x in case.tensors.items() if x.is_floating_point()]
    for name, truth, plain, found in zip(["out", *floating], exact, theirs, ours, strict=True):
        assert found.dtype == plain.dtype
        # A gradient that cancels to nothing was still made of numbers of the size of d_out; a slope's, times distances.
        unit = d_out.double().norm() * (case.tensors["k"].shape[2] if name == "slope" else 1)
        rounding = max(truth.norm(), unit) * torch.finfo(dtype).eps
        assert (found - truth).norm() <= 2 * (plain - truth).norm() + rounding


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small only lose by being shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every case has several of each sort."""
    monkeypatch.setattr(tiles, "ROWS", 32)
    monkeypatch.setattr(tiles, "COLUMNS", 48)
    monkeypatch.setattr(tiles, "HEADS", 2)
    monkeypatch.setattr(few_rows, "FEW", 0)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_reference(kind: str, situation: str) -> None:
    assert_as_exact(case(kind, situation))


@pytest.mark.parametrize("keys", [1, 2, 63, 64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_works(kind: str, keys: int) -> None:
    assert_as_exact(case(kind, "causal", keys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_good_as_the_reference(kind: str, dtype: torch.dtype) -> None:
    assert_as_exact(case(kind), dtype)


@pytest.mark.parametrize("situation", ["causal", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_derivatives(kind: str, situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "ROWS", 4)
    monkeypatch.setattr(tiles, "COLUMNS", 5)
    small = case(kind, situation, keys=7, batch=1)
    names = [n for n, x in small.tensors.items() if x.is_floating_point()]

    def attend(*given: Tensor) -> Tensor:
        own = small.tensors | dict(zip(names, given, strict=True))
        call = checked_call(own["q"], own["k"], own["v"], bias=small.make(own), **(NO_MASK | small.masks))
        return row_block.attend(call)

    assert torch.autograd.gradcheck(attend, [small.tensors[n].double().requires_grad_() for n in names], fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_twice_is_bitwise_equal(kind: str) -> None:
    call, learned = case(kind, keys=300).call(torch.float32)
    d_out = torch.randn(2, HEADS, 300, VALUE)
    for one, other in zip(*(results(row_block.attend, call, learned, d_out) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_call_is_one_node_and_equal(kind: str) -> None:
    torch._dynamo.reset()
    small = case(kind, keys=40)
    d_out = torch.randn(2, HEADS, 40, VALUE)
    names = list(small.tensors)

    def attend(*given: Tensor) -> Tensor:
        own = dict(zip(names, given, strict=True))
        return row_block.attend(checked_call(own["q"], own["k"], own["v"], bias=small.make(own), **NO_MASK))

    found = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in small.tensors.values()]
        out = run(*given)
        found.append([out.detach(), *torch.autograd.grad(out, [x for x in given if x.requires_grad], d_out)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_can_be_exported(kind: str) -> None:
    small = case(kind, keys=40)
    names = list(small.tensors)

    class Attend(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            own = dict(zip(names, given, strict=True))
            return row_block.attend(checked_call(own["q"], own["k"], own["v"], bias=small.make(own), **NO_MASK))

    given = tuple(small.tensors.values())
    program = torch.export.export(Attend(), given)
    assert sum("row_block" in str(node.target) for node in program.graph.nodes) == 1
    assert torch.equal(program.module()(*given), Attend()(*given))


@pytest.mark.parametrize("kind", ["none", "strip", "level", "dense"])
def test_the_operators_keep_their_promises(kind: str) -> None:
    call, _ = case(kind, keys=21).call(torch.float64)
    parts, first, tensors = row_block.taken_apart(call.bias)
    args = (call.q, call.k, call.v, tensors, parts, "", first, True, None, None, None, call.scale, 0, None, True)
    torch.library.opcheck(torch.ops.lengthwise.row_block.default, args)


class Largest(TorchDispatchMode):
    """The largest number of elements in any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor) and x._base is None and 0 not in x.stride():
                self.found = max(self.found, x.numel())
        return made


def test_a_function_is_asked_for_tiles_only() -> None:
    asked = []

    def watched(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
        asked.append((rows.stop - rows.start) * (columns.stop - columns.start))
        return kernel_tile(rows, columns, *tensors)

    call, learned = case("function", keys=300).call(torch.float32)
    assert isinstance(call.bias, FunctionBias)
    call = replace(call, bias=FunctionBias(watched, call.bias.tensors))
    results(row_block.attend, call, learned, torch.randn(2, HEADS, 300, VALUE))
    assert max(asked) <= tiles.ROWS * tiles.COLUMNS


# Functions are left out: their gradient runs in torch.func, whose tensors a dispatch mode cannot look into.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dense", "function")])
def test_no_tensor_has_queries_times_keys_elements(kind: str) -> None:
    keys = 512
    long = case(kind, keys=keys, batch=1)
    call, learned = long.call(torch.float32)
    with Largest() as largest:
        results(row_block.attend, call, learned, torch.randn(1, HEADS, keys, VALUE))
    assert largest.found < keys * keys / 4


def steep(keys: int, slopes: Tensor, **changes: Tensor) -> tuple[Call, list[Tensor]]:
    """ALiBi with given slopes over ordinary inputs, some of them changed."""
    torch.manual_seed(keys)
    x = {"q": torch.randn(1, 3, keys, 16), "k": torch.randn(1, 3, keys, 16), "v": torch.randn(1, 3, keys, 8)} | changes
    learned = [x[n].clone().requires_grad_() for n in "qkv"]
    level = torch.arange(keys).double()[None, None]
    return checked_call(*learned, bias=LevelBias(level, level, slopes.view(1, 3, 1)), **NO_MASK), learned


def assert_nothing_that_matters_is_skipped(call: Call, learned: list[Tensor], d_out: Tensor) -> None:
    """On and off differ by no more than rounding does: the reference's own error against float64, or one unit."""
    with row_block.skipping(False):
        off = results(row_block.attend, call, learned, d_out)
    on = results(row_block.attend, call, learned, d_out)
    for x, y in zip(on, off, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.isinf(), y.isinf())
        good = y.isfinite()
        scale = torch.where(good, y, 0).abs().amax(-1, keepdim=True)
        difference = torch.where(good, x - y, 0).abs().amax(-1, keepdim=True)
        assert (difference <= scale * 2**-20).all()


ORDINARY = torch.tensor([0.9, 0.5, 0.7])
ADVERSE = [
    "ordinary",
    "far keys",
    "far values",
    "small near values",
    "flat",
    "one steep head",
    "nan",
    "inf",
    "upstream",
]


@pytest.mark.parametrize("what", ADVERSE)
def test_nothing_that_matters_is_ever_skipped(what: str) -> None:
    keys = 600
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 3, keys, 16), torch.randn(1, 3, keys, 16), torch.randn(1, 3, keys, 8)
    d_out = torch.randn(1, 3, keys, 8)
    slopes = {"flat": torch.zeros(3), "one steep head": torch.tensor([0.001, 2.0, 0.0])}.get(what, ORDINARY)
    if what == "far keys":
        k[:, :, 5] *= 300
    elif what == "far values":
        v[:, :, 7] *= 1e30
    elif what == "small near values":
        v[:, :, 200:] *= 1e-20
    elif what == "nan":
        q[0, 0, 300], k[0, 1, 301], v[0, 2, 302] = torch.nan, torch.nan, torch.nan
    elif what == "inf":
        q[0, 0, 300, 3], k[0, 1, 301, 4], v[0, 2, 302, 5] = torch.inf, -torch.inf, torch.inf
    elif what == "upstream":
        d_out[:, :, 400:] *= 1e20
        d_out[:, :, :100] = 0
    call, learned = steep(keys, slopes, q=q, k=k, v=v)
    assert_nothing_that_matters_is_skipped(call, learned, d_out)


def test_rows_without_their_own_key_skip_nothing() -> None:
    call, learned = steep(600, ORDINARY)
    masked = replace(call, key_mask=torch.arange(600)[None] < 40)
    assert_nothing_that_matters_is_skipped(masked, learned, torch.randn(1, 3, 600, 8))


def test_far_keys_are_skipped_in_an_easy_case() -> None:
    call, _ = steep(600, ORDINARY)
    assert row_block.skipped_share(call) > 0.3


def test_a_falling_table_is_skipped_too() -> None:
    call, learned = steep(600, ORDINARY)
    at = torch.arange(600)
    table = (-ORDINARY[:, None] * at).requires_grad_()
    falling = replace(call, bias=DistanceBias(table, at, at))
    assert row_block.skipped_share(falling) > 0.3
    assert_nothing_that_matters_is_skipped(falling, [*learned, table], torch.randn(1, 3, 600, 8))


def test_a_flat_bias_is_never_skipped() -> None:
    call, _ = steep(600, torch.zeros(3))
    assert row_block.skipped_share(call) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_does_not_leak(kind: str) -> None:
    call, _ = case(kind, keys=100).call(torch.float32, grad=False)
    other = replace(call, k=call.k.clone(), v=call.v.clone(), q=call.q.clone())
    other.k[:, :, -1], other.v[:, :, -1], other.q[:, :, -1] = torch.inf, torch.nan, 1e30
    with row_block.skipping(False):
        assert torch.equal(row_block.attend(call)[:, :, :-1], row_block.attend(other)[:, :, :-1])
        assert row_block.attend(other)[:, :, -1].isnan().all()


@pytest.mark.parametrize("situation", ["causal", "padding", "start", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_query_takes_the_short_way(kind: str, situation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "FEW", 100)
    call, _ = case(kind, situation, keys=3).call(torch.float32, grad=False)
    assert few_rows.suits(call)
    torch.testing.assert_close(row_block.attend(call), reference.attend(call))


class Mixing(torch.nn.Module):
    """Scores of all heads mixed, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(HEADS, HEADS) / 3)

    def rescore(self, content: Tensor, bias: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return content + bias + torch.einsum("bhij,hg->bgij", (content + bias).masked_fill(~mask, 0), self.mix)


@pytest.mark.parametrize("kind", ["none", "strip", "level", "function"])
def test_rescored_attention_is_that_of_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_block.rescoring, "SCORES", 2 * HEADS * 100 * 30)
    mixing = Mixing().double()
    call, learned = case(kind).call(torch.float64)
    call = replace(call, rescore=mixing.rescore)
    d_out = torch.randn(2, HEADS, 100, VALUE, dtype=torch.float64)
    found = [results(attend, call, [*learned, mixing.mix], d_out) for attend in (reference.attend, row_block.attend)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
