"""How far off a result of attention may be, derived from the call and not from what some code happens to give.

    allowed = 2 |plain - exact|              twice the error of the definition at the same precision,
            + eps sqrt(terms) |exact|        a sum in another order,
            + roundings() noise              and what random roundings inside amount to

The last is what is left where terms cancel: a result near 0 is made of large numbers, each with a rounding of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.attention import reference
from lengthwise.attention.call import AttentionCall

Tensors = dict[str, Tensor]

EPS = torch.finfo(torch.float32).eps
DRAWS = 16
ROUNDINGS = 4
"""A number goes through about so many roundings on its way: as an input, in a product, in a score and in a weight."""
CHANCE = 4.8
"""A normal number is beyond 1 + CHANCE times its size about once in a hundred million draws, and the norm of n of them
beyond 1 + CHANCE / sqrt(n) times its root mean square."""


@dataclass
class Inside:
    """A call in float64 as far as its weights, with the graph that its gradients go through."""

    scores: Tensor
    """(batch, head, query, key), finite."""
    sink: Tensor
    """(batch, head, query)"""
    v: Tensor
    """As many as heads."""
    weights: Tensor
    """(batch, head, query, key + 1): the last is the sink's."""
    terms: Tensor
    """The size of the numbers that a score is made of."""
    out: Tensor
    lse: Tensor
    uncapped: Tensor | None = None
    """Scaled products of queries and keys where a softcap follows, whose slope has a rounding of its own."""

    @staticmethod
    def of(call: AttentionCall) -> "Inside":
        """By the reference."""
        k, v = (reference.of_heads(x, call.group) for x in (call.k, call.v))
        _, bias, scores = reference.score_rows(call, k)
        own = reference.sink_of(call)
        sink = scores.new_full(scores.shape[:3], -torch.inf) if own is None else own
        weights, lse = reference.softmax(scores, sink)
        of_sink = (sink - lse).exp().where(lse != -torch.inf, 0)
        finite = scores.masked_fill(scores == -torch.inf, 0)
        with torch.no_grad():
            terms = abs(call.scale) * call.q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :] + bias.abs()
            terms = terms if call.logit_scale is None else terms * call.logit_scale.abs()[..., None]
            terms = terms + finite.abs() + lse.where(lse.isfinite(), 0).abs()[..., None]
        all_weights = torch.cat([weights, of_sink[..., None]], -1)
        uncapped = None if call.softcap is None else call.scale * call.q @ k.mT
        return Inside(finite, sink.where(sink.isfinite(), 0), v, all_weights, terms, weights @ v, lse, uncapped)


def rounding_noise(
    inside: Inside,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    learned: Mapping[str, Tensor],
    *,
    eps: float = EPS,
    seed: int = 0,
) -> dict[str, float]:
    """By name ("out", "lse", and those of what is learned), the norm of what random roundings change, mean square.

    A score is a sum and has a rounding in float32 of the size of its terms; a weight has that relatively, and one of
    its own, `eps`. The gradient of a score is weight * (d_out . v - d_out . out + d_lse), three terms that may cancel,
    each with a rounding of its own. Errors of weights and of scores' gradients then go the way of all gradients.
    """
    weights, v = inside.weights.detach(), inside.v.detach()
    outputs = [inside.scores, inside.sink, inside.v, *([] if inside.uncapped is None else [inside.uncapped])]
    live = [output.requires_grad for output in outputs]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        out, lse = inside.out.detach(), inside.lse.detach()
        d_out = torch.zeros_like(out) if d_out is None else d_out.double()
        d_lse = torch.zeros_like(lse) if d_lse is None else d_lse.double()
        relative = eps + min(eps, EPS) * inside.terms
        of_sink = eps + min(eps, EPS) * (inside.sink.detach().abs() + lse.where(lse.isfinite(), 0).abs())
        of_row = (d_out * out).norm(dim=-1) + d_lse.abs()
        of_pair = (d_out.square() @ v.square().mT).sqrt() + of_row[..., None]
        d_weights = d_out @ v.mT
        d_scores = d_weights - (d_out * out).sum(-1, keepdim=True) + d_lse[..., None]
    totals: dict[str, float] = {}
    for _ in range(DRAWS):
        of_weight, of_term = (
            torch.randn(weights.shape, generator=generator, dtype=torch.float64) * weights for _ in range(2)
        )
        errors = of_weight[..., :-1] * relative
        sample = {"out": errors @ v, "lse": errors.sum(-1)}
        of_delta = (errors * d_weights).sum(-1)
        cotangents = [
            errors * d_scores - weights[..., :-1] * of_delta[..., None] + of_term[..., :-1] * eps * of_pair,
            of_term[..., -1] * of_row * eps
            + of_weight[..., -1] * of_sink * (d_lse - (d_out * out).sum(-1))
            - weights[..., -1] * of_delta,
            errors.mT @ d_out,
            *([] if inside.uncapped is None else [of_term[..., :-1] * eps * d_scores]),
        ]
        if any(live):
            gradients = torch.autograd.grad(
                [output for output, is_live in zip(outputs, live, strict=True) if is_live],
                list(learned.values()),
                [cotangent for cotangent, is_live in zip(cotangents, live, strict=True) if is_live],
                allow_unused=True,
                retain_graph=True,
            )
            sample |= {name: x for name, x in zip(learned, gradients, strict=True) if x is not None}
        for name, error in sample.items():
            totals[name] = totals.get(name, 0.0) + float(error.detach().square().sum()) / DRAWS
    return {name: math.sqrt(total) for name, total in totals.items()}


def roundings(numbers: int) -> float:
    """How many times the noise a result of so many numbers may be off: of very few, chance alone goes further."""
    return max(ROUNDINGS, 1 + CHANCE / math.sqrt(max(1, numbers)))


def assert_within_rounding(
    ours: Tensors, plain: Tensors, exact: Tensors, noise: Mapping[str, float], *, terms: int, eps: float = EPS
) -> None:
    """Every result by name, -inf where it should be; inside, numbers are rounded to `eps`, whatever comes out."""
    for name, truth in exact.items():
        got, theirs = ours[name], plain[name]
        assert got.shape == truth.shape, name
        assert got.dtype == theirs.dtype, name
        assert torch.equal(got == -torch.inf, truth == -torch.inf), name
        got, theirs, truth = (x.double().masked_fill(x == -torch.inf, 0) for x in (got, theirs, truth))
        size, error, off = float(truth.norm()), float((got - truth).norm()), float((theirs - truth).norm())
        half = torch.finfo(ours[name].dtype).eps if ours[name].dtype.itemsize < 4 else 0.0
        allowed = 2 * off + (eps * terms**0.5 + half) * size + roundings(truth.numel()) * noise.get(name, 0.0)
        assert error <= allowed, f"{name} is off by {error:.3g} of {size:.3g}, allowed are {allowed:.3g}"
