"""What test_triton.py runs in a process of its own, where Triton interprets its kernels on the CPU."""

import os
from typing import Any

import pytest
import torch
from random_calls import RandomCall, accepts, judge, random_call, run_backend
from tiles_case import operator_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from triton_harness import poisoned, shuffled

import lengthwise as lw
from lengthwise.attention import checked_call
from lengthwise.attention.triton import TritonPlan, passes, plan, tiles
from lengthwise.bias import doubled_sums

assert os.environ["TRITON_INTERPRET"] == "1"
FIRST, LAST = (int(end) for end in os.environ.get("LENGTHWISE_TRITON_SEEDS", "0 40").split())
FLOOR = 0.35
"""Of all random calls at least so many must be taken: the others have rescores, explicit masks or other biases."""

FORBIDDEN = (
    *("scatter_add", "scatter_reduce", "index_add", "index_put", "index_reduce", "put_", "bincount", "histc"),
    *("embedding_dense_backward", "kthvalue", "median", "masked_scatter", "histogram", "index_copy"),
)
"""What torch lists as dependent on the order of threads on CUDA; cumsum is on the list for floating-point numbers."""


def taken(seeds: range) -> list[RandomCall]:
    return [call for call in map(random_call, seeds) if accepts(call, "triton")]


@pytest.mark.parametrize("seed", [214, 355], ids=["both parts of a level are learned", "lines without a key"])
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
    for call in learned_calls(4):
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
        return function(*args, **(kwargs or {}))


def test_no_operation_on_the_road_depends_on_the_order_of_threads():
    for call in learned_calls(6):
        tensors = {name: leaf.base.detach().requires_grad_(name in call.learned) for name, leaf in call.leaves.items()}
        if any(leaf.view[0] != "plain" for leaf in call.leaves.values()):
            continue
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


def test_levels_are_as_exact_at_a_billion_as_at_zero():
    q, k, v = torch.randn(3, 1, 1, 50, 16)
    levels = torch.rand(1, 1, 50, dtype=torch.float64).cumsum(2)
    near, far = (
        lw.attend(q, k, v, bias=lw.LevelBias(x, x, torch.ones(1, 1, 1)), backend="triton")
        for x in (levels, levels + 1e9)
    )
    assert torch.allclose(near, far, atol=2e-6)


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
    ],
)
def test_what_it_cannot_take_is_refused_in_words(options, words):
    q, k, v = torch.randn(3, 1, 1, 5, options.get("dim", 16), dtype=options.get("dtype", torch.float32))
    bias = lw.DenseBias(torch.zeros(1, 1, 5, 5)) if "bias" in options else None
    with pytest.raises(NotImplementedError, match=words):
        lw.attend(q, k, v, bias=bias, backend="triton")
