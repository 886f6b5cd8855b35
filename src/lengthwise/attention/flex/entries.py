"""One function per kind of bias: what it adds to the score of one query and one key."""

from collections.abc import Callable

import torch
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.flex.lookups import Entry, looked_up, number, per_head, per_pair, per_sequence, static
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    LevelBias,
    LineBias,
    QueryDistanceBias,
    at_least_float32,
    two_floats,
)


def distance_entry(bias: DistanceBias, call: AttentionCall) -> Entry:
    """table[h, query - key - first]."""
    table = static(looked_up(at_least_float32(bias.table)).expand(call.heads, -1))
    query, key = per_sequence(bias.query, call), per_sequence(bias.key, call)
    first, last = (number(x, call) for x in (bias.first, bias.table.shape[1] - 1))

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = query[b, i] - key[b, j] - first
        return table[h, distance.clamp(min=0).minimum(last)]

    return entry


def profile_entry(bias: QueryDistanceBias, call: AttentionCall) -> Entry:
    """rows . profiles[:, query - key - first], profile by profile."""
    rows = looked_up(at_least_float32(bias.rows).transpose(2, 3)).expand(call.batch, call.heads, -1, -1)
    profiles = looked_up(at_least_float32(bias.profiles)).expand(call.heads, -1, -1)
    rows, profiles = static(rows), static(profiles)
    query, key = per_sequence(bias.query, call), per_sequence(bias.key, call)
    first, last = (number(x, call) for x in (bias.first, bias.profiles.shape[2] - 1))
    count, of_queries, is_zero = bias.profiles.shape[1], bias.side == "query", bias.beyond == "zero"

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = query[b, i] - key[b, j] - first
        index, token = distance.clamp(min=0).minimum(last), i if of_queries else j
        total = rows[b, h, 0, token] * profiles[h, 0, index]
        for n in range(1, count):
            total = total + rows[b, h, n, token] * profiles[h, n, index]
        return torch.where(distance == index, total, 0.0) if is_zero else total

    return entry


def level_entry(bias: LevelBias, call: AttentionCall) -> Entry:
    """-slope curve(|query_level - key_level|); a float64 level is two float32, so that kernels stay in float32."""
    bias = bias.summed()
    levels = ((bias.query_level, bias.query_rest), (bias.key_level, bias.key_rest))
    parts: list[Tensor] = []
    for level, rest in levels:
        assert level is not None
        parts += two_floats(level) if rest is None else (level, rest)
    query, query_rest, key, key_rest = (per_head(part, call) for part in parts)
    slope = per_head(at_least_float32(bias.slope).expand(-1, -1, call.queries), call)
    linear = bias.curve == "linear"

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        difference = (query[b, h, i] - key[b, h, j]) + (query_rest[b, h, i] - key_rest[b, h, j])
        return -slope[b, h, i] * (difference.abs() if linear else torch.log1p(difference * difference))

    return entry


def line_entry(bias: LineBias, call: AttentionCall) -> Entry:
    """slope[h, n] x + intercept[h, n], with n counted knot by knot."""
    curve, factor = distance_entry(bias.curve, call), per_sequence(at_least_float32(bias.factor), call)
    knots = static(at_least_float32(bias.knots))
    slope, intercept = (static(at_least_float32(x).expand(call.heads, -1)) for x in (bias.slope, bias.intercept))
    count = bias.knots.shape[0]

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = factor[b, i] * curve(b, h, i, j)
        line = torch.zeros_like(i)
        for knot in range(count):
            line = line + (x >= knots[knot])
        return slope[h, line] * x + intercept[h, line]

    return entry


def dense_entry(bias: DenseBias, call: AttentionCall) -> Entry:
    """value[b, h, i, j]."""
    value = per_pair(at_least_float32(bias.value), call)

    def entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return value[b, h, i, j]

    return entry


ENTRIES: dict[type[Bias], Callable[..., Entry]] = {
    DistanceBias: distance_entry,
    QueryDistanceBias: profile_entry,
    LevelBias: level_entry,
    LineBias: line_entry,
    DenseBias: dense_entry,
}
