"""Ring attention: this process's queries with the keys of all processes, forward and backward.

    forward    own chunks first; then in step t from process rank - t, while the keys of step t + 1 are on their way
    backward   the same again: keys and values of others are not kept but sent a second time, and their gradients return

Keys and values go from process to process directly, and only as far as they are seen: what a window or documents hide
is not sent, and neither is what provably has no weight (skipping.py). Outputs are joined by their log-sum-exp
(`lw.merge`). So memory per process falls as 1 / n with the sequence, and attention is computed twice. All sums are in
an order that does not depend on time: the same processes give the same bits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lengthwise.attention import merge
from lengthwise.attention.call import is_skipping
from lengthwise.bias import Axes, Bias, LevelBias, SumBias, at_least_float32
from lengthwise.distributed.call import Block, RingCall
from lengthwise.distributed.collectives import Transfer, gather_all, transfer
from lengthwise.distributed.sequence import SharedSequence
from lengthwise.distributed.sharding import owned
from lengthwise.distributed.skipping import gather_peaks, with_weight
from lengthwise.errors import describe
from lengthwise.token_layout import TokenLayout, Window

GRADIENT_TAGS = 1000
"""The tags of gradients begin here, above those of keys and values."""


def ring_attend(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head query dim"],
    v: Float[Tensor, "batch kv_head query value"],
    *,
    layout: TokenLayout,
    bias: Bias | None = None,
    rescore: object = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    logit_scale: Float[Tensor, "#batch #head #query"] | None = None,
    sink: Float[Tensor, " head"] | Float[Tensor, "#batch head #query"] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`lw.attend` of this process's tokens as queries with the tokens of all processes as keys.

    The layout is that of `spread`, and q, k, v and the bias are of this process's tokens. All processes of the group
    call it alike. `lw.attend` does so by itself for such a layout.
    """
    sequence = shared_sequence(layout)
    if rescore is not None:
        raise NotImplementedError(
            f"ring attention cannot rescore, got {type(rescore).__name__}: it needs all keys of a row at once"
        )
    tokens = layout.query_count
    if q.shape[2:3] != (tokens,) or k.shape[2:3] != (tokens,) or v.shape[2:3] != (tokens,):
        raise ValueError(
            f"q, k and v must have this process's {tokens} tokens, got {q.shape[2]}, {k.shape[2]} and {v.shape[2]}; "
            "see take"
        )
    parts: dict[str, tuple[Tensor, Axes]] = {
        "q": (q, {"head": 1, "query": 2}),
        "k": (k, {"head": 1, "key": 2}),
        "v": (v, {"head": 1, "key": 2}),
    }
    if sink is not None and sink.ndim == 1:
        sink = sink[None, :, None]
    for name, x in (("logit_scale", logit_scale), ("sink", sink)):
        if x is not None:
            parts[name] = (x, {"head": 1, "query": 2})
    positions: dict[str, str] = {}
    if bias is not None:
        _check_bias(bias, tokens)
        axes = bias.axes()
        for name, x in bias.tensors().items():
            own = axes.get(name, {})
            if x is layout.query:
                # Those of the layout are known everywhere: they need not travel, and a backend sees that they are its.
                positions[name] = "key" if "key" in own else "query"
            else:
                parts[f"bias.{name}"] = (x, own)
    call = RingCall(
        sequence=sequence,
        axes={name: own for name, (_, own) in parts.items()},
        bias=None if bias is None else bias.detached(),
        positions=positions,
        window=window,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=softcap,
        backend=backend,
        heads_per_key=max(1, q.shape[1] // max(1, k.shape[1])),
        skips=is_skipping(),
    )
    out, lse = _RingAttention.apply(call, *(x for x, _ in parts.values()))
    return (out, lse) if return_lse else out


def shared_sequence(layout: TokenLayout) -> SharedSequence:
    """What a layout of `spread` knows of the whole sequence; an error for any other."""
    if not isinstance(layout, TokenLayout) or not isinstance(layout.ring, SharedSequence):
        got = "one of a single process" if isinstance(layout, TokenLayout) else describe(layout)
        raise ValueError(f"the layout must be one that is spread over processes, got {got}; use spread")
    return layout.ring


def _check_bias(bias: Bias, tokens: int) -> None:
    """An error for a bias that is not of this process's tokens, or that cannot be cut by queries and keys."""
    if bias.shape[2:] != (tokens, tokens):
        raise ValueError(
            f"the bias must be of this process's {tokens} tokens, got {bias.shape}; make it of this layout"
        )
    terms = bias.terms if isinstance(bias, SumBias) else (bias,)
    if any(isinstance(term, LevelBias) and term.step is not None for term in terms):
        raise ValueError(
            "the levels of a LevelBias must be sums over the tokens of all processes, got steps of this one's; give "
            "LevelBias.of_steps ring=layout.ring"
        )
    for name, own in bias.axes().items():
        if "query" in own and "key" in own:
            raise NotImplementedError(
                f"a bias that is spread over processes must have tensors of queries and of keys, got {name} of both in "
                f"a {type(bias).__name__}; describe it, e.g. as a FunctionBias"
            )


@dataclass(frozen=True)
class Plan:
    """What is computed here, and what every process gets of every chunk of others."""

    own: list[Block]
    """With keys of this process."""
    others: list[Block]
    requests: list[dict[int, slice]]
    """By process, the slots that it gets of a chunk, by the chunk's number."""


def diagonal(call: RingCall) -> list[Block]:
    """The own chunks, each with itself: every row has a key there."""
    chunks = call.sequence.chunks
    return [Block(i, chunks[i].slots, i, chunks[i].slots) for i in call.sequence.own]


def make_plan(call: RingCall, named: Mapping[str, Tensor], lse: Tensor) -> Plan:
    """What else is to be done, when the log-sum-exp of the own chunks is known; the same requests in all processes."""
    sequence, chunks = call.sequence, call.sequence.chunks
    every = [
        Block(a, chunks[a].slots, b, slots)
        for a, by_key in enumerate(sequence.visible(call.window))
        for b, slots in enumerate(by_key)
        if a != b and slots.start < slots.stop
    ]
    blocks = [block for block in every if block.query in sequence.own]
    peaks = gather_peaks(call, named) if call.skips else None
    if peaks is None:
        requests = [_request(p, sequence.size, every) for p in range(sequence.size)]
    else:
        blocks = [part for block in blocks for part in with_weight(call, block, named, lse, peaks)]
        own = _request(sequence.rank, sequence.size, blocks)
        ends = [(own[b].start, own[b].stop) if b in own else (0, 0) for b in range(len(chunks))]
        table = gather_all(torch.tensor(ends, device=lse.device), sequence.group).tolist()
        requests = [{b: slice(*ends) for b, ends in enumerate(row) if ends[0] < ends[1]} for row in table]
    return Plan(
        [block for block in blocks if block.key in sequence.own],
        [block for block in blocks if block.key not in sequence.own],
        requests,
    )


def _request(process: int, processes: int, blocks: Sequence[Block]) -> dict[int, slice]:
    """What a process needs of the chunks of others for its blocks."""
    own = owned(process, processes)
    needed: dict[int, slice] = {}
    for block in blocks:
        if block.query in own and block.key not in own:
            before = needed.get(block.key, block.keys)
            needed[block.key] = slice(min(before.start, block.keys.start), max(before.stop, block.keys.stop))
    return dict(sorted(needed.items()))


class Exchange:
    """The keys of others step by step, and the gradients of keys back to their owners."""

    def __init__(self, call: RingCall, plan: Plan, named: Mapping[str, Tensor]) -> None:
        self.call, self.plan, self.named = call, plan, named
        self.sequence = call.sequence

    def arriving(self) -> Iterator[tuple[int, dict[int, dict[str, Tensor]]]]:
        """By step the keys' tensors of another process, while those of the next step are on their way."""
        steps = range(1, self.sequence.size)
        waiting = self._send_keys(1) if steps else None
        for step in steps:
            following = self._send_keys(step + 1) if step + 1 in steps else None
            assert waiting is not None
            yield step, waiting.wait()
            waiting = following

    def place(self, block: Block) -> slice:
        """Where the keys of a block lie among those that were received of their chunk, or among the own tokens."""
        if block.key in self.sequence.own:
            return self.sequence.chunks[block.key].local(block.keys)
        first = self.plan.requests[self.sequence.rank][block.key].start
        return slice(block.keys.start - first, block.keys.stop - first)

    def _peers(self, step: int) -> tuple[int, int]:
        """To whom keys go in a step, and from whom they are received."""
        rank, size = self.sequence.rank, self.sequence.size
        return (rank + step) % size, (rank - step) % size

    def _requested(self, by: int, owner: int) -> dict[int, slice]:
        """The slots that one process gets of the chunks of another."""
        return {b: slots for b, slots in self.plan.requests[by].items() if self.sequence.chunks[b].owner == owner}

    def _send_keys(self, step: int) -> Transfer:
        """Begin a step: the keys' tensors that one process needs go there, and those of another are received."""
        (to, source), rank, named = self._peers(step), self.sequence.rank, self.named
        names = self.call.of_keys
        sent = []
        for number, slots in self._requested(to, rank).items():
            local = self.sequence.chunks[number].local(slots)
            sent += [named[name][self.call.index(name, named[name], key=local)].contiguous() for name in names]
        received = {
            number: {name: self._room(name, named[name], slots) for name in names}
            for number, slots in self._requested(rank, source).items()
        }
        return transfer(sent, to, received, source, group=self.sequence.group)

    def send_gradients(
        self, step: int, of_received: Mapping[int, Mapping[str, Tensor]], of_own: Mapping[str, Tensor]
    ) -> Transfer:
        """The way back: gradients of received keys go to their owner, those of own ones are received where they went.

        `of_own` has the gradients that are wanted, by name.
        """
        to, source = self._peers(step)
        received = {
            number: {name: self._room(name, gradient, slots) for name, gradient in of_own.items()}
            for number, slots in self._requested(to, self.sequence.rank).items()
        }
        sent = [own[name] for own in of_received.values() for name in of_own]
        return transfer(sent, source, received, to, group=self.sequence.group, tag=GRADIENT_TAGS)

    def add_returned(self, step: int, returning: Transfer, of_own: Mapping[str, Tensor]) -> None:
        """Add the gradients that another process has of own keys."""
        to, _ = self._peers(step)
        for number, returned in returning.wait().items():
            local = self.sequence.chunks[number].local(self.plan.requests[to][number])
            for name, gradient in returned.items():
                of_own[name][self.call.index(name, of_own[name], key=local)] += gradient

    def _room(self, name: str, like: Tensor, slots: slice) -> Tensor:
        """An empty tensor for the keys of some slots."""
        shape = list(like.shape)
        shape[self.call.axes[name]["key"]] = slots.stop - slots.start
        return like.new_empty(shape)


def add_output(
    call: RingCall,
    total: tuple[Tensor, Tensor],
    named: Mapping[str, Tensor],
    block: Block,
    keys: slice,
    *,
    sink: bool = False,
) -> None:
    """Join the output of one block, whose keys lie at `keys`, to that of the blocks before."""
    indices = call.indices(named, block, keys)
    rows = indices["q"][:3]
    part = call.attend({name: x[indices[name]] for name, x in named.items()}, block, sink=sink)
    out, lse = merge((total[0][rows], total[1][rows]), part)
    total[0][rows], total[1][rows] = out, lse


def add_gradients(
    call: RingCall,
    upstream: tuple[Tensor, Tensor, Tensor, Tensor],
    named: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    block: Block,
    keys: slice,
    *,
    sink: bool = False,
) -> None:
    """Add what one block gives to the gradients of some tensors, from those of all blocks' output.

    With share = exp(own lse - lse) the output is the sum of share * own output. `upstream` is the gradient of the
    output, that of the log-sum-exp, the output and the log-sum-exp.
    """
    indices = call.indices(named, block, keys)
    rows = indices["q"][:3]
    d_out, d_lse, out, lse = (x[rows] for x in upstream)
    picked = {name: x[indices[name]] for name, x in named.items()}
    leaves = {name: picked[name].detach().requires_grad_() for name in gradients}
    with torch.enable_grad():
        own_out, own_lse = call.attend(picked | leaves, block, sink=sink)
    share = (own_lse.detach() - lse).exp().masked_fill(own_lse == -math.inf, 0)
    d_share = (own_out.detach() - out).mul_(d_out).sum(-1)
    d_own_lse = share * (d_lse + d_share)
    results = torch.autograd.grad(
        (own_out, own_lse),
        list(leaves.values()),
        ((share[..., None] * d_out).to(own_out.dtype), d_own_lse.to(own_lse.dtype)),
        allow_unused=True,
    )
    for (name, total), gradient in zip(gradients.items(), results, strict=True):
        if gradient is not None:
            total[indices[name]] += gradient


class _RingAttention(torch.autograd.Function):
    """The output and the log-sum-exp of this process's queries."""

    @staticmethod
    def forward(ctx: Any, call: RingCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(call.axes, tensors, strict=True))
        q, v, chunks = named["q"], named["v"], call.sequence.chunks
        dtype = at_least_float32(q[:0]).dtype
        total = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        for block in diagonal(call):
            add_output(call, total, named, block, chunks[block.key].own, sink=True)
        plan = make_plan(call, named, total[1])
        exchange = Exchange(call, plan, named)
        for block in plan.own:
            add_output(call, total, named, block, exchange.place(block))
        for _, pieces in exchange.arriving():
            for block in plan.others:
                if block.key in pieces:
                    add_output(call, total, named | pieces[block.key], block, exchange.place(block))
            del pieces
        ctx.call, ctx.plan = call, plan
        ctx.save_for_backward(*tensors, *total)
        return total[0].to(q.dtype), total[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        call, plan = ctx.call, ctx.plan
        *inputs, out, lse = ctx.saved_tensors
        named = {name: x.detach() for name, x in zip(call.axes, inputs, strict=True)}
        wanted = [name for name, needed in zip(named, ctx.needs_input_grad[1:], strict=True) if needed]
        gradients = {name: torch.zeros_like(at_least_float32(named[name])) for name in wanted}
        of_own = {name: gradients[name] for name in call.of_keys if name in gradients}
        exchange, chunks = Exchange(call, plan, named), call.sequence.chunks
        # A row that sees nothing has no lse to give a gradient to.
        upstream = at_least_float32(d_out), d_lse.masked_fill(lse == -math.inf, 0), out, lse
        for block in diagonal(call):
            add_gradients(call, upstream, named, gradients, block, chunks[block.key].own, sink=True)
        for block in plan.own:
            add_gradients(call, upstream, named, gradients, block, exchange.place(block))
        returning: Transfer | None = None
        for step, pieces in exchange.arriving():
            of_received = {
                number: {name: torch.zeros_like(at_least_float32(received[name])) for name in of_own}
                for number, received in pieces.items()
            }
            for block in plan.others:
                if block.key in pieces:
                    tensors, into = named | pieces[block.key], gradients | of_received[block.key]
                    add_gradients(call, upstream, tensors, into, block, exchange.place(block))
                    del tensors, into
            if returning is not None:
                exchange.add_returned(step - 1, returning, of_own)
            returning = exchange.send_gradients(step, of_received, of_own)
            del pieces, of_received
        if returning is not None:
            exchange.add_returned(call.sequence.size - 1, returning, of_own)
        return None, *(gradients[name].to(x.dtype) if name in gradients else None for name, x in named.items())
