"""Half precision over a whole long pass: a bias costs no more of it than twice what attention without one loses."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import lengthwise as lw
from lengthwise.attention import BACKENDS, checked_call
from lengthwise.attention.backend import Refusal

HEADS, DIM, WIDTH, LATE = 2, 32, 64, 8


def inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM).to(dtype) for _ in range(3)]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out[:, :, -LATE:].double() - exact).norm() / exact.norm())


def late_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: lw.Bias | None) -> torch.Tensor:
    """The last rows in float64, of the same rounded inputs."""
    return lw.explain(q[:, :, -LATE:].double(), k.double(), v.double(), bias=bias).out


@cache
def plain_error(length: int, dtype: torch.dtype) -> float:
    """What torch's own attention without a bias loses on the same inputs."""
    q, k, v = inputs(length, dtype)
    return relative_error(F.scaled_dot_product_attention(q, k, v, is_causal=True), late_rows(q, k, v, None))


@pytest.mark.prove
@pytest.mark.parametrize("backend", ["native", "row_block", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [8_192, 32_768])
@pytest.mark.parametrize("name", ["t5", "kerple", "alibi", "cable", "fox", "fire", "k-cable"])
def test_a_bias_loses_at_most_twice_what_attention_without_one_does(name, length, dtype, backend):
    q, k, v = inputs(length, dtype)
    encoding = lw.make(name, heads=HEADS, width=WIDTH, head_dim=DIM, train_length=length)
    x = torch.randn(1, length, WIDTH)
    with torch.no_grad():
        call = checked_call(q, k, v, bias=encoding.bias(x, lw.layout(length)))
        plan = BACKENDS[backend].plan(call)
        if isinstance(plan, Refusal) or (backend == "sdpa" and not isinstance(call.bias, lw.LevelBias)):
            pytest.skip(f"{backend} does not take it, or only filled in")
        late = encoding.bias(x[:, -LATE:], lw.layout(LATE, past=length - LATE), encoding.state(x))
        biased = relative_error(BACKENDS[backend].run(call, plan)[0], late_rows(q, k, v, late))
    assert biased <= 2 * plain_error(length, dtype)
