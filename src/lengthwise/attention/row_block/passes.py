"""What runs inside the operators: forward and backward over the tiles of a call.

    forward     weights = 2^(scores - shift),  out = weights v / sum(weights),  lse = shift + log2 sum(weights)

The shift is a row's score on itself, known beforehand: any number will do that keeps the weights within float32's
range. Rows for which it did not are done again with their largest score, and only those, so that no row depends on a
later one. A sink is one more weight.

    backward    weights  = 2^(scores - lse)             the shift is the log-sum-exp: one product gives the weights
                d_scores = weights (d_out v^T + delta),  delta = d_lse - d_out . out
                d_v = weights^T d_out,   d_q = scale d_scores k,   d_k = scale d_scores^T q

A call whose scores are rescored is cut in blocks of whole rows instead.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.backend import finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.decode import whole_rows
from lengthwise.attention.row_block.bounds import first_keys, share_skipped
from lengthwise.attention.row_block.terms import LOG2E, Where, make_term
from lengthwise.attention.row_block.tiles import Block, Part, Tiles, buffer, tile_sizes
from lengthwise.bias import at_least_float32

SMALLEST_SUM = 2.0**-100
"""A sum of weights below it may have lost some to underflow."""

Rows = tuple[Float[Tensor, "head row"], Float[Tensor, "head row"], Float[Tensor, "head row value"]]
"""Of a block of rows: the shift, the sum of the keys' weights, the weighted sum of the values."""

Forward = tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"]]
"""The output, and the log-sum-exp of every row; -inf where a row sees nothing and has no sink."""

BLOCK_SCORES = 2**22
"""How many scores a block of whole rows may have."""


def forward(call: AttentionCall) -> Forward:
    """The output in float32 or better, and the log-sum-exp."""
    clean, taint = finite_inputs(call)
    out, lse = _forward(clean)
    return (out, lse) if taint is None else (out + taint[..., None], lse + taint)


def backward(
    call: AttentionCall,
    d_out: Float[Tensor, "batch head query value"],
    d_lse: Float[Tensor, "batch head query"],
    out: Float[Tensor, "batch head query value"],
    lse: Float[Tensor, "batch head query"],
) -> dict[str, Tensor]:
    """The gradients of q, k and v and of what else is learned, by name."""
    clean, taint = finite_inputs(call)
    if taint is not None:
        # The output holds NaN for rows that saw what is not finite; the gradient is that of the finite rest.
        out, lse = _forward(clean)
    d_out = at_least_float32(d_out)
    if call.rescore is not None:
        gradients = _rescored_backward(clean, d_out, d_lse)
    else:
        # In units of log 2, and inf where a row has no weight to give: 2^-inf is 0.
        in_log_2 = (lse * LOG2E).masked_fill_(lse == -math.inf, math.inf)
        gradients = _backward(clean, d_out, d_lse.masked_fill(lse == -math.inf, 0) - (d_out * out).sum(-1), in_log_2)
    if taint is not None:
        for name, x in (("k", call.k), ("v", call.v)):
            gradients[name] = gradients[name].masked_fill(~x.isfinite(), 0)
    return gradients


def skipped_share(call: AttentionCall) -> float:
    """How much of the forward work that causality leaves is skipped in this call, 0 to 1."""
    clean, _ = finite_inputs(call)
    rows = tile_sizes(clean, whole=False)[0]
    return share_skipped(clean, first_keys(clean, make_term(clean), rows), rows)


def _forward(call: AttentionCall) -> Forward:
    if call.rescore is not None:
        return _rescored_forward(call)
    term = make_term(call)
    tiles = Tiles(call, term, first_keys(call, term, tile_sizes(call, whole=term.whole)[0]))
    out = tiles.zeros(*call.q.shape[:3], call.v.shape[3])
    lse = tiles.zeros(*call.q.shape[:3])
    for parts in tiles.bundles():
        on_itself = [_own_scores(tiles, part) for part in parts]
        for block in tiles.blocks():
            rows = block.rows
            results = _block(tiles, parts, block, [shift[:, rows] for shift in on_itself])
            for part, (shift, sums, values) in zip(parts, results, strict=True):
                total = _with_sink(part, rows, shift, sums)
                good = (total > SMALLEST_SUM) & (total < math.inf) & values.isfinite().all(-1)
                if not good.all():
                    again, again_sums, again_values = _with_largest_score(tiles, part, block)
                    shift, sums = torch.where(good, shift, again), torch.where(good, sums, again_sums)
                    values = torch.where(good[..., None], values, again_values)
                    total = _with_sink(part, rows, shift, sums)
                own = (shift + total.log2()) / LOG2E
                # Exactly the sink where no key adds to it.
                own = own if part.sink is None else own.where(sums != 0, part.sink[:, rows])
                lse[part.batch, part.heads, rows] = own
                out[part.batch, part.heads, rows] = values / total.masked_fill(total == 0, 1)[..., None]
    return out, lse


def _block(tiles: Tiles, parts: list[Part], block: Block, shifts: list[Tensor]) -> list[Rows]:
    """A block of rows of every part, under given shifts."""
    queries = [tiles.queries(part, block.rows, shift) for part, shift in zip(parts, shifts, strict=True)]
    sums = [tiles.zeros(*q.shape[:2]) for q in queries]
    values = [tiles.zeros(*q.shape[:2], tiles.call.v.shape[3]) for q in queries]
    for i, where in tiles.visits(parts, block, queries):
        weights = tiles.scores(parts[i], where, queries[i]).exp2_()
        heads = where.run
        sums[i][heads] += weights.sum(-1)
        values[i][heads].baddbmm_(weights, parts[i].v[heads, where.columns, :-1])
    return list(zip(shifts, map(tiles.turned, sums), map(tiles.turned, values), strict=True))


def _with_sink(part: Part, rows: slice, shift: Tensor, sums: Tensor) -> Float[Tensor, "head row"]:
    """The sum of all weights, the sink's included."""
    return sums if part.sink is None else sums + (part.sink[:, rows] * LOG2E - shift).exp2_()


def _with_largest_score(tiles: Tiles, part: Part, block: Block) -> Rows:
    """A block of rows of one part, shifted by each row's largest score."""
    queries = tiles.queries(part, block.rows, part.q.new_zeros(()))
    peak = torch.full_like(queries[..., 0], -math.inf)
    if part.sink is not None:
        peak = tiles.turned(part.sink[:, block.rows] * LOG2E)
    for _, where in tiles.visits([part], block, [queries]):
        largest = tiles.scores(part, where, queries).amax(-1)
        peak[where.run] = torch.maximum(peak[where.run], largest)
    (again,) = _block(tiles, [part], block, [tiles.turned(peak.masked_fill(peak == -math.inf, 0))])
    return again


def _own_scores(tiles: Tiles, part: Part) -> Float[Tensor, "head query"]:
    """Every row's score on the key in its own slot, in units of log 2; on the nearest key where there is none."""
    call = tiles.call
    if call.keys == 0:
        return part.q.new_zeros(part.q.shape[:2])
    slots = torch.arange(tiles.start, tiles.start + call.queries, device=tiles.device).clamp(0, call.keys - 1)
    own = (part.q[..., : part.dim] * part.k[:, slots, : part.dim]).sum(-1)
    if tiles.cap is not None:
        own = tiles.cap * (own / tiles.cap).tanh()
    bias = tiles.term.diagonal(part.batch, part.heads, slots)
    own = own if bias is None else own + bias
    return own if part.factor is None else own * part.factor


def _backward(call: AttentionCall, d_out: Tensor, delta: Tensor, lse: Tensor) -> dict[str, Tensor]:
    term = make_term(call)
    tiles = Tiles(call, term, first_keys(call, term, tile_sizes(call, whole=term.whole)[0], d_out, delta, lse))
    d_q = tiles.zeros(*call.q.shape)
    # Per head even where heads share keys.
    d_k, d_v = (tiles.zeros(call.batch, call.heads, *x.shape[2:]) for x in (call.k, call.v))
    d_factor = tiles.zeros(*call.q.shape[:3]) if call.logit_scale is not None else None
    for parts in tiles.bundles():
        # Where the channels carry the bias, their gradient is the bias's own and is kept beside the content's.
        keys = [torch.zeros_like(part.k) if term.channel_grad else d_k[part.batch, part.heads] for part in parts]
        values = [d_v[part.batch, part.heads] for part in parts]
        for block in tiles.blocks():
            rows = block.rows
            queries = [tiles.queries(part, rows, lse[part.batch, part.heads, rows]) for part in parts]
            above = [_upstream(tiles, part, rows, d_out, delta) for part in parts]
            d_queries = [torch.zeros_like(q if term.channel_grad else q[..., :-2]) for q in queries]
            d_factors = [tiles.zeros(*q.shape[:2]) for q in queries]
            for i, where in tiles.visits(parts, block, queries):
                sums = d_queries[i], keys[i], values[i], d_factors[i]
                _tile(tiles, parts[i], where, queries[i], above[i], *sums)
            for part, d_rows, of_factor in zip(parts, d_queries, d_factors, strict=True):
                d_q[part.batch, part.heads, rows] = tiles.turned(d_rows[..., : part.dim])
                if term.channel_grad:
                    term.collect_rows(part.batch, part.heads, rows, d_rows[..., part.dim :])
                if d_factor is not None:
                    d_factor[part.batch, part.heads, rows] = tiles.turned(of_factor)
        if term.channel_grad:
            for part, d_keys in zip(parts, keys, strict=True):
                d_k[part.batch, part.heads] = d_keys[..., : part.dim]
                term.collect_keys(part.batch, part.heads, d_keys[..., part.dim + 1])
    d_q, d_k = d_q.mul_(call.scale), d_k.div_(LOG2E)
    if call.group > 1:
        d_k, d_v = (x.unflatten(1, (-1, call.group)).sum(2) for x in (d_k, d_v))
    gradients = {"q": d_q, "k": d_k, "v": d_v} | {f"bias.{name}": x for name, x in term.gradients().items()}
    if d_factor is not None and call.logit_scale is not None:
        gradients["logit_scale"] = d_factor.sum_to_size(call.logit_scale.shape)
    if call.sink is not None:
        weight = (at_least_float32(call.sink) * LOG2E - lse).exp2_()
        gradients["sink"] = (weight * delta).sum_to_size(call.sink.shape)
    of_call = call.tensors()
    return {name: gradient.to(of_call[name].dtype) for name, gradient in gradients.items()}


def _tile(
    tiles: Tiles,
    part: Part,
    where: Where,
    q: Tensor,
    above: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_factor: Tensor,
) -> None:
    """Add what one tile gives to the gradients of its part; products first go to memory of their own.

    Only into contiguous memory does a batch of products run as one.
    """
    term, heads, columns = tiles.term, where.run, where.columns
    weights = tiles.scores(part, where, q).exp2_()
    above = above[heads]
    d_v[heads, columns] += torch.bmm(weights.transpose(1, 2), above[..., :-1])
    d_weights = torch.bmm(above, part.v[heads, columns].transpose(1, 2), out=buffer(tiles.second, where))
    if tiles.in_steps:
        d_scores = _in_steps(tiles, part, where, weights, d_weights, d_factor)
    else:
        d_scores = torch.mul(weights, d_weights, out=term.landing(weights))
        term.collect(where, d_scores)
    width = part.dim + 2 if term.channel_grad and where.far else part.dim
    d_q[heads, :, :width] += torch.bmm(d_scores, part.k[heads, columns, :width])
    d_k[heads, columns, :width] += torch.bmm(d_scores.transpose(1, 2), q[heads, :, :width])


def _in_steps(
    tiles: Tiles, part: Part, where: Where, weights: Tensor, d_weights: Tensor, d_factor: Tensor
) -> Float[Tensor, "head row column"]:
    """The gradient of the content before it was capped; those of the logit scale and the bias are taken in."""
    content, raw = tiles.tile_in_steps(where)
    d_scores, factor = d_weights.mul_(weights), tiles.factors(part, where)
    if factor is not None:
        # 0 where a weight is: a bias of -inf has no gradient to give.
        d_factor[where.run] += torch.where(d_scores == 0, 0, d_scores * raw).sum(-1) / LOG2E
        d_scores.mul_(factor)
    tiles.term.collect(where, tiles.term.landing(weights).copy_(d_scores))
    if tiles.cap is not None:
        d_scores.mul_(content.div_(tiles.cap).square_().neg_().add_(1))
    return d_scores


def _upstream(tiles: Tiles, part: Part, rows: slice, d_out: Tensor, delta: Tensor) -> Tensor:
    """d_out, and in one more channel what the softmax adds to every weight's gradient."""
    above, own = (x[part.batch, part.heads, rows].to(tiles.dtype) for x in (d_out, delta))
    return tiles.turned(torch.cat([above, own[..., None]], -1))


def _rescored_forward(call: AttentionCall) -> Forward:
    """By blocks of whole rows of all heads: a rescore looks at both."""
    dtype = at_least_float32(call.q[:0]).dtype
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3], dtype=dtype)
    lse = call.q.new_empty(call.q.shape[:3], dtype=dtype)
    for rows in _row_blocks(call):
        out[:, :, rows], lse[:, :, rows] = whole_rows(call, rows)
    return out, lse


def _rescored_backward(call: AttentionCall, d_out: Tensor, d_lse: Tensor) -> dict[str, Tensor]:
    """The gradients of q, k, v and of what is learned, by name: a block of rows at a time, computed again.

    They come from torch.func.vjp, as do those of what the rescore is made of: a compiled graph never sees inside.
    """
    constant = call.with_tensors({name: x.detach() for name, x in call.tensors().items()})
    needed = {name: x for name, x in call.tensors().items() if x.requires_grad or name in ("q", "k", "v")}
    learned = {name: at_least_float32(x.detach()) for name, x in needed.items()}
    sums = {name: torch.zeros_like(x) for name, x in learned.items()}
    for rows in _row_blocks(call):

        def block(own: dict[str, Tensor], rows: slice = rows) -> Forward:
            return whole_rows(constant.with_tensors(own), rows)

        # Operators run below autograd, which torch.func does not mind.
        pull = torch.func.vjp(block, learned)[1]
        (gradients,) = pull((d_out[:, :, rows], d_lse[:, :, rows]))
        for name, gradient in gradients.items():
            sums[name] += gradient
    return {name: total.to(needed[name].dtype) for name, total in sums.items()}


def _row_blocks(call: AttentionCall) -> Iterator[slice]:
    count = max(1, BLOCK_SCORES // max(1, call.batch * call.heads * call.keys))
    for row in range(0, call.queries, count):
        yield slice(row, min(row + count, call.queries))
