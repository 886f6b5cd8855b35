"""The ways to compute one job: attention under an encoding, its bias built from positions or tokens each time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from x_transformers.attend import Attend
from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

import lengthwise as lw
from lengthwise.attention import AttentionCall, checked_call
from lengthwise.attention.flex import plan as flex_plan
from lengthwise.attention.flex import run as flex_run
from lengthwise.attention.plan import Refusal
from lengthwise.encodings.alibi import Alibi
from lengthwise.encodings.kerple import KerpleLog
from lengthwise.encodings.t5 import T5

DENSE_UP_TO = 4096
AT_FULL_LENGTH = (Alibi, KerpleLog, T5)
"""Filled in, one bias costs what another costs: at the greatest length these stand for all."""


@dataclass(frozen=True)
class Setup:
    """One job's inputs."""

    encoding: lw.Encoding
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    learning: bool
    cached: dict[str, Tensor] | None = None
    """The state of all tokens, which a decoder has beside its keys."""
    keys_turned: bool = False
    """Whether the keys are cached as they meet queries, so that only the new one is to be turned."""

    def __post_init__(self) -> None:
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_(self.learning)
        self.encoding.requires_grad_(self.learning)

    @property
    def rescore(self) -> lw.Rescore | None:
        return self.encoding.rescore(self.x, self.layout, self.cached)

    def bias(self, rows: int | None = None) -> lw.Bias | None:
        """Built anew, as a model does in every forward pass."""
        layout = self.layout if rows is None else self.last(rows)
        return self.encoding.bias(
            self.x if self.cached is None else self.x[:, -layout.query_count :], layout, self.cached
        )

    def last(self, rows: int) -> lw.TokenLayout:
        """Some last tokens as queries."""
        return lw.layout(rows, past=self.k.shape[2] - rows)

    @cached_property
    def layout(self) -> lw.TokenLayout:
        """Where the tokens stand; a model has it once for all layers."""
        return self.last(self.q.shape[2])

    def turned(self) -> tuple[Tensor, Tensor]:
        """Queries and keys as they meet."""
        if not self.encoding.overrides("rotate"):
            return self.q, self.k
        if self.keys_turned:
            return self.encoding.rotate(self.q, self.k[:, :, -1:], self.layout.new_tokens())[0], self.k
        return self.encoding.rotate(self.q, self.k, self.layout)

    def call(self, bias: lw.Bias | None = None) -> AttentionCall:
        """The job as our own, with the bias built anew if none is ready."""
        return checked_call(*self.turned(), self.v, layout=self.layout, bias=bias or self.bias(), rescore=self.rescore)

    def late(self, rows: int) -> Tensor:
        """The last rows by the reference in float64, to check against."""
        q, k = self.turned()
        q, k, v = (tensor.detach().double() for tensor in (q[:, :, -rows:], k, self.v))
        bias = self.bias(rows)
        return lw.attend(q, k, v, layout=self.last(rows), bias=bias, rescore=self.rescore, backend="reference")

    def learned(self, biased: bool) -> list[Tensor]:
        """What gradients are asked for."""
        of_bias = list(self.encoding.parameters()) if biased else []
        acts = self.encoding.overrides("bias") or self.encoding.overrides("rescore")
        return [self.q, self.k, self.v, *(of_bias if acts else [])]


@dataclass(frozen=True)
class Rival:
    """A way to do the job; `biased` ones must give its output."""

    run: Callable[[Setup], Tensor]
    takes: Callable[[Setup, int, str], bool]
    biased: bool = True
    prepare: Callable[[Setup], Callable[[Setup], Tensor]] | None = None

    def ready(self, setup: Setup) -> Callable[[Setup], Tensor]:
        """What runs, with everything done that happens before the clock starts."""
        return self.prepare(setup) if self.prepare else self.run


def no_bias(setup: Setup) -> Tensor:
    return F.scaled_dot_product_attention(setup.q, setup.k, setup.v, is_causal=setup.q.shape[2] > 1)


def lengthwise(setup: Setup) -> Tensor:
    q, k = setup.turned()
    return lw.attend(q, k, setup.v, layout=setup.layout, bias=setup.bias(), rescore=setup.rescore)


def bias_ready(setup: Setup) -> Callable[[Setup], Tensor]:
    """With the bias built once, before the clock starts."""
    bias = setup.bias()

    def run(setup: Setup) -> Tensor:
        q, k = setup.turned()
        return lw.attend(q, k, setup.v, layout=setup.layout, bias=bias, rescore=setup.rescore)

    return run


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
    return fits and setup.encoding.overrides("bias") and setup.rescore is None


def _flex_fits(setup: Setup, length: int, mode: str) -> bool:
    one_of_many = length == DENSE_UP_TO and isinstance(setup.encoding, AT_FULL_LENGTH)
    return mode == "forward" and one_of_many and not isinstance(flex_plan(setup.call()), Refusal)


RIVALS: dict[str, Rival] = {
    "no bias": Rival(no_bias, lambda setup, length, mode: True, biased=False),
    "lengthwise": Rival(lengthwise, lambda setup, length, mode: True),
    "lengthwise, bias ready": Rival(
        lengthwise,
        lambda setup, length, mode: mode == "decode" and setup.encoding.overrides("bias"),
        prepare=bias_ready,
    ),
    "dense SDPA": Rival(dense_sdpa, _dense_fits),
    "dense eager": Rival(dense_eager, _dense_fits),
    "transformers": Rival(
        of_transformers, lambda setup, length, mode: _dense_fits(setup, length, mode) and mode != "decode"
    ),
    "x-transformers": Rival(
        of_x_transformers,
        lambda setup, length, mode: (
            _dense_fits(setup, length, mode) and isinstance(setup.encoding, Alibi | T5) and mode != "decode"
        ),
    ),
    "FlexAttention": Rival(flex, _flex_fits),
}
