"""FlexAttention: one score function per kind of bias, compiled by torch into one fused kernel.

Made for CUDA, where it also trains; untested there. On the CPU torch compiles its forward pass only.
"""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lengthwise.attention.call import Call
from lengthwise.bias import Bias, DenseBias, DistanceBias, LevelBias, LineBias, StepBias, at_least_float32

Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score(content, batch, head, query, key), all of them single numbers to the compiler."""


def objections(call: Call) -> list[str]:
    """Why this backend cannot take the call; nothing if it can."""
    call, found = call.in_lines(), []
    if call.rescore is not None:
        found.append("rescore needs whole rows of all heads, flex shows one score at a time")
    if call.bias is not None and type(call.bias) not in SCORES:
        found.append(f"a {type(call.bias).__name__} is computed tile by tile, flex asks for one score at a time")
    if call.q.device.type == "cpu" and call.needs_grad:
        found.append("FlexAttention has no backward pass on the CPU")
    if call.dtype == torch.float64:
        found.append("FlexAttention has no float64 kernel")
    if call.q.shape[3] != call.v.shape[3] and call.q.device.type == "cpu":
        found.append("FlexAttention on the CPU wants values as wide as queries")
    return found


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output; scores are float32 inside the kernel whatever the dtype."""
    call = call.in_lines()
    clean, taint = call.contained()
    score = None if call.bias is None else SCORES[type(call.bias)](call.bias)
    mask = _block_mask(call) if call.forbids else None
    # Every kind of bias and of mask is a kernel of its own; past dynamo's usual limit it would fall back unseen.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        out = _kernel()(
            clean.q, clean.k, clean.v, score_mod=score, block_mask=mask, scale=call.scale, enable_gqa=call.group > 1
        )
    return out + taint


def distance_score(bias: DistanceBias) -> Score:
    """content + table[h, query - key - first]."""
    table, query, key = at_least_float32(bias.table), bias.query, bias.key
    last = table.shape[1] - 1

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = query[b % query.shape[0], i] - key[b % key.shape[0], j] - bias.first
        return content + table[h, distance.clamp(0, last)]

    return score


def level_score(bias: LevelBias) -> Score:
    """content - slope |query_level - key_level|; a float64 level is two float32, so that kernels stay in float32."""
    shape = bias.shape
    (query, query_rest), (key, key_rest) = (_two_floats(level) for level in (bias.query_level, bias.key_level))
    slope = at_least_float32(bias.slope).expand(-1, -1, shape[2])

    def at(x: Tensor, b: Tensor, h: Tensor, position: Tensor) -> Tensor:
        return x[b % x.shape[0], h % x.shape[1], position]

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        way = (at(query, b, h, i) - at(key, b, h, j)) + (at(query_rest, b, h, i) - at(key_rest, b, h, j))
        return content - at(slope, b, h, i) * way.abs()

    return score


def line_score(bias: LineBias) -> Score:
    """content + slope[h, n] x + intercept[h, n], with n counted knot by knot."""
    table, query, key = at_least_float32(bias.curve.table), bias.curve.query, bias.curve.key
    factor, knots, slope, intercept = bias.factor, bias.knots, bias.slope, bias.intercept
    last = table.shape[1] - 1

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = query[b % query.shape[0], i] - key[b % key.shape[0], j] - bias.curve.first
        x = factor[b % factor.shape[0], i] * table[0, distance.clamp(0, last)]
        line = torch.zeros_like(distance)
        for knot in range(knots.shape[0]):
            line = line + (x >= knots[knot])
        return content + slope[h, line] * x + intercept[h, line]

    return score


def dense_score(bias: DenseBias) -> Score:
    """content + value[b, h, i, j]."""
    value = at_least_float32(bias.value)

    def score(content: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return content + value[b % value.shape[0], h % value.shape[1], i, j]

    return score


SCORES: dict[type[Bias], Callable[..., Score]] = {
    DistanceBias: distance_score,
    LevelBias: level_score,
    StepBias: level_score,
    LineBias: line_score,
    DenseBias: dense_score,
}


def _two_floats(level: Tensor) -> tuple[Tensor, Tensor]:
    high = level.float()
    return high, (level - high.to(level.dtype)).float()


def _block_mask(call: Call) -> BlockMask:
    """The call's mask, one pair at a time."""
    start = torch.as_tensor(call.start, device=call.q.device)
    documents, key_mask = call.documents, call.key_mask

    def may(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        slot = start + i
        allowed = j <= slot if call.causal else j >= 0
        if call.window is not None:
            allowed = allowed & (slot - j < call.window) & (j - slot < call.window)
        if documents is not None:
            row = b % documents.shape[0]
            allowed = allowed & (documents[row, slot] == documents[row, j])
        if key_mask is not None:
            allowed = allowed & key_mask[b % key_mask.shape[0], j]
        return allowed

    batch = call.batch if documents is not None or key_mask is not None else None
    return create_block_mask(may, batch, None, call.queries, call.keys, device=call.q.device.type)


@cache
def _kernel() -> Callable[..., Tensor]:
    """flex_attention compiled; uncompiled it fills in the whole matrix."""
    return torch.compile(flex_attention, dynamic=False)
