"""Rescored calls are one node as well: output, log-sum-exp and all gradients are the reference's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiles_case import DIM, HEADS, Tensors, by_reference, by_row_block, cut_small, make_case, results, upstream
from torch import Tensor

from lengthwise.attention import call as calls
from lengthwise.attention import row_block
from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block import passes
from lengthwise.bias import registered
from lengthwise.rescore import ContextualPositions, HeadNetwork, Rescore, ScoreFunction

KEYS = 101


@registered
def mixed(content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice, mix: Tensor) -> Tensor:
    """Scores of all heads mixed, and a little of every key's own length."""
    both = (content + bias).masked_fill(~mask, 0)
    return both + torch.einsum("bhij,hg->bgij", both, mix) + k.square().mean(-1)[:, :, None] * q.mean(-1)[..., None]


def unnamed(*given: Any) -> Tensor:
    return mixed(*given)


RESCORES: dict[str, tuple[Callable[[], Tensors], Callable[[Tensors], Rescore]]] = {
    "network": (lambda: network(1), lambda t: HeadNetwork(t["into"], t["bias_in"], t["out_of"], t["bias_out"])),
    "network with neighbours": (
        lambda: network(3),
        lambda t: HeadNetwork(t["into"], t["bias_in"], t["out_of"], t["bias_out"]),
    ),
    "contextual positions": (lambda: {"positions": torch.randn(DIM, 9)}, lambda t: ContextualPositions(t["positions"])),
    "function": (lambda: {"mix": torch.randn(HEADS, HEADS) / 3}, lambda t: ScoreFunction(mixed, (t["mix"],))),
    "function without a name": (
        lambda: {"mix": torch.randn(HEADS, HEADS) / 3},
        lambda t: ScoreFunction(unnamed, (t["mix"],)),
    ),
}


def network(kernel: int) -> Tensors:
    return {
        "into": torch.randn(11, 2 * HEADS, kernel) / 3,
        "bias_in": torch.randn(11),
        "out_of": torch.randn(HEADS, 11, kernel) / 3,
        "bias_out": torch.randn(HEADS),
    }


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    cut_small(monkeypatch)
    monkeypatch.setattr(passes, "BLOCK_SCORES", 2 * HEADS * KEYS * 30)


def rescored(name: str, kind: str, situation: str, dtype: torch.dtype) -> tuple[AttentionCall, list[Tensor]]:
    make_tensors, make_rescore = RESCORES[name]
    case = make_case(kind, situation, KEYS)
    tensors = {key: x.to(dtype).requires_grad_() for key, x in make_tensors().items()}
    call, learned = case.call(dtype)
    return replace(call, rescore=make_rescore(tensors)), [*learned, *tensors.values()]


@pytest.mark.parametrize("kind", ["none", "strip", "level", "function", "dense", "sum"])
@pytest.mark.parametrize("name", RESCORES)
def test_rescored_attention_is_that_of_the_reference(name, kind):
    call, learned = rescored(name, kind, "causal", torch.float64)
    above = upstream(make_case(kind))
    for one, other in zip(*(results(x, call, learned, *above) for x in (by_reference, by_row_block)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "situation", ["padding", "documents", "mask", "bands", "few", "start", "grouped", "all options"]
)
@pytest.mark.parametrize("name", RESCORES)
def test_rescored_attention_is_that_of_the_reference_in_every_situation(name, situation):
    call, learned = rescored(name, "strip", situation, torch.float64)
    above = upstream(make_case("strip", situation))
    for one, other in zip(*(results(x, call, learned, *above) for x in (by_reference, by_row_block)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", RESCORES)
def test_what_is_not_finite_stays_in_the_rows_that_see_it(name):
    call, learned = rescored(name, "strip", "causal", torch.float64)
    with torch.no_grad():
        call.k[0, 0, 60, 1], call.v[1, 1, 70, 0] = torch.inf, torch.nan
    above = upstream(make_case("strip"))
    for one, other in zip(*(results(x, call, learned, *above) for x in (by_reference, by_row_block)), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("name", RESCORES)
def test_a_few_rescored_queries_are_done_as_whole_rows(name, monkeypatch):
    call, _ = rescored(name, "level", "grouped", torch.float64)
    monkeypatch.setattr(calls, "FEW_QUERIES", 200)
    with torch.no_grad():
        plan = row_block.plan(call)
        assert isinstance(plan, row_block.RowBlockPlan)
        assert plan.whole_rows
        for one, other in zip(by_reference(call), by_row_block(call), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", [name for name in RESCORES if name != "function without a name"])
def test_a_compiled_rescored_call_is_one_node_and_bitwise_equal(name):
    torch.compiler.reset()
    make_tensors, make_rescore = RESCORES[name]
    case, own = make_case("strip", keys=41), make_tensors()
    above, nodes = upstream(case), []

    def attend(tensors: Tensors) -> tuple[Tensor, Tensor]:
        return by_row_block(replace(case.of(tensors), rescore=make_rescore(tensors)))

    def counting(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nodes.extend(str(node.target) for node in module.graph.nodes if "lengthwise" in str(node.target))
        return module

    both = []
    for run in (attend, torch.compile(attend, backend=counting, fullgraph=True)):
        given = {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in (case.tensors | own).items()}
        out, lse = run(given)
        learned = [x for x in given.values() if x.requires_grad]
        both.append([out.detach(), lse.detach(), *torch.autograd.grad([out, lse], learned, above)])
    assert len(nodes) == 1
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_a_score_function_without_a_name_is_refused_where_a_graph_has_to_name_it(monkeypatch):
    call, _ = rescored("function without a name", "none", "causal", torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    refusal = row_block.plan(call)
    assert isinstance(refusal, Refusal)
    assert "decorate unnamed with lw.registered" in refusal.reasons[0]


@pytest.mark.parametrize("name", RESCORES)
def test_gradients_of_a_table_are_the_same_every_time_with_several_threads(name):
    call, learned = rescored(name, "gaps", "causal", torch.float32)
    above = upstream(make_case("gaps"))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = (results(by_row_block, call, learned, *above) for _ in range(4))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", RESCORES)
def test_a_second_derivative_is_refused_and_not_wrong(name):
    call, (q, *_) = rescored(name, "strip", "causal", torch.float32)
    out, _ = by_row_block(call)
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'second derivative was asked for. Use backend="reference"'):
        d_q.sum().backward()
