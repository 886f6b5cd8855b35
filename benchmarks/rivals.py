"""The ways to compute one job: attention under an encoding, its bias built from positions or tokens each time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from job import DIM, HEADS
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from x_transformers.attend import Attend
from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

import lengthwise as lw
from lengthwise.attention import AttentionCall, checked_call
from lengthwise.attention.backend import Refusal
from lengthwise.attention.flex import plan as flex_plan
from lengthwise.attention.flex import run as flex_run
from lengthwise.encodings.alibi import Alibi
from lengthwise.encodings.kerple import KerpleLog
from lengthwise.encodings.t5 import T5

DENSE_UP_TO = 4096
AT_FULL_LENGTH = (Alibi, KerpleLog, T5)
"""Filled in, one bias costs what another costs: at the greatest length these stand for all."""


@dataclass(frozen=True)
class Setup:
    """One job's inputs: unit-variance q, k, v, layer-normed tokens, the encoding at its initial parameters."""

    encoding: lw.Encoding
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layout: lw.TokenLayout

    def bias(self) -> lw.Bias:
        """Built anew, as a model does in every forward pass."""
        bias = self.encoding.bias(self.x, self.layout)
        assert bias is not None
        return bias

    def call(self) -> AttentionCall:
        """The job as our own."""
        return checked_call(self.q, self.k, self.v, layout=self.layout, bias=self.bias())

    def learned(self, biased: bool) -> list[Tensor]:
        """What gradients are asked for."""
        return [self.q, self.k, self.v, *(self.encoding.parameters() if biased else [])]


def make_setup(name: str, length: int, mode: str) -> Setup:
    """The inputs of a case."""
    torch.manual_seed(0)
    encoding = lw.make(name, heads=HEADS, width=HEADS * DIM, train_length=length)
    q, k, v = torch.randn(3, 1, HEADS, length, DIM).requires_grad_(mode == "train")
    x = F.layer_norm(torch.randn(1, length, HEADS * DIM), (HEADS * DIM,))
    return Setup(encoding, x, q, k, v, lw.layout(length))


@dataclass(frozen=True)
class Rival:
    """A way to do the job; `biased` ones must give its output."""

    run: Callable[[Setup], Tensor]
    takes: Callable[[Setup, int, str], bool]
    biased: bool = True


def timed_call(rival: Rival, setup: Setup, mode: str) -> Callable[[], object]:
    """What is timed: building the bias included, gradients to everything learned in "train"."""
    d_out = torch.randn_like(setup.q)

    def run() -> object:
        with torch.set_grad_enabled(mode == "train"):
            out = rival.run(setup)
        return torch.autograd.grad(out, setup.learned(rival.biased), d_out) if mode == "train" else out

    return run


def check_rival(name: str, setup: Setup) -> None:
    """An error unless a rival gives our output and, where it can, our gradients."""
    d_out, results = torch.randn_like(setup.q), []
    for run in (RIVALS[name].run, lambda setup: lw.attend(setup.q, setup.k, setup.v, **_own(setup))):
        out = run(setup)
        learned = setup.learned(True) if out.requires_grad else []
        results.append([out.detach(), *torch.autograd.grad(out, learned, d_out)] if learned else [out])
    for theirs, ours in zip(*results, strict=True):
        # Both are float32: sums of thousands of terms in another order.
        if not (theirs - ours).norm() <= 1e-4 * ours.norm():
            raise AssertionError(f"{name} and Lengthwise differ under {setup.encoding}: not timed")


def _own(setup: Setup) -> dict[str, object]:
    return {"layout": setup.layout, "bias": setup.bias()}


def no_bias(setup: Setup) -> Tensor:
    return F.scaled_dot_product_attention(setup.q, setup.k, setup.v, is_causal=setup.q.shape[2] > 1)


def _filled(setup: Setup) -> Tensor:
    rows, keys = setup.q.shape[2], setup.k.shape[2]
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return setup.bias().dense().masked_fill(~visible, -torch.inf)


def dense_sdpa(setup: Setup) -> Tensor:
    return F.scaled_dot_product_attention(setup.q, setup.k, setup.v, attn_mask=_filled(setup))


def dense_eager(setup: Setup) -> Tensor:
    scores = setup.q @ setup.k.transpose(-1, -2) * setup.q.shape[3] ** -0.5 + _filled(setup)
    return scores.softmax(-1) @ setup.v


def of_transformers(setup: Setup) -> Tensor:
    """transformers' own attention with its keyword for a bias, as T5 and its kin use it."""
    module = torch.nn.Module()
    module.is_causal = True
    bias = setup.bias().dense()
    return sdpa_attention_forward(module, setup.q, setup.k, setup.v, None, position_bias=bias)[0].transpose(1, 2)


def of_x_transformers(setup: Setup) -> Tensor:
    """x-transformers' own bias module and attention, for the two encodings that it has in our form."""
    heads, rows, keys = setup.q.shape[1], setup.q.shape[2], setup.k.shape[2]
    if isinstance(setup.encoding, Alibi):
        module = AlibiPositionalBias(heads, slopes=setup.encoding.slopes)
    else:
        module = RelativePositionBias(scale=1.0, causal=True, heads=heads)
        module.relative_attention_bias.weight = setup.encoding.table
    attend = Attend(causal=True, heads=heads, scale=setup.q.shape[3] ** -0.5)
    return attend(setup.q, setup.k, setup.v, attn_bias=module(rows, keys))[0]


def flex(setup: Setup) -> Tensor:
    call = setup.call()
    return flex_run(call, flex_plan(call))[0]


def _dense_fits(setup: Setup, length: int, mode: str) -> bool:
    fits = length < DENSE_UP_TO or (length == DENSE_UP_TO and isinstance(setup.encoding, AT_FULL_LENGTH))
    return fits and setup.encoding.overrides("bias")


def _flex_fits(setup: Setup, length: int, mode: str) -> bool:
    one_of_many = length == DENSE_UP_TO and isinstance(setup.encoding, AT_FULL_LENGTH)
    return mode == "forward" and one_of_many and not isinstance(flex_plan(setup.call()), Refusal)


RIVALS: dict[str, Rival] = {
    "no bias": Rival(no_bias, lambda setup, length, mode: True, biased=False),
    "dense SDPA": Rival(dense_sdpa, _dense_fits),
    "dense eager": Rival(dense_eager, _dense_fits),
    "transformers": Rival(of_transformers, _dense_fits),
    "x-transformers": Rival(
        of_x_transformers,
        lambda setup, length, mode: _dense_fits(setup, length, mode) and isinstance(setup.encoding, Alibi | T5),
    ),
    "FlexAttention": Rival(flex, _flex_fits),
}
