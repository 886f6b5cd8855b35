"""row_block agrees with the reference for every kind of bias and mask, eager, compiled and exported."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiles_case import (
    HEADS,
    KINDS,
    SITUATIONS,
    Case,
    assert_as_exact,
    assert_lse_as_exact,
    by_reference,
    by_row_block,
    cut_small,
    make_case,
    operator_arguments,
    results,
    upstream,
)
from torch import Tensor

from lengthwise.attention import call as calls
from lengthwise.attention import row_block, skipping
from lengthwise.attention.backend import Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.bias import DistanceBias, FunctionBias, LevelBias
from lengthwise.token_layout import TokenLayout

HALF = [torch.bfloat16, torch.float16]
UNNAMED = "function without a name"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    cut_small(monkeypatch)


class Attend(torch.nn.Module):
    """A case as a function of its tensors in order."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        return by_row_block(self.case.of(dict(zip(self.case.tensors, given, strict=True))))


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_reference(kind, situation):
    assert_as_exact(make_case(kind, situation))


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_the_log_sum_exp_are_those_of_the_reference(kind, situation):
    assert_lse_as_exact(make_case(kind, situation))


@pytest.mark.parametrize("keys", [1, 2, 63, 64, 307])
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_works(kind, keys):
    assert_as_exact(make_case(kind, "causal", keys))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_good_as_the_reference(kind, dtype):
    assert_as_exact(make_case(kind), dtype)


@pytest.mark.parametrize("situation", ["sink", "softcap", "logit scale", "all options"])
def test_options_in_half_precision_are_as_good_as_the_reference(situation):
    assert_as_exact(make_case("strip", situation), torch.bfloat16)


def relative_errors(kind: str, dtype: torch.dtype) -> Tensor:
    """How far output and gradients of q, k and v in this precision are from float64's, relative to them."""
    case = make_case(kind, "few", keys=2_053, batch=1).rounded(dtype)
    d_out, _ = upstream(case)
    roads = (by_reference, torch.float64), (by_row_block, dtype)
    exact, found = (results(attend, *case.call(precision), d_out.to(dtype)) for attend, precision in roads)
    out_q_k_v = (0, 2, 3, 4)
    return torch.stack([(found[i] - exact[i]).norm() / exact[i].norm() for i in out_q_k_v])


NUMBERS = [kind for kind in KINDS if kind not in ("one-head strip", "one-head dense", "level in two", "sum")]
"""The kinds that differ in how their numbers are made."""


HALVES = [
    pytest.param(dtype, NUMBERS[part::2], marks=[] if i == part else pytest.mark.prove, id=f"{dtype}-{part}")
    for i, dtype in enumerate(HALF)
    for part in (0, 1)
]
"""Every kind in one of the two precisions, and behind prove in the other."""


@pytest.mark.parametrize(("dtype", "kinds"), HALVES)
def test_beyond_2048_keys_half_precision_errs_at_most_twice_as_much_as_without_bias(dtype, kinds, monkeypatch):
    cut_small(monkeypatch, 128, 512)
    plain = relative_errors("none", dtype)
    for kind in kinds:
        assert (relative_errors(kind, dtype) <= 2 * plain).all(), kind


@pytest.mark.parametrize("situation", ["causal", "everything", "all options"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "level in two"])
def test_gradients_are_derivatives(kind, situation, monkeypatch):
    cut_small(monkeypatch, 4, 5)
    case = make_case(kind, situation, keys=7, batch=1)

    def attend(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = by_row_block(case.of(case.tensors | dict(zip(case.floating, given, strict=True))))
        return out, lse.masked_fill(lse == -torch.inf, 0)

    doubles = [case.tensors[name].double().requires_grad_() for name in case.floating]
    assert torch.autograd.gradcheck(attend, doubles, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_twice_is_bitwise_equal(kind):
    case = make_case(kind, keys=307)
    above = upstream(case)
    for one, other in zip(*(results(by_row_block, *case.call(torch.float32), *above) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["gaps", "lines", "level", "sum"])
def test_with_several_threads_gradients_are_the_same_every_time(kind):
    case = make_case(kind, keys=307)
    above = upstream(case)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = (results(by_row_block, *case.call(torch.float32), *above) for _ in range(4))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


COMPILED = [(kind, "causal") for kind in KINDS] + [("level", "all options"), ("strip", "bands"), ("none", "mask")]


@pytest.mark.parametrize(("kind", "situation"), COMPILED)
def test_a_compiled_call_is_one_graph_and_bitwise_equal(kind, situation):
    torch.compiler.reset()
    case = make_case(kind, situation, keys=41)
    above = upstream(case)
    both = []
    for run in (Attend(case), torch.compile(Attend(case), backend="aot_eager", fullgraph=True)):
        given = {name: x.clone().requires_grad_(name in case.floating) for name, x in case.tensors.items()}
        out, lse = run(*given.values())
        gradients = torch.autograd.grad([out, lse], [given[name] for name in case.floating], above)
        both.append([out.detach(), lse.detach(), *gradients])
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_call_is_one_node_and_takes_every_length(kind, strict):
    short, long = (make_case(kind, keys=keys) for keys in (41, 67))
    length = torch.export.Dim("length")
    pairs = zip(short.tensors.values(), long.tensors.values(), strict=True)
    grows = tuple({axis: length for axis in range(x.ndim) if x.shape[axis] != y.shape[axis]} for x, y in pairs)
    given = tuple(short.tensors.values())
    program = torch.export.export(Attend(short), given, dynamic_shapes={"given": grows}, strict=strict)
    assert sum("row_block" in str(node.target) for node in program.graph.nodes) == 1
    for case in (short, long):
        exported, eager = program.module()(*case.tensors.values()), Attend(case)(*case.tensors.values())
        assert all(torch.equal(a, b) for a, b in zip(exported, eager, strict=True))


@pytest.mark.parametrize(
    ("kind", "situation"),
    [("none", "causal"), ("strip", "everything"), ("level", "all options"), ("dense", "bands"), ("lines", "start")],
)
def test_the_operators_keep_their_promises(kind, situation):
    call, _ = make_case(kind, situation, keys=21).call(torch.float64)
    torch.library.opcheck(torch.ops.lengthwise.row_block.default, operator_arguments(call))


def without_name(call: AttentionCall) -> AttentionCall:
    """The same call with a function that nobody registered."""
    assert isinstance(call.bias, FunctionBias)
    named = call.bias.function

    def unnamed(*given: Any) -> Tensor:
        return named(*given)

    return replace(call, bias=FunctionBias(unnamed, call.bias.arguments))


def test_a_function_without_a_name_gives_what_a_registered_one_gives():
    case = make_case("function")
    call, learned = case.call(torch.float32)
    above = upstream(case)
    both = [results(by_row_block, own, learned, *above) for own in (call, without_name(call))]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_a_function_without_a_name_is_refused_where_a_graph_has_to_name_it(monkeypatch):
    call, _ = make_case("function").call(torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not isinstance(row_block.plan(call), Refusal)
    refusal = row_block.plan(without_name(call))
    assert isinstance(refusal, Refusal)
    assert "decorate unnamed with lw.registered" in refusal.reasons[0]


@pytest.mark.parametrize("kind", [*KINDS, UNNAMED])
def test_a_second_derivative_is_refused_and_not_wrong(kind):
    call, (q, *_) = make_case("function" if kind == UNNAMED else kind, keys=41).call(torch.float32)
    out, lse = by_row_block(without_name(call) if kind == UNNAMED else call)
    (d_q,) = torch.autograd.grad(out.sum() + lse.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'second derivative was asked for. Use backend="reference"'):
        d_q.sum().backward()


@pytest.mark.parametrize("situation", ["causal", "all options"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_future_does_not_leak(kind, situation):
    call, _ = make_case(kind, situation).call(torch.float32, grad=False)
    other = replace(call, k=call.k.clone(), v=call.v.clone(), q=call.q.clone())
    other.k[:, :, -1], other.v[:, :, -1], other.q[:, :, -1] = torch.inf, torch.nan, 1e30
    with skipping(False):
        before, after = by_row_block(replace(call, skip=False)), by_row_block(replace(other, skip=False))
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, :-1], y[:, :, :-1])
        assert y[:, :, -1].isnan().all()


def test_what_is_not_finite_stays_in_the_rows_that_see_it_with_gradients_of_the_rest():
    case = make_case("level", "window")
    case.tensors["k"][0, 1, 40, 2], case.tensors["v"][1, 2, 60, 0] = torch.nan, torch.inf
    above = upstream(case)
    ours, theirs = (results(attend, *case.call(torch.float64), *above) for attend in (by_row_block, by_reference))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_under_a_mask_by_head_what_is_not_finite_stays_in_the_rows_that_see_it_where_heads_share_keys():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 41, 7), torch.randn(2, 2, 41, 7), torch.randn(2, 2, 41, 5)
    k[0, 1, 20] = torch.nan
    layout = TokenLayout.of(torch.arange(41), mask=torch.rand(2, 4, 41, 41) < 0.5)
    call = calls.checked_call(q, k, v, layout=layout)
    for one, other in zip(by_row_block(call), by_reference(call), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 9), (9, 0)])
@pytest.mark.parametrize("sink", [False, True])
def test_calls_without_queries_or_keys_are_empty_or_0(queries, keys, sink):
    q, k, v = (torch.randn(2, HEADS, n, 7, requires_grad=True) for n in (queries, keys, keys))
    query, key = torch.arange(queries)[None], torch.arange(keys)[None]
    table = torch.randn(HEADS, 5, requires_grad=True)
    layout = TokenLayout.of(query, key, causal=False)
    extras = {"sink": torch.randn(HEADS)} if sink else {}
    call = calls.checked_call(q, k, v, layout=layout, bias=DistanceBias(table, query, key), **extras)
    above = torch.randn(2, HEADS, queries, 7), torch.randn(2, HEADS, queries)
    ours, theirs = (results(attend, call, [q, k, v], *above) for attend in (by_row_block, by_reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_sees_nothing_is_0_with_lse_minus_infinity_and_no_gradient(kind):
    case = make_case(kind, keys=41)
    case.masks["key_mask"] = torch.arange(41)[None] >= 9
    d_out, d_lse = upstream(case)
    call, (q, *others) = case.call(torch.float32)
    out, lse, d_q, *gradients = results(by_row_block, call, [q, *others], d_out, d_lse)
    assert (out[:, :, :9] == 0).all()
    assert (lse[:, :, :9] == -torch.inf).all()
    assert (d_q[:, :, :9] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("few", [0, 100])
def test_a_row_that_sees_nothing_has_exactly_its_sink_as_lse(few, monkeypatch):
    monkeypatch.setattr(calls, "FEW_QUERIES", few)
    case = make_case("level", "sink", keys=41)
    case.masks["key_mask"] = torch.arange(41)[None] >= 9
    out, lse = by_row_block(case.call(torch.float32, grad=False)[0])
    assert (out[:, :, :9] == 0).all()
    assert torch.equal(lse[:, :, :9], case.tensors["sink"][:, None].expand(2, HEADS, 9))


@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_a_sink_far_from_all_scores_neither_overflows_nor_vanishes(sink):
    case = make_case("strip", "sink")
    case.tensors["sink"] = torch.full((HEADS,), sink)
    assert_as_exact(case)
    assert_lse_as_exact(case)


def test_steps_that_were_not_summed_yet_have_gradients():
    torch.manual_seed(0)
    step = torch.rand(1, HEADS, 61)
    q, k, v = torch.randn(3, 1, HEADS, 61, 7)
    found = []
    for attend in (by_reference, by_row_block):
        own = step.clone().requires_grad_()
        with torch.no_grad():
            bias = LevelBias.of_steps(own, torch.full((1, HEADS, 1), 0.3), start=0, queries=61)
        assert bias.step is own
        call = calls.checked_call(q, k, v, bias=bias)
        out, lse = attend(call)
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum() + lse.sum(), own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_queries_are_done_as_whole_rows(kind, situation, monkeypatch):
    monkeypatch.setattr(calls, "FEW_QUERIES", 100)
    call, _ = make_case(kind, situation, keys=23).call(torch.float32, grad=False)
    plan = row_block.plan(call)
    assert isinstance(plan, row_block.RowBlockPlan)
    assert plan.whole_rows
    for found, wanted in zip(by_row_block(call), by_reference(call), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("situation", ["causal", "padding", "mask", "bands", "grouped"])
def test_whole_rows_keep_what_is_not_finite_to_the_rows_that_see_it(situation, monkeypatch):
    monkeypatch.setattr(calls, "FEW_QUERIES", 100)
    case = make_case("strip", situation, keys=23)
    case.tensors["k"][:, -1, 11], case.tensors["v"][:, 0, 17, 2] = torch.inf, torch.nan
    call, _ = case.call(torch.float32, grad=False)
    wanted = by_reference(call)
    assert wanted[0].isnan().any()
    assert not wanted[0].isnan().all()
    for found, expected in zip(by_row_block(call), wanted, strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
