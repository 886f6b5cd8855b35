"""Every encoding compiles into one graph, and the graph gives what eager gives."""

import pytest
import torch

import lengthwise as lw
from lengthwise.testing import RELATIVE, Subject, assert_near

ONE_OF_EACH_KIND = ["alibi", "kerple", "k-cable", "none"]


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()


def assert_compiled_equals_eager(name: str, backend: str) -> None:
    subject = Subject(name, backend="auto", length=21)
    layer, x = subject.layer(), subject.tokens()
    learned = dict(layer.named_parameters())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    found, expected = compiled(x), layer(x)
    assert_near(found, expected, "output")
    ours, theirs = (torch.autograd.grad(out.square().sum(), list(learned.values())) for out in (found, expected))
    # A gradient may cancel to nothing (FIRE's last bias shifts all scores alike), so the largest one is the scale.
    scale = torch.stack([gradient.abs().max() for gradient in theirs]).max()
    for parameter, a, b in zip(learned, ours, theirs, strict=True):
        assert (a - b).abs().max() <= RELATIVE * scale, parameter


@pytest.mark.parametrize("name", lw.ENCODINGS)
def test_every_encoding_compiles_into_one_graph_forward_and_backward(name):
    assert_compiled_equals_eager(name, "aot_eager")


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_inductor_agrees_with_eager_once_per_kind_of_bias(name):
    assert_compiled_equals_eager(name, "inductor")


def test_a_compiled_table_stops_at_run_time_where_positions_have_gaps():
    kerple = lw.make("kerple", heads=3, width=24)
    compiled = torch.compile(lambda x, p: kerple.bias(x, p, p).dense(), backend="aot_eager", fullgraph=True)
    x = torch.zeros(1, 5, 24)
    assert torch.equal(compiled(x, torch.arange(5)), kerple.bias(x, torch.arange(5), torch.arange(5)).dense())
    with pytest.raises(RuntimeError, match="gaps"):
        compiled(x, 100 * torch.arange(5))
