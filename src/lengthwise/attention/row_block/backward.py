"""The backward pass over the tiles of a call.

weights  = 2^(scores - log-sum-exp)                     the shift is the log-sum-exp: one product gives the weights
d_scores = weights (d_out v^T - d_out . out)
d_v = weights^T d_out,   d_q = scale d_scores k,   d_k = scale d_scores^T q
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.row_block.terms import LOG2E, Where
from lengthwise.attention.row_block.tiles import Part, Tiles, buffer


def backward(
    tiles: Tiles,
    d_out: Float[Tensor, "batch head query value"],
    out: Float[Tensor, "batch head query value"],
    lse: Float[Tensor, "batch head query"],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, per head even where heads share keys; the term has its own."""
    call, term = tiles.call, tiles.term
    d_q = tiles.zeros(*call.q.shape)
    d_k, d_v = (tiles.zeros(call.batch, call.heads, *x.shape[2:]) for x in (call.k, call.v))
    for parts in tiles.bundles():
        # Where the channels carry the bias, their gradient is the bias's own and is kept beside the content's.
        keys = [torch.zeros_like(part.k) if term.channel_grad else d_k[part.batch, part.heads] for part in parts]
        values = [d_v[part.batch, part.heads] for part in parts]
        for block in tiles.blocks():
            rows = block.rows
            asked = [tiles.queries(part, rows, lse[part.batch, part.heads, rows]) for part in parts]
            above = [_upstream(tiles, part, rows, d_out, out) for part in parts]
            found = [torch.zeros_like(q if term.channel_grad else q[..., :-2]) for q in asked]
            for i, where in tiles.visits(parts, block, asked):
                _tile(tiles, parts[i], where, asked[i], above[i], found[i], keys[i], values[i])
            for part, d_asked in zip(parts, found, strict=True):
                d_q[part.batch, part.heads, rows] = tiles.turned(d_asked[..., : part.dim])
                if term.channel_grad:
                    term.collect_rows(part.batch, part.heads, rows, d_asked[..., part.dim :])
        if term.channel_grad:
            for part, d_keys in zip(parts, keys, strict=True):
                d_k[part.batch, part.heads] = d_keys[..., : part.dim]
                term.collect_keys(part.batch, part.heads, d_keys[..., part.dim + 1])
    return d_q.mul_(call.scale), d_k.div_(LOG2E), d_v


def _tile(tiles: Tiles, part: Part, where: Where, q: Tensor, up: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> None:
    """Add what one tile gives to the gradients of its part; products first go to memory of their own.

    Only into contiguous memory does a batch of products run as one.
    """
    term, heads, columns = tiles.term, where.run, where.columns
    weights = tiles.scores(part, where, q).exp2_()
    up = up[heads]
    d_v[heads, columns] += torch.bmm(weights.transpose(1, 2), up[..., :-1])
    d_weights = torch.bmm(up, part.v[heads, columns].transpose(1, 2), out=buffer(tiles.second, where))
    d_scores = torch.mul(weights, d_weights, out=term.landing(weights))
    width = part.dim + 2 if term.channel_grad and where.far else part.dim
    d_q[heads, :, :width] += torch.bmm(d_scores, part.k[heads, columns, :width])
    d_k[heads, columns, :width] += torch.bmm(d_scores.transpose(1, 2), q[heads, :, :width])
    term.collect(where, d_scores)


def _upstream(tiles: Tiles, part: Part, rows: slice, d_out: Tensor, out: Tensor) -> Tensor:
    """d_out, and in one more channel what the softmax takes from every weight's gradient: -d_out . out."""
    up, own = (x[part.batch, part.heads, rows] for x in (d_out, out))
    up = up.to(tiles.dtype)
    return tiles.turned(torch.cat([up, -(up * own).sum(-1, keepdim=True)], -1))
