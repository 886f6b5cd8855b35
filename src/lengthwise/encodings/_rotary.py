"""What rotary encodings share: how a pair of channels turns, and angles that are sums over the tokens so far.

Two layouts of a pair, the same up to the order of the channels:
    half          channels k and k + turning / 2         LLaMA, NeoX
    interleaved   channels 2k and 2k + 1                 GPT-J, the CABLE paper's figures
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import at_least_float32, running_sums
from lengthwise.encodings._rope_scaling import RopeBase
from lengthwise.encodings.base import AttentionShape
from lengthwise.errors import check_broadcast, check_tensor
from lengthwise.token_layout import TokenLayout

PairLayout = Literal["half", "interleaved"]
PAIR_LAYOUTS: tuple[PairLayout, ...] = ("half", "interleaved")

Waves = tuple[Float[Tensor, "#batch #head position pair"], Float[Tensor, "#batch #head position pair"]]
"""Cosine and sine of the angles of some tokens."""


def check_even(name: str, shape: AttentionShape) -> None:
    """An error unless a head's channels come in pairs."""
    if shape.head_dim % 2:
        raise ValueError(f"{name} turns pairs of channels, so head_dim must be even, got {shape.head_dim}")


def plain_frequencies(base: float, shape: AttentionShape, device: torch.device) -> Float[Tensor, " pair"]:
    """RoPE's own: base ** (-2k / head_dim) radians per position."""
    return RopeBase(base, shape.head_dim, shape.train_length).plain(device)


def check_turned(
    q: Tensor, k: Tensor, layout: TokenLayout, shape: AttentionShape, *, own_heads: bool = False, axes: bool = False
) -> None:
    """An error unless there is one query and one key per position; `own_heads` where every head turns differently."""
    for name, tensor, positions in (("query", q, layout.query), ("key", k, layout.key)):
        if positions.ndim != 2 and not axes:
            raise ValueError(
                f"{name} positions must be (batch, position), got shape {tuple(positions.shape)}; rows and columns are "
                "for 'axial-rope' and 'mixed-rope'"
            )
        wanted = ("batch", shape.heads if own_heads else "head", positions.shape[1], shape.head_dim)
        advice = "Give one position each" + (", and every query head a key head." if own_heads else ".")
        check_tensor(f"what {name} positions turn", tensor, wanted, "floating-point", advice)
        sizes = (tensor.shape[0], positions.shape[0])
        check_broadcast(f"{name} positions and what they turn", sizes, "batch", "Give one row or one each.")


def turn(x: Float[Tensor, "batch head position dim"], waves: Waves, pairs: PairLayout = "half") -> Tensor:
    """The first channels turned, two for each angle, the rest as they are; in x's dtype."""
    cos, sin = waves
    turning = 2 * cos.shape[-1]
    wide_x, rest = at_least_float32(x[..., :turning]), x[..., turning:]
    if pairs == "half":
        a, b = wide_x.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    else:
        a, b = wide_x[..., 0::2], wide_x[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def waves_of(angles: Float[Tensor, "*shape"], dtype: torch.dtype) -> Waves:
    """Cosine and sine, taken in the angles' own precision, in float32 or the precision of the model."""
    return angles.cos().to(dtype), angles.sin().to(dtype)


def summed_angles(
    step: Float[Tensor, "batch head key pair"], layout: TokenLayout
) -> Float[Tensor, "batch head key pair"]:
    """Angles that are the sum of a step per token, own step included: float64 where the device has it.

    The sum runs on across packed documents: only differences inside one are ever read.
    """
    whole, rest = running_sums(step.transpose(2, 3), layout.ring)
    return (whole if rest is None else whole.remainder(2 * torch.pi) + rest).transpose(2, 3)


def of_queries(numbers: Float[Tensor, "batch head key *axis"], layout: TokenLayout) -> Tensor:
    """Those of the queries among the numbers of all keys."""
    if isinstance(layout.start, Tensor):
        return numbers.index_select(2, layout.query_slots())
    return numbers[:, :, layout.start : layout.start + layout.query_count]


def turn_both(
    q: Tensor, k: Tensor, angles: Float[Tensor, "batch head key pair"], layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by angles that are known for all keys, the queries among them."""
    cos, sin = waves_of(angles, at_least_float32(q).dtype)
    return turn(q, (of_queries(cos, layout), of_queries(sin, layout))), turn(k, (cos, sin))
