"""Every encoding compiles into one graph, and the graph gives what eager gives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lengthwise as lw
from lengthwise.testing import RELATIVE, Subject, assert_near

ONE_OF_EACH_KIND = ["alibi", "kerple", "k-cable", "none", "cable", "fire", "cope"]
FIRST = ["kerple", "cable", "cope"]
"""A table, levels, and a rescore; the rest of the graph is alike."""


def first(names, chosen):
    """The names, those that were not chosen behind prove."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.prove) for name in names]


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()


def assert_compiled_equals_eager(name: str, backend: str, lengths: tuple[int, ...] = (21,)) -> None:
    subject = Subject(name, backend="auto")
    layer = subject.layer()
    learned = dict(layer.named_parameters())
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=len(lengths) > 1 or None)
    for length in lengths:
        x = subject.tokens(length)
        found, expected = compiled(x), layer(x)
        assert_near(found, expected, "output")
        assert_gradients_near(found, expected, learned)


def assert_gradients_near(found: torch.Tensor, expected: torch.Tensor, learned: dict[str, torch.Tensor]) -> None:
    ours, theirs = (torch.autograd.grad(out.square().sum(), list(learned.values())) for out in (found, expected))
    # A gradient may cancel to nothing (FIRE's last bias shifts all scores alike), so the largest one is the scale.
    scale = torch.stack([gradient.abs().max() for gradient in theirs]).max()
    for parameter, a, b in zip(learned, ours, theirs, strict=True):
        assert (a - b).abs().max() <= RELATIVE * scale, parameter


# Whole models of all encodings are compiled in test_model_citizen.py.
@pytest.mark.parametrize("name", first(lw.ENCODINGS, ONE_OF_EACH_KIND))
def test_every_encoding_compiles_into_one_graph_forward_and_backward(name):
    assert_compiled_equals_eager(name, "aot_eager")


@pytest.mark.parametrize("name", first(ONE_OF_EACH_KIND, FIRST))
def test_inductor_agrees_with_eager_once_per_kind_of_bias_at_every_length(name):
    assert_compiled_equals_eager(name, "inductor", (21, 30))


def assert_attend_alone_compiles(name: str, lengths: tuple[int, ...]) -> None:
    encoding = lw.make(name, heads=12, width=192)
    learned = dict(encoding.named_parameters())

    def attend(x: torch.Tensor) -> torch.Tensor:
        layout = lw.layout(x)
        q = x.unflatten(-1, (12, 16)).transpose(1, 2)
        return lw.attend(q, q, q, layout=layout, bias=encoding.bias(x, layout), rescore=encoding.rescore(x, layout))

    compiled = torch.compile(attend, backend="inductor", fullgraph=True, dynamic=True)
    for length in lengths:
        x = torch.randn(2, length, 192, requires_grad=True)
        found, expected = compiled(x), attend(x)
        assert_near(found, expected, "output")
        assert_gradients_near(found, expected, {"x": x} | learned)


@pytest.mark.parametrize("name", first(["dape", "dapev2"], ["dapev2"]))
def test_inductor_trains_a_network_along_the_heads_without_harm_to_memory(name):
    # In a process of its own: where inductor compiled that network itself, memory was corrupted and the process died.
    script = "import sys; sys.path.insert(0, sys.argv[1]); from test_compile import *; "
    step = "assert_attend_alone_compiles(sys.argv[2], (33, 40))"
    command = [sys.executable, "-c", script + step, str(Path(__file__).parent), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]


def test_skipping_is_decided_where_a_graph_runs_and_not_where_it_was_compiled():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 601, 8)
    levels, slope = torch.arange(601).double()[None, None], torch.full((1, 2, 1), 0.9)

    def steep(q: torch.Tensor) -> torch.Tensor:
        return lw.attend(q, k, v, bias=lw.LevelBias(levels, levels, slope), backend="row_block")

    compiled = torch.compile(steep, backend="aot_eager", fullgraph=True)
    for on in (True, False):
        with lw.skipping(on):
            assert torch.equal(compiled(q), steep(q))


def test_a_compiled_table_stops_at_run_time_where_positions_have_gaps():
    kerple = lw.make("kerple", heads=3, width=24)

    def filled_in(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return kerple.bias(x, lw.TokenLayout.of(positions)).dense()

    compiled = torch.compile(filled_in, backend="aot_eager", fullgraph=True)
    x = torch.zeros(1, 5, 24)
    assert torch.equal(compiled(x, torch.arange(5)), filled_in(x, torch.arange(5)))
    with pytest.raises(RuntimeError, match="gaps"):
        compiled(x, 100 * torch.arange(5))
