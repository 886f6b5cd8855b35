"""What test_triton.py runs in a process of its own, where Triton interprets its kernels on the CPU."""

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_calls import RandomCall, accepts, judge, random_call, run_backend, viewed
from rounding import Inside, assert_within_rounding, rounding_noise
from tiles_case import operator_arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton import jit
from triton import language as tl
from triton_cover import Choice, pairwise, products
from triton_harness import poisoned, shuffled

import lengthwise as lw
from lengthwise.attention import AttentionCall, checked_call, reference, triton
from lengthwise.attention.backend import Refusal
from lengthwise.attention.triton import TritonPlan, bounds, inputs, kernels, passes, plan, self_test, tiles
from lengthwise.attention.triton.kernels import tables
from lengthwise.attention.triton.kernels.reading import put_vectors, vectors
from lengthwise.attention.triton.terms import terms_of
from lengthwise.attention.triton.tiles import Tile
from lengthwise.bias import doubled_sums

assert os.environ["TRITON_INTERPRET"] == "1"
FIRST, LAST = (int(end) for end in os.environ.get("LENGTHWISE_TRITON_SEEDS", "0 14").split())
FLOOR = 0.35
"""Of all random calls at least so many must be taken: the others have rescores, explicit masks or other biases."""

FORBIDDEN = (
    *("scatter_add", "scatter_reduce", "index_add", "index_put", "index_reduce", "put_", "bincount", "histc"),
    *("embedding_dense_backward", "kthvalue", "median", "masked_scatter", "histogram", "index_copy"),
)
"""What torch lists as dependent on the order of threads on CUDA; cumsum is on the list for floating-point numbers."""


def taken(seeds: range) -> list[RandomCall]:
    return [call for call in map(random_call, seeds) if accepts(call, "triton")]


ONCE_WRONG = {
    214: "both parts of a level are learned",
    355: "lines without a key",
    865: "near levels in a block that spans much",
}


@pytest.mark.parametrize("seed", ONCE_WRONG, ids=ONCE_WRONG.get)
def test_calls_that_once_failed(seed):
    assert judge(random_call(seed), "triton")


def test_the_kernels_are_right_or_refuse():
    calls = taken(range(FIRST, LAST))
    assert len(calls) >= FLOOR * (LAST - FIRST)
    for call in calls:
        judge(call, "triton")


def learned_calls(count: int) -> list[RandomCall]:
    """The first calls of every sort that have gradients."""
    return [call for call in taken(range(FIRST, LAST)) if len(call.learned) > 2 and call.queries > 4][:count]


def test_programs_in_another_order_give_the_same_bits_and_touch_nothing_outside():
    for call in learned_calls(2):
        plain = run_backend(call, "triton")
        assert plain is not None
        for harness in (shuffled(3), poisoned()):
            with harness:
                again = run_backend(call, "triton")
            assert again is not None
            for name, x in plain.items():
                assert torch.equal(x.nan_to_num(7), again[name].nan_to_num(7)), f"{name}\n{call}"


class Operations(TorchDispatchMode):
    """Raises at operations whose result depends on the order of threads, were they on a GPU; or that read a value."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not any(name.startswith(word) for word in FORBIDDEN), name
        assert name != "cumsum" or not args[0].is_floating_point()
        assert name not in ("_local_scalar_dense", "nonzero", "equal"), name
        return function(*args, **(kwargs or {}))


def test_no_operation_on_the_road_depends_on_the_order_of_threads():
    for call in learned_calls(4):
        tensors = {
            name: viewed(leaf, leaf.base).detach().requires_grad_(name in call.learned)
            for name, leaf in call.leaves.items()
        }
        checked = checked_call(**call.arguments(tensors), return_lse=True)
        own = plan(checked)
        assert isinstance(own, TritonPlan)
        with Operations():
            out, lse = passes.forward(checked, own.notes)
            passes.backward(checked, own.notes, torch.ones_like(out), torch.zeros_like(lse), out, lse)


def test_sums_by_doubling_are_running_sums():
    steps = torch.rand(2, 3, 37, dtype=torch.float64)
    assert torch.allclose(doubled_sums(steps), steps.cumsum(-1), rtol=40 * torch.finfo(torch.float64).eps)


def test_a_long_cache_is_spread_over_programs(monkeypatch):
    q, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 1, 200, 16), torch.randn(1, 1, 200, 16)
    layout = lw.layout(2, past=198)
    levels = torch.rand(1, 2, 200, dtype=torch.float64).cumsum(2)
    bias = lw.LevelBias(levels[..., 198:], levels, torch.ones(1, 2, 1))
    shares = []
    plain = tiles.shares_of_keys
    monkeypatch.setattr(passes, "shares_of_keys", lambda *sizes: shares.append(plain(*sizes)) or shares[-1])
    with torch.no_grad():
        ours = lw.attend(q, k, v, layout=layout, bias=bias, sink=torch.zeros(2), return_lse=True, backend="triton")
        theirs = lw.attend(q, k, v, layout=layout, bias=bias, sink=torch.zeros(2), return_lse=True, backend="reference")
    assert shares[0] > 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


class Counted(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_more_shares_of_a_cache_take_no_more_operations():
    call = checked_call(torch.randn(1, 1, 1, 16), *torch.randn(2, 1, 1, 200, 16))
    counts = []
    for shares in (2, 6):
        with torch.no_grad(), Counted() as counted:
            passes.forward(call, {"shares": shares})
        counts.append(counted.count)
    assert counts[0] == counts[1]


def test_levels_are_as_exact_at_a_billion_as_at_zero():
    q, k, v = torch.randn(3, 1, 1, 50, 16)
    levels = torch.rand(1, 1, 50, dtype=torch.float64).cumsum(2)
    near, far = (
        lw.attend(q, k, v, bias=lw.LevelBias(x, x, torch.ones(1, 1, 1)), backend="triton")
        for x in (levels, levels + 1e9)
    )
    assert torch.allclose(near, far, atol=2e-6)


@jit
def copy_far(x, y, begin, stride, F: tl.constexpr):  # noqa: N803
    """Copies rows by where they would be, were there `begin` of them before."""
    at = begin + tl.arange(0, 4)
    values = vectors(x - tl.cast(begin, tl.int64) * stride, begin, begin + 4, stride, 16, 16, 4, F)
    put_vectors(y - tl.cast(begin, tl.int64) * 16, values, at, begin + 4, 16, 16, F)


def test_rows_beyond_two_to_the_31_are_where_they_are():
    x, y = torch.randn(4, 3 * 32 * 128), torch.zeros(4, 16)
    layout = lw.layout(1)
    flags = []
    for stride in (2**30, 2**31):
        q = x.as_strided((1, 1, 1, 16), (1, 1, stride, 1))
        flags.append(inputs.KernelInputs(checked_call(q, q, q, layout=layout), {}).flags)
    assert [own.WIDE for own in flags] == [False, True]
    copy_far[(1,)](x, y, 2**28, x.stride(0), F=flags[1])
    assert torch.equal(y, x[:, :16])


def test_a_band_that_reaches_far_ahead_hides_what_is_not_among_the_first():
    q, k, v = torch.randn(3, 1, 1, 20, 16)
    window = lw.Band(-(2**30), first=5)
    ours, theirs = (lw.attend(q, k, v, causal=False, window=window, backend=name) for name in ("triton", "reference"))
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_what_is_not_finite_stays_in_the_rows_that_see_it():
    q, k, v = (x.clone().requires_grad_() for x in torch.randn(3, 1, 2, 40, 16))
    with torch.no_grad():
        k[0, 0, 30, 3], v[0, 1, 35, 2] = torch.nan, torch.inf
    out = lw.attend(q, k, v, backend="triton")
    assert out[0, 0, :30].isfinite().all()
    assert out[0, 0, 30:].isnan().all()
    assert out[0, 1, :35].isfinite().all()
    gradients = torch.autograd.grad(out[:, :, :30].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)


def test_a_compiled_graph_sees_one_node_and_the_operators_keep_their_promises():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 20, 16))
    slope = torch.ones(1, 2, 1, requires_grad=True)
    levels = torch.rand(1, 2, 20, dtype=torch.float64).cumsum(2)

    def attend(q: Any, k: Any, v: Any, slope: Any) -> Any:
        return lw.attend(q, k, v, bias=lw.LevelBias(levels, levels, slope), backend="triton")

    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=backend)(q, k, v, slope)
    assert torch.equal(compiled, attend(q, k, v, slope))
    assert sum("lengthwise.triton" in str(node.target) for node in graphs[0].graph.nodes) == 1
    call = checked_call(q, k, v, bias=lw.LevelBias(levels, levels, slope))
    torch.library.opcheck(torch.ops.lengthwise.triton.default, operator_arguments(call))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float64}, "float32, float16 and bfloat16"),
        ({"dim": 160}, "up to 128 wide"),
        ({"bias": "dense"}, "got DenseBias"),
        ({"batch": 65_536}, "up to 65,535 sequences"),
    ],
)
def test_what_it_cannot_take_is_refused_in_words(options, words):
    shape = options.get("batch", 1), 1, 5, options.get("dim", 16)
    q, k, v = torch.zeros(3, *shape, dtype=options.get("dtype", torch.float32))
    bias = lw.DenseBias(torch.zeros(1, 1, 5, 5)) if "bias" in options else None
    with pytest.raises(NotImplementedError, match=words):
        lw.attend(q, k, v, bias=bias, backend="triton")


# Every two of kind, mask, length, queries, extras, precision and width.

CASES = pairwise()
"""Every pair; behind prove in larger calls, and many more."""
if turn := os.environ.get("LENGTHWISE_TRITON_PRODUCT"):
    part, parts = map(int, turn.split())
    CASES = [case for n, case in enumerate([*CASES, *products()]) if n % parts == part]


def results(call: AttentionCall, run: Callable[[AttentionCall], Any]) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and the gradients of everything, by name."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in call.tensors().items()}
    learned = {name: x for name, x in leaves.items() if x.is_floating_point() and not name.endswith("knots")}
    out, lse = run(call.with_tensors(leaves))
    gradients = torch.autograd.grad(
        [out, lse], list(learned.values()), [y.to(x.dtype) for x, y in zip((out, lse), upstream(call), strict=True)]
    )
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(learned, gradients, strict=True))


def upstream(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = call.q.shape[:3]
    d_out = torch.randn(*shape, call.v.shape[3], generator=generator).bfloat16().to(call.dtype)
    return d_out, torch.randn(shape, generator=generator)


def in_float64(call: AttentionCall) -> AttentionCall:
    return call.with_tensors({name: x.double() for name, x in call.tensors().items() if x.is_floating_point()})


def by_reference(call: AttentionCall) -> Any:
    return reference.run(call, reference.plan(call))


def by_kernels(call: AttentionCall) -> Any:
    own = plan(call)
    assert isinstance(own, TritonPlan), own
    return triton.run(call, own)


def assert_right(call: AttentionCall) -> None:
    """Twice what plain arithmetic at that precision loses, plus roundings."""
    exact_call = in_float64(call)
    learned = {
        name: x.detach().clone().requires_grad_() for name, x in exact_call.tensors().items() if x.is_floating_point()
    }
    d_out, d_lse = upstream(call)
    eps = torch.finfo(call.dtype).eps
    noise = rounding_noise(Inside.of(exact_call.with_tensors(learned)), d_out, d_lse, learned, eps=eps)
    ours, plain, exact = results(call, by_kernels), results(call, by_reference), results(exact_call, by_reference)
    assert_within_rounding(ours, plain, exact, noise, terms=max(call.queries, call.keys), eps=eps)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_kernels_are_right_in_every_pair_of_circumstances(case, monkeypatch):
    sizes = {}
    if not turn:  # one program a tile instead of four, and fewer tiles
        sizes = {"batch": 1, "kv_heads": 1}
        monkeypatch.setattr(inputs, "tile_for", lambda kernel, *_: Tile(16 if kernel == "decode" else 64, 64, 4, 1))
    call, _ = self_test.small_call(case.kind, torch.device("cpu"), case.count, case.length, **sizes)
    assert_right(call)


# Tables, curves and profiles that are read by positions.


def lines_call(length: int, entries: int, **options: Any) -> AttentionCall:
    """A call whose curve has so many entries."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = torch.randn(3, 1, 1, length, 16, generator=generator)
    layout = lw.layout(length, **options)
    curve = lw.DistanceBias(torch.arange(entries).float().log1p()[None], layout.query, layout.key)
    slope, start = torch.randn(2, 1, 3, generator=generator)
    bias = lw.LineBias(curve, torch.ones(1, length), torch.tensor([2.0, 3.0]), slope, start)
    return checked_call(q, k, v, layout=layout, bias=bias, return_lse=True)


@pytest.mark.parametrize("documents", [False, True])
def test_the_gradient_of_a_curve_as_long_as_the_text_visits_every_tile_once(documents, monkeypatch):
    counts = dict.fromkeys(("key_vectors", "sums_by_entry"), 0)

    def counted(name: str, plain: Any) -> Any:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return plain(*args)

        return run

    for name in counts:
        monkeypatch.setattr(tables, name, counted(name, getattr(tables, name)))
    length, side = 160, 32  # the interpreter's tiles
    blocks = length // side
    options = {"documents": torch.arange(length)[None] // 72} if documents else {}
    results(lines_call(length, length, **options), by_kernels)
    # Distances of a tile lie within twice its side.
    most = 2 * side // inputs.ENTRIES + 1
    whole = blocks * (blocks + 1) // 2
    assert counts["key_vectors"] <= whole if documents else counts["key_vectors"] == whole
    assert counts["sums_by_entry"] <= most * counts["key_vectors"]


def test_a_program_has_several_blocks_of_rows_where_sums_would_take_more_memory_than_the_queries():
    call = lines_call(131, 1000)
    own = inputs.KernelInputs(call, {})
    assert passes._chunks(own, 5, 1000) == 2
    assert passes._chunks(own, 5, 129) == 5
    assert passes._chunks(own, 5, 10_000) == 1
    assert_right(call)


@pytest.mark.parametrize("bias", ["lines", "table by position", "profiles of keys"])
def test_sums_by_entry_are_right_and_have_the_same_bits_in_another_order(bias):
    kind = Choice(bias, "padding", 40, "all", "", "float32", 16).kind
    kind = kind._replace(profiles=32 if kind.profile else 0)  # more than are added at once
    call = lines_call(70, 90) if bias == "lines" else self_test.small_call(kind, torch.device("cpu"), 40, 40)[0]
    assert_right(call)
    plain = results(call, by_kernels)
    with shuffled(3), poisoned():
        again = results(call, by_kernels)
    for name, x in plain.items():
        assert torch.equal(x.nan_to_num(7), again[name].nan_to_num(7)), name


# Skipping.


def steep(
    length: int = 136, queries: int = 136, kind: str = "levels", slope: float = 0.9, **options: Any
) -> AttentionCall:
    """A call whose far keys cannot matter."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 2, queries, 16, generator=generator)
    k, v = torch.randn(2, 1, 1, length, 16, generator=generator)
    layout = lw.layout(queries, past=length - queries)
    slopes = torch.tensor([slope, slope / 2]).view(1, 2, 1)
    level = layout.key[None].double() + 1e6
    levels = lw.LevelBias(level[..., length - queries :], level, slopes)
    table = lw.DistanceBias(-slopes[0] * torch.arange(length), layout.query, layout.key)
    bias = {"levels": levels, "table": table, "both": lw.SumBias((table, levels))}[kind]
    return checked_call(q, k, v, layout=layout, bias=bias, return_lse=True, **options)


@pytest.fixture
def skips_short(monkeypatch):
    """Skipping at any length."""
    monkeypatch.setattr(tiles, "SHORTEST", 0)


def assert_skipping_changes_nothing(call: AttentionCall, least: float) -> None:
    assert triton.skipped_share(call) >= least
    on, off = results(call, by_kernels), results(replace(call, skip=False), by_kernels)
    for name, x in on.items():
        assert torch.equal(x.isfinite(), off[name].isfinite()), name
        difference, size = float((x - off[name]).nan_to_num().norm()), float(off[name].nan_to_num(0, 0, 0).norm())
        assert difference <= 2**-20 * size, f"{name}: {difference:.2e} of {size:.2e}"


FACTORS = torch.linspace(0.5, 2, 136).view(1, 1, -1)


STEEP: list[tuple[str, dict[str, Any], float]] = [
    ("both", {"sink": torch.ones(2)}, 0.15),
    ("levels", {"logit_scale": FACTORS, "window": 120}, 0.1),
    ("levels", {}, 0.15),
    ("table", {}, 0.15),
]
CHANGES = ["a strong gradient", "a long value", "a long key", "not a number", "a factor of 0"]
"""The first of either is enough where time is short."""


@pytest.mark.usefixtures("skips_short")
@pytest.mark.parametrize(("kind", "options", "least"), STEEP if turn else STEEP[:1])
def test_skipping_changes_nothing(kind, options, least):
    assert_skipping_changes_nothing(steep(kind=kind, **options), least)


@pytest.mark.usefixtures("skips_short")
@pytest.mark.parametrize("change", CHANGES if turn else CHANGES[:1])
def test_skipping_keeps_what_may_matter(change, monkeypatch):
    call = steep(kind="levels", logit_scale=FACTORS.clone())
    if change == "a long key":
        call.k[0, 0, 7] *= 300
    elif change == "a long value":
        call.v[0, 0, 7] *= 1e12
    elif change == "a strong gradient":
        d_out, d_lse = upstream(call)
        d_out[:, :, 100:] *= 1e15
        monkeypatch.setitem(globals(), "upstream", lambda _: (d_out, d_lse))
    elif change == "not a number":
        call.q[0, 0, 130, 3] = torch.nan
    else:
        assert call.logit_scale is not None
        call.logit_scale[0, 0, 100] = 0
    assert_skipping_changes_nothing(call, 0.0)


@pytest.mark.usefixtures("skips_short")
def test_a_call_without_a_bound_skips_nothing():
    for call in (steep(softcap=3.0), steep(window=lw.Band(1, 50)), replace(steep(), skip=False)):
        assert triton.skipped_share(call) == 0
    assert triton.skipped_share(steep(queries=40)) == 0


def test_short_calls_skip_nothing():
    assert triton.skipped_share(steep()) == 0


# Faults that are planted: the tests above see each of them.


def right_outside() -> None:
    with poisoned():
        assert_right(steep(37, 37))


def right_at_the_edge() -> None:
    assert_right(
        self_test.small_call(Choice("none", "window", 65, "all", "", "float32", 16).kind, torch.device("cpu"), 65, 65)[
            0
        ]
    )


def right_in_half() -> None:
    assert_right(
        self_test.small_call(Choice("none", "", 63, "all", "", "bfloat16", 16).kind, torch.device("cpu"), 63, 63)[0]
    )


def right_far_out() -> None:
    call = steep(37, 37)
    assert isinstance(call.bias, lw.LevelBias)
    moved = {name: x + 0.37 + 1e9 for name, x in call.bias.tensors().items() if name.endswith("level")}
    assert_right(replace(call, bias=call.bias.rebuilt(moved)))


def right_when_skipping() -> None:
    # Queries near 0, so that the bound is hardly larger than what it bounds.
    call = steep(150, 150, slope=0.18)
    call = replace(call, q=call.q / 100)
    with torch.no_grad():
        on, off = (by_kernels(replace(call, skip=skip))[0] for skip in (True, False))
    assert float((on - off).norm()) <= 2**-20 * float(off.norm())


STORE = "inside = (at < count)[:, None] & (channel < DIM)[None, :]"
FAULTS: dict[str, tuple[Callable[[], None], str, str]] = {
    "a store that is not masked": (right_outside, STORE, "inside = (at >= 0)[:, None] & (channel < DIM)[None, :]"),
    "a load that is not masked": (
        right_outside,
        "inside = ((at >= 0) & (at < count))[:, None]",
        "inside = (at >= 0)[:, None]",
    ),
    "a mask that is off by one": (right_at_the_edge, "< count.to(tl.uint32)", "<= count.to(tl.uint32)"),
    "bits multiplied as integers": (right_in_half, "if F.TARGET == INTERPRETED:", "if F.TARGET == NVIDIA:"),
    "levels without their rest": (
        right_far_out,
        "rest = (high - (level - change)) - (origin.high + change) + (rest - origin.rest)",
        "rest = (high - (level - change)) - (origin.high + change)",
    ),
    "a bound that is too generous": (right_when_skipping, "fits = lost <= small", "fits = lost <= 0.03"),
}


def planted(folder: Path, package: str, before: str, after: str) -> Any:
    """The kernels with a fault: a copy of their folder, as a package of its own."""
    (folder / package).mkdir()
    changes = 0
    for file in Path(kernels.__file__).parent.glob("*.py"):
        text = file.read_text()
        changes += text.count(before)
        text = text.replace(before, after).replace(kernels.__name__, package)
        (folder / package / file.name).write_text(text)
    assert changes == 1
    return importlib.import_module(package)


@pytest.mark.usefixtures("skips_short")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, tmp_path, monkeypatch):
    check, before, after = FAULTS[name]
    check()
    monkeypatch.syspath_prepend(tmp_path)
    module = planted(tmp_path, f"planted_{list(FAULTS).index(name)}", before, after)
    for home in (passes, bounds):
        for kernel in [own for own in vars(home) if own.endswith("_kernel")]:
            monkeypatch.setattr(home, kernel, getattr(module, kernel))
    with pytest.raises(AssertionError):
        check()


# Trust.


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """The CPU as a card that must prove itself, with a cache folder of its own."""
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    monkeypatch.setattr(triton, "NEED_PROOF", ("cpu",))
    monkeypatch.setattr(self_test, "MANY", ((9, 9),))
    monkeypatch.setattr(self_test, "FEW", ((3, 9),))
    self_test._verdicts.cache_clear()
    yield tmp_path
    self_test._verdicts.cache_clear()


def by_own_kernels(call: AttentionCall, notes: Any) -> Any:
    return triton.run(call, TritonPlan(dict(notes)))


def no_run(call: AttentionCall, notes: Any) -> Any:
    pytest.fail("run without need")


def plain_call() -> AttentionCall:
    return steep(40, 40, kind="table")


def test_a_kind_proves_itself_once(cards, monkeypatch, caplog):
    assert isinstance(plan(plain_call()), TritonPlan)
    assert "once" in caplog.text
    (file,) = (cards / "triton").iterdir()
    assert "float32" in file.read_text()
    # Another process reads the verdict, and tries nothing.
    self_test._verdicts.cache_clear()
    monkeypatch.setattr(self_test, "judge", lambda *_: pytest.fail("tried again"))
    assert isinstance(plan(plain_call()), TritonPlan)
    # What is not a file of ours is as good as none.
    file.write_text("{")
    self_test._verdicts.cache_clear()
    monkeypatch.setattr(self_test, "judge", lambda *_: None)
    assert isinstance(plan(plain_call()), TritonPlan)


def test_a_kind_that_fails_is_refused_with_the_command_that_reports_it(cards, monkeypatch, caplog):
    monkeypatch.setattr(triton, "run", lambda call, _: by_reference(replace(call, scale=2 * call.scale)))
    refusal = plan(plain_call())
    assert isinstance(refusal, Refusal)
    assert "off by" in refusal.reasons[0]
    assert "lengthwise info --prove" in caplog.text
    monkeypatch.setattr(triton, "run", lambda call, _: 1 / 0)
    self_test._verdicts.cache_clear()
    assert isinstance(plan(plain_call()), Refusal)  # the verdict was kept


def test_an_error_is_a_verdict_of_its_process_alone(cards, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(triton, "run", lambda call, _: 1 / 0)
        refusal = plan(plain_call())
    assert isinstance(refusal, Refusal)
    assert "ZeroDivisionError" in refusal.reasons[0]
    assert plan(plain_call()) == refusal
    self_test._verdicts.cache_clear()
    assert isinstance(plan(plain_call()), TritonPlan)


def test_a_proof_does_not_depend_on_what_the_caller_has_set(cards):
    kind = Choice("lines", "", 9, "all", "", "float32", 16).kind._replace(tables=1, level="linear", is_learned=False)
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        assert self_test.judge(kind, torch.device("cpu"), by_own_kernels, passes.skips) is None
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_nothing_is_tried_on_tensors_without_numbers(cards):
    with FakeTensorMode():
        refusal = plan(plain_call())
    assert isinstance(refusal, Refusal)
    assert "tensors without numbers" in refusal.reasons[0]
    assert isinstance(plan(plain_call()), TritonPlan)


def test_few_queries_and_other_numbers_of_lines_and_profiles_are_kinds_of_their_own():
    layout = lw.layout(2, past=198)
    kinds = []
    for batch, count in ((1, 3), (9, 3), (9, 19)):
        q, k = torch.zeros(batch, 1, 2, 16), torch.zeros(batch, 1, 200, 16)
        bias = lw.QueryDistanceBias(torch.zeros(1, 1, 2, count), torch.zeros(1, count, 9), layout.query, layout.key)
        call = checked_call(q, k, k, layout=layout, bias=bias)
        kinds.append(self_test.kind_of(call, terms_of(bias), follows_slots=True))
    assert [(kind.decoding, kind.profiles) for kind in kinds] == [("shares", 16), ("whole", 16), ("whole", 32)]
    notes = [self_test.small_call(kind, torch.device("cpu"), 2, 40)[1] for kind in kinds]
    assert [own["shares"] > 1 for own in notes] == [True, False, False]


UNMASKED = "s = scores_of(k, t, z, F, p, rows, keys, PHASE != 1).scores"
MISCOMPILED = {
    "no scores from the third unmasked tile on": "s *= tl.where(at >= 2 * F.BN, 0.0, 1.0)",
    "unmasked scores that are off by a fifth": "s *= 1.2",
}


@pytest.mark.parametrize("name", MISCOMPILED)
def test_a_proof_catches_what_every_long_call_would_meet(name, tmp_path, monkeypatch):
    """With the tiles of a card, which are larger than the interpreter's."""
    monkeypatch.setattr(inputs, "tile_for", lambda *sort: tiles.tile_for(*sort[:-1], (8, 0)))
    monkeypatch.setattr(self_test, "MANY", self_test.MANY[1:])
    monkeypatch.syspath_prepend(tmp_path)
    fault = f"{UNMASKED}\n            if PHASE == 1:\n                {MISCOMPILED[name]}"
    module = planted(tmp_path, f"miscompiled_{list(MISCOMPILED).index(name)}", UNMASKED, fault)
    kind = Choice("table", "", 400, "all", "", "bfloat16", 16).kind._replace(is_learned=False)
    if turn:
        assert self_test.judge(kind, torch.device("cpu"), by_own_kernels, passes.skips) is None
    monkeypatch.setattr(passes, "forward_kernel", module.forward_kernel)
    assert "off by" in self_test.judge(kind, torch.device("cpu"), by_own_kernels, passes.skips)


def test_a_result_that_changes_from_run_to_run_is_no_proof(cards, monkeypatch):
    plain, noise = triton.run, torch.Generator().manual_seed(0)

    def run(call: AttentionCall, own: Any) -> Any:
        out, lse = plain(call, own)
        return out * (1 + 1e-7 * torch.randn(out.shape, generator=noise)), lse

    monkeypatch.setattr(triton, "run", run)
    refusal = plan(plain_call())
    assert isinstance(refusal, Refusal)
    assert "other bits" in refusal.reasons[0]


def test_a_call_that_skips_is_a_kind_of_its_own(monkeypatch):
    monkeypatch.setattr(tiles, "SHORTEST", 136)
    with torch.no_grad():
        kinds = [
            self_test.kind_of(call, terms_of(call.bias), follows_slots=True)
            for call in (steep(135, 135, kind="table"), steep(136, 136, kind="table"))
        ]
    assert [kind.has("skipping") for kind in kinds] == [False, True]
    monkeypatch.setattr(tiles, "SHORTEST", 2048)
    call, notes = self_test.small_call(kinds[0], torch.device("cpu"), 136, 136)
    assert passes.first_keys(inputs.KernelInputs(call, notes)) is None


SKIPPING = [
    {"level": "linear", "width": 128, "value": 128, "options": "logit scale, padding, skipping"},
    {"tables": 1},
    {"tables": 2, "level": "linear", "options": "sink, documents, skipping"},
    {"level": "linear", "options": "window, shared keys, skipping"},
]
"""The first is enough where time is short."""


@pytest.mark.parametrize("own", SKIPPING if turn else SKIPPING[:1])
def test_the_small_calls_of_a_kind_that_skips_do_skip(own, monkeypatch):
    monkeypatch.setattr(inputs, "tile_for", lambda *sort: tiles.tile_for(*sort[:-1], (8, 0)))  # larger, so fewer
    kind = Choice("none", "", 397, "all", "", "bfloat16", 64).kind._replace(**{"options": "skipping"} | own)
    for size in self_test.MANY if turn else self_test.MANY[1:]:
        assert passes.skips(*self_test.small_call(kind, torch.device("cpu"), *size))


def test_a_kind_that_is_to_skip_and_does_not_is_no_proof():
    kind = Choice("table", "", 9, "all", "", "float32", 16).kind._replace(options="skipping")
    words = self_test.judge(kind, torch.device("cpu"), no_run, lambda call, notes: False)
    assert words == "keys are to be skipped, and none is"


def test_a_kind_proves_itself_in_a_layer_that_is_recomputed(cards):
    q = torch.randn(1, 1, 5, 16)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return lw.attend(q, q, q, backend="triton")

    recomputed, plain = (q.clone().requires_grad_() for _ in range(2))
    checkpoint(attend, recomputed, use_reentrant=False).sum().backward()
    attend(plain).sum().backward()
    assert torch.equal(recomputed.grad, plain.grad)


def test_in_a_capture_a_kind_must_have_proved_itself_before(cards, monkeypatch):
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with torch.no_grad():
        refusal = plan(plain_call())
        assert isinstance(refusal, Refusal)
        assert "has not proved itself" in refusal.reasons[0]
        for capturing[0] in (False, True):
            assert isinstance(plan(plain_call()), TritonPlan)


def test_in_a_compiled_graph_a_kind_must_have_proved_itself_before(cards):
    call = plain_call()

    def attend(q: Any, k: Any, v: Any) -> Any:
        return lw.attend(q, k, v, layout=call.layout, bias=call.bias, backend="triton")

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="has not proved itself"):
        compiled(call.q, call.k, call.v)
    torch._dynamo.reset()
    expected = attend(call.q, call.k, call.v)
    assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(call.q, call.k, call.v), expected)


def test_one_call_proves_what_a_compiled_graph_makes_of_it(cards):
    table = torch.arange(40.0).neg()[None]
    q = torch.randn(3, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0))

    def attend(q: Any, k: Any, v: Any) -> Any:
        layout = lw.layout(40)
        return lw.attend(
            q, k, v, layout=layout, bias=lw.DistanceBias(table, layout.query, layout.key), backend="triton"
        )

    expected = attend(*q)
    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(*q), expected)


def test_rows_behind_the_last_do_not_meet_a_bias_of_minus_infinity():
    call = steep(40, 40, kind="table")
    hidden = torch.zeros(1, 40)
    hidden[:, 8:] = -torch.inf
    layout = lw.layout(40)
    q, k, v = (x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v))
    bias = lw.DistanceBias(hidden, layout.query, layout.key)
    out = lw.attend(q, k, v, layout=layout, bias=bias, logit_scale=torch.ones(q.shape[:3]), backend="triton")
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.skipif(not turn, reason="behind prove")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case in pairwise()], ids=lambda case: "-".join(map(str, case))
)
def test_the_kernels_prove_themselves(case, monkeypatch):
    # As short as several of the interpreter's tiles: at the length of a card all cases would take days.
    monkeypatch.setattr(self_test, "MANY", ((131, 131),))
    monkeypatch.setattr(self_test, "FEW", ((3, 131),))
    assert self_test.judge(case.kind, torch.device("cpu"), by_own_kernels, passes.skips) is None


def test_a_kind_is_read_back_from_its_text():
    for case in pairwise():
        assert self_test.Kind.of_text(case.kind.text) == case.kind
