"""The kernel of a rotary head: how the mean query scores the mean key at every distance.

    kernel[d] = scale * R_d E[q] . E[k]          E over the tokens, before they are turned

What a head would pay attention to if all tokens were alike: the positional part of an encoding that adds nothing.
"""

import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys turned by the positions 0, 1, 2, ..."""


def kernel(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    turn: Turn,
    *,
    scale: float,
    real: Bool[Tensor, "batch query"] | None = None,
) -> Float[Tensor, "head distance"]:
    """From queries and keys that are not turned yet; `real` leaves out padding."""
    means = [_mean(x, real).expand(-1, -1, q.shape[2], -1) for x in (q, k)]
    turned_q, turned_k = turn(*means)
    at_zero = turned_k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    return scale * (turned_q * at_zero).sum(-1)[0].float().cpu()


def kernel_of_turned(
    module: nn.Module, q: Tensor, k: Tensor, waves: tuple[Tensor, Tensor], *, scale: float
) -> Float[Tensor, "head distance"] | None:
    """The same from a layer of transformers, which hands on q and k already turned by `waves` = (cos, sin).

    Turning is undone with the sine's sign changed, by the family's own function. None where that does not lead back:
    there the family lays out its angles in a way that is not known here.
    """
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    cos, sin = (at_least_float32(wave) for wave in waves)
    if apply is None or cos.ndim != 3:
        return None
    width, q, k = cos.shape[-1], at_least_float32(q), at_least_float32(k)
    power = (cos.square() + sin.square()).mean()

    def by(cos: Tensor, sin: Tensor) -> Turn:
        def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            turned = apply(q[..., :width], k[..., :width], cos, sin)
            whole = [torch.cat([new, old[..., width:]], -1) for new, old in zip(turned, (q, k), strict=True)]
            return whole[0], whole[1]

        return turn

    with suppress(RuntimeError):  # shapes that do not fit: another layout
        flat = by(cos / power, -sin / power)(q, k)
        again = by(cos, sin)(*flat)
        if all(torch.allclose(a, b, atol=1e-3, rtol=1e-2) for a, b in zip(again, (q, k), strict=True)):
            return kernel(*flat, by(cos[:1], sin[:1]), scale=scale)
    return None


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    """The mean over tokens and sequences, (1, head, 1, dim)."""
    if real is None:
        return at_least_float32(x).mean((0, 2), keepdim=True)
    some = real[:, None, :, None]
    return at_least_float32(x).masked_fill(~some, 0).sum((0, 2), keepdim=True) / some.sum()
