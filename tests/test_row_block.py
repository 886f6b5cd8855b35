"""row_block agrees with the reference for every kind of bias and mask, eager, compiled and exported."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiles_case import HEADS, KINDS, SITUATIONS, VALUE, Case, assert_as_exact, cut_small, make_case, results
from torch import Tensor

from lengthwise.attention import reference, row_block
from lengthwise.attention.call import Call
from lengthwise.attention.row_block import few_rows, operators
from lengthwise.bias import FunctionBias

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

    def forward(self, *given: Tensor) -> Tensor:
        return row_block.attend(self.case.of(dict(zip(self.case.tensors, given, strict=True))))


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_reference(kind, situation):
    assert_as_exact(make_case(kind, situation))


@pytest.mark.parametrize("keys", [1, 2, 63, 64, 307])
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_works(kind, keys):
    assert_as_exact(make_case(kind, "causal", keys))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_good_as_the_reference(kind, dtype):
    assert_as_exact(make_case(kind), dtype)


def relative_errors(kind: str, dtype: torch.dtype) -> Tensor:
    """How far output and gradients of q, k and v in this precision are from float64's, relative to them."""
    case = make_case(kind, "few", keys=2_053, batch=1).rounded(dtype)
    d_out = torch.randn(1, HEADS, case.tensors["q"].shape[2], VALUE).to(dtype)
    roads = (reference.attend, torch.float64), (row_block.attend, dtype)
    exact, found = (results(attend, *case.call(precision), d_out)[:4] for attend, precision in roads)
    return torch.stack([(x - truth).norm() / truth.norm() for x, truth in zip(found, exact, strict=True)])


@pytest.mark.parametrize("dtype", HALF)
def test_beyond_2048_keys_half_precision_errs_at_most_twice_as_much_as_without_bias(dtype, monkeypatch):
    cut_small(monkeypatch, 128, 512)
    plain = relative_errors("none", dtype)
    for kind in KINDS:
        assert (relative_errors(kind, dtype) <= 2 * plain).all(), kind


@pytest.mark.parametrize("situation", ["causal", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_derivatives(kind, situation, monkeypatch):
    cut_small(monkeypatch, 4, 5)
    case = make_case(kind, situation, keys=7, batch=1)

    def attend(*given: Tensor) -> Tensor:
        return row_block.attend(case.of(case.tensors | dict(zip(case.floating, given, strict=True))))

    doubles = [case.tensors[name].double().requires_grad_() for name in case.floating]
    assert torch.autograd.gradcheck(attend, doubles, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_twice_is_bitwise_equal(kind):
    call, learned = make_case(kind, keys=307).call(torch.float32)
    d_out = torch.randn(2, HEADS, 307, VALUE)
    for one, other in zip(*(results(row_block.attend, call, learned, d_out) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_call_is_one_graph_and_bitwise_equal(kind):
    torch.compiler.reset()
    case = make_case(kind, keys=41)
    d_out = torch.randn(2, HEADS, 41, VALUE)
    found = []
    for run in (Attend(case), torch.compile(Attend(case), backend="aot_eager", fullgraph=True)):
        given = {name: x.clone().requires_grad_(name in case.floating) for name, x in case.tensors.items()}
        out = run(*given.values())
        found.append([out.detach(), *torch.autograd.grad(out, [given[name] for name in case.floating], d_out)])
    for one, other in zip(*found, strict=True):
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
        assert torch.equal(program.module()(*case.tensors.values()), Attend(case)(*case.tensors.values()))


@pytest.mark.parametrize("kind", ["none", "strip", "level", "dense"])
def test_the_operators_keep_their_promises(kind):
    call, _ = make_case(kind, keys=21).call(torch.float64)
    name, first, tensors = operators._taken_apart(call.bias)
    masks = operators.Masks(None, None, None)
    plain = operators.Plain(name, "", first, causal=True, window=None, scale=call.scale, start=0, skip=True)
    args = call.q, call.k, call.v, tensors, *masks, *plain
    torch.library.opcheck(torch.ops.lengthwise.row_block.default, args)


def without_name(call: Call) -> Call:
    """The same call with a tile function that nobody registered."""
    assert isinstance(call.bias, FunctionBias)
    named = call.bias.function

    def unnamed(*given: Any) -> Tensor:
        return named(*given)

    return replace(call, bias=FunctionBias(unnamed, call.bias.tensors))


def test_a_function_without_a_name_gives_what_a_registered_one_gives():
    call, learned = make_case("function").call(torch.float32)
    d_out = torch.randn(2, HEADS, 101, VALUE)
    found = [results(row_block.attend, own, learned, d_out) for own in (call, without_name(call))]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_function_without_a_name_is_refused_where_a_graph_has_to_name_it(monkeypatch):
    call, _ = make_case("function").call(torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not row_block.objections(call)
    (objection,) = row_block.objections(without_name(call))
    assert "decorate unnamed with registered" in objection


@pytest.mark.parametrize("kind", [*KINDS, UNNAMED])
def test_a_second_derivative_is_refused_and_not_wrong(kind):
    call, (q, *_) = make_case("function" if kind == UNNAMED else kind, keys=41).call(torch.float32)
    out = row_block.attend(without_name(call) if kind == UNNAMED else call)
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'second derivative was asked for. Use backend="reference"'):
        d_q.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_does_not_leak(kind):
    call, _ = make_case(kind).call(torch.float32, grad=False)
    other = replace(call, k=call.k.clone(), v=call.v.clone(), q=call.q.clone())
    other.k[:, :, -1], other.v[:, :, -1], other.q[:, :, -1] = torch.inf, torch.nan, 1e30
    with row_block.skipping(False):
        assert torch.equal(row_block.attend(call)[:, :, :-1], row_block.attend(other)[:, :, :-1])
        assert row_block.attend(other)[:, :, -1].isnan().all()


@pytest.mark.parametrize("situation", ["causal", "padding", "start", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_query_takes_the_short_way(kind, situation, monkeypatch):
    monkeypatch.setattr(few_rows, "FEW", 100)
    call, _ = make_case(kind, situation, keys=3).call(torch.float32, grad=False)
    assert few_rows.suits(call)
    torch.testing.assert_close(row_block.attend(call), reference.attend(call))


class Mixing(torch.nn.Module):
    """Scores of all heads mixed, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.randn(HEADS, HEADS) / 3)

    def rescore(self, content: Tensor, bias: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        return content + bias + torch.einsum("bhij,hg->bgij", (content + bias).masked_fill(~mask, 0), self.mix)


@pytest.mark.parametrize("kind", ["none", "strip", "level", "function", "dense"])
def test_rescored_attention_is_that_of_the_reference(kind, monkeypatch):
    monkeypatch.setattr(row_block.rescoring, "SCORES", 2 * HEADS * 101 * 30)
    mixing = Mixing().double()
    call, learned = make_case(kind).call(torch.float64)
    call = replace(call, rescore=mixing.rescore)
    d_out = torch.randn(2, HEADS, 101, VALUE, dtype=torch.float64)
    found = [results(attend, call, [*learned, mixing.mix], d_out) for attend in (reference.attend, row_block.attend)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
