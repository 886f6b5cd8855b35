"""Ring attention: this process's queries with the keys of all processes, forward and backward.

    forward    own keys first; then in step t those of process rank - t, a segment at a time, while the next segment is
               on its way
    backward   the same again: keys and values of others are not kept but sent a second time, and the gradients of a
               segment return as soon as all of its blocks are done

Keys and values go from process to process directly, and only as far as they are seen: what a window or documents hide
is not sent, and neither is what provably has no weight (skipping.py). Outputs are joined by their log-sum-exp
(`lw.merge`). So memory per process falls as 1 / n with the sequence: beside its own tokens' numbers a process holds
those of a few segments. Attention is computed twice. All sums are in an order that does not depend on time: the same
processes give the same bits.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lengthwise.attention import checked_call, merge
from lengthwise.bias import Axes, Bias, LevelBias, at_least_float32, flat_terms
from lengthwise.distributed.call import Block, RingCall
from lengthwise.distributed.collectives import Transfer, gather_all, transfer
from lengthwise.distributed.sequence import SharedSequence
from lengthwise.distributed.skipping import gather_peaks, with_weight
from lengthwise.errors import describe
from lengthwise.token_layout import TokenLayout, Window

NEAR = 4
"""A segment of queries meets so many segments of its chunk in one block, its own among them: there the backend itself
skips what has no weight, by a sharper bound than the one over processes."""


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
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] != tokens:
            raise ValueError(f"{name} must have this process's {tokens} tokens, got {x.shape[2]}; see take")
    checked = checked_call(
        q,
        k,
        v,
        layout=replace(layout, ring=None),
        bias=bias,
        window=window,
        scale=scale,
        softcap=softcap,
        logit_scale=logit_scale,
        sink=sink,
        return_lse=return_lse,
    )
    parts: dict[str, tuple[Tensor, Axes]] = {
        "q": (q, {"head": 1, "query": 2}),
        "k": (k, {"head": 1, "key": 2}),
        "v": (v, {"head": 1, "key": 2}),
    }
    for name, extra in (("logit_scale", logit_scale), ("sink", checked.sink)):
        if extra is not None:
            parts[name] = (extra, {"head": 1, "query": 2})
    positions: dict[str, str] = {}
    if bias is not None:
        _check_bias(bias)
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
        scale=checked.scale,
        softcap=checked.softcap,
        backend=backend,
        heads_per_key=checked.group,
        skips=checked.skip,
    )
    out, lse = _RingAttention.apply(call, *(x for x, _ in parts.values()))
    return (out, lse) if return_lse else out


def shared_sequence(layout: TokenLayout) -> SharedSequence:
    """What a layout of `spread` knows of the whole sequence; an error for any other."""
    if not isinstance(layout, TokenLayout) or not isinstance(layout.ring, SharedSequence):
        got = "one of a single process" if isinstance(layout, TokenLayout) else describe(layout)
        raise ValueError(f"the layout must be one that is spread over processes, got {got}; use spread")
    return layout.ring


def _check_bias(bias: Bias) -> None:
    """An error for a bias that cannot be cut by queries and keys."""
    if any(isinstance(term, LevelBias) and term.step is not None for term in flat_terms(bias)):
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
    """What is computed here, and what every process gets of every segment of others."""

    own: list[Block]
    """With keys of this process."""
    others: dict[int, list[Block]]
    """By the segment of keys."""
    requests: list[dict[int, slice]]
    """By process, the slots that it gets of a segment, by the segment's number."""

    def blocks_of(self, received: int | None) -> list[Block]:
        """Those with the keys of a segment of another process."""
        return [] if received is None else self.others[received]


def near_blocks(call: RingCall) -> list[Block]:
    """Each of the own segments with itself and the ones before it: every row has a key there."""
    segments, visible = call.sequence.segments, call.sequence.visible(call.window)
    blocks = []
    for number in call.sequence.own_segments:
        own = segments[number]
        first = near_segments(call, number).start
        seen = max(segments[first].first, min(own.first, visible[number].start))
        blocks.append(Block(number, own.slots, first, slice(seen, own.stop)))
    return blocks


def near_segments(call: RingCall, number: int) -> range:
    """The segments of keys that lie in one block with a segment of queries."""
    in_chunk = number % (len(call.sequence.segments) // len(call.sequence.chunks))
    return range(number - min(NEAR - 1, in_chunk), number + 1)


def make_plan(call: RingCall, named: Mapping[str, Tensor], lse: Tensor) -> Plan:
    """What else is to be done, when the log-sum-exp of near keys is known; the same requests in all processes."""
    sequence, segments = call.sequence, call.sequence.segments
    every = [
        Block(a, segments[a].slots, b, slice(max(seen.start, key.first), min(seen.stop, key.stop)))
        for a, seen in enumerate(sequence.visible(call.window))
        for near in [near_segments(call, a)]
        for b, key in enumerate(segments)
        if seen.start < key.stop and key.first < seen.stop and b not in near
    ]
    blocks = [block for block in every if segments[block.query].owner == sequence.rank]
    peaks = gather_peaks(call, named) if call.skips else None
    if peaks is None:
        requests = [_request(call, process, every) for process in range(sequence.size)]
    else:
        blocks = [part for block in blocks for part in with_weight(call, block, named, lse, peaks)]
        own = _request(call, sequence.rank, blocks)
        ends = [(own[b].start, own[b].stop) if b in own else (0, 0) for b in range(len(segments))]
        table = gather_all(torch.tensor(ends, device=lse.device), sequence.group).tolist()
        requests = [{b: slice(*ends) for b, ends in enumerate(row) if ends[0] < ends[1]} for row in table]
    return Plan(
        [block for block in blocks if segments[block.key].owner == sequence.rank],
        {b: [block for block in blocks if block.key == b] for b in requests[sequence.rank]},
        requests,
    )


def _request(call: RingCall, process: int, blocks: Sequence[Block]) -> dict[int, slice]:
    """What a process needs of the segments of others for its blocks."""
    segments = call.sequence.segments
    needed: dict[int, slice] = {}
    for block in blocks:
        if segments[block.query].owner == process != segments[block.key].owner:
            before = needed.get(block.key, block.keys)
            needed[block.key] = slice(min(before.start, block.keys.start), max(before.stop, block.keys.stop))
    return dict(sorted(needed.items()))


@dataclass(frozen=True)
class Turn:
    """One exchange: a segment goes to one process, and one of another process is received; either may be missing."""

    number: int
    """Of those of the same two processes."""
    to: int
    sent: int | None
    source: int
    received: int | None


class Exchange:
    """The keys of others segment by segment, and the gradients of keys back to their owners."""

    def __init__(self, call: RingCall, plan: Plan, named: Mapping[str, Tensor]) -> None:
        self.call, self.plan, self.named = call, plan, named
        self.sequence = call.sequence
        self.names = call.of_keys

    def turns(self) -> list[Turn]:
        """All exchanges, in an order in which nobody waits for what another process does later.

        NCCL looks at no tags and ends what it began first. So a turn has the same place in the list of every process,
        and one that has less to exchange than others has turns in which it does nothing.
        """
        rank, size = self.sequence.rank, self.sequence.size
        pairs = Counter(
            (process, self.sequence.segments[number].owner)
            for process, own in enumerate(self.plan.requests)
            for number in own
        )
        longest: Counter[int] = Counter()
        for (process, owner), count in pairs.items():
            step = (process - owner) % size
            longest[step] = max(longest[step], count)
        turns = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            sent, received = self._requested(to, rank), self._requested(rank, source)
            every = zip_longest(range(longest[step]), sent, received)
            turns += [Turn(number, to, own, source, other) for number, own, other in every]
        return turns

    def arriving(self) -> Iterator[tuple[Turn, dict[str, Tensor]]]:
        """By turn the keys' tensors of another process, while those of the next turn are on their way."""
        turns = self.turns()
        following = self._send_keys(turns[0]) if turns else None
        for turn, after in zip_longest(turns, turns[1:]):
            waiting, following = following, self._send_keys(after) if after is not None else None
            assert waiting is not None
            yield turn, waiting.wait()

    def place(self, block: Block) -> slice:
        """Where the keys of a block lie among those that were received of their segment, or among the own tokens."""
        segment, rank = self.sequence.segments[block.key], self.sequence.rank
        if segment.owner == rank:
            return segment.local(block.keys)
        first = self.plan.requests[rank][block.key].start
        return slice(block.keys.start - first, block.keys.stop - first)

    def send_gradients(self, turn: Turn, of_received: Mapping[str, Tensor], of_own: Mapping[str, Tensor]) -> Transfer:
        """The way back: gradients of received keys go to their owner, those of own ones are received where they went.

        Both have the gradients that are wanted, by name.
        """
        received = self._room(of_own, turn.sent, turn.to)
        return self._transfer(turn, [*of_received.values()], turn.source, received, turn.to, back=True)

    def add_returned(self, turn: Turn, returning: Transfer, of_own: Mapping[str, Tensor]) -> None:
        """Add the gradients that another process has of own keys."""
        for name, gradient in returning.wait().items():
            of_own[name][self.call.index(name, of_own[name], key=self._sent_slots(turn))] += gradient

    def _requested(self, by: int, owner: int) -> list[int]:
        """The segments of one process that another one gets."""
        return [b for b in self.plan.requests[by] if self.sequence.segments[b].owner == owner]

    def _sent_slots(self, turn: Turn) -> slice:
        """Where what is sent lies among the own tokens."""
        assert turn.sent is not None
        return self.sequence.segments[turn.sent].local(self.plan.requests[turn.to][turn.sent])

    def _send_keys(self, turn: Turn) -> Transfer:
        """Begin a turn: the keys' tensors that one process needs go there, and those of another are received."""
        named, sent = {name: self.named[name] for name in self.names}, []
        if turn.sent is not None:
            local = self._sent_slots(turn)
            sent = [x[self.call.index(name, x, key=local)].contiguous() for name, x in named.items()]
        return self._transfer(turn, sent, turn.to, self._room(named, turn.received, self.sequence.rank), turn.source)

    def _transfer(
        self, turn: Turn, sent: list[Tensor], to: int, received: dict[str, Tensor], source: int, *, back: bool = False
    ) -> Transfer:
        tag = (2 * turn.number + back) * len(self.names)
        return transfer(sent, to, received, source, group=self.sequence.group, tag=tag)

    def _room(self, like: Mapping[str, Tensor], number: int | None, by: int) -> dict[str, Tensor]:
        """Empty tensors for what a process gets of a segment."""
        if number is None:
            return {}
        slots, shapes = self.plan.requests[by][number], {name: list(x.shape) for name, x in like.items()}
        for name, shape in shapes.items():
            axis = self.call.axes[name]["key"]
            if shape[axis] > 1:  # one of 1 is for all keys, and is sent as it is
                shape[axis] = slots.stop - slots.start
        return {name: x.new_empty(shapes[name]) for name, x in like.items()}


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
        q, v = named["q"], named["v"]
        dtype = at_least_float32(q[:0]).dtype
        total = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        for block in near_blocks(call):
            add_output(call, total, named, block, call.sequence.segments[block.key].local(block.keys), sink=True)
        plan = make_plan(call, named, total[1])
        exchange = Exchange(call, plan, named)
        for block in plan.own:
            add_output(call, total, named, block, exchange.place(block))
        for turn, received in exchange.arriving():
            for block in plan.blocks_of(turn.received):
                add_output(call, total, named | received, block, exchange.place(block))
            del received
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
        exchange = Exchange(call, plan, named)
        # A row that sees nothing has no lse to give a gradient to.
        upstream = at_least_float32(d_out), d_lse.masked_fill(lse == -math.inf, 0), out, lse
        for block in near_blocks(call):
            add_gradients(call, upstream, named, gradients, block, exchange.place(block), sink=True)
        for block in plan.own:
            add_gradients(call, upstream, named, gradients, block, exchange.place(block))
        returning: tuple[Turn, Transfer] | None = None
        for turn, received in exchange.arriving():
            of_received = {name: torch.zeros_like(at_least_float32(received[name])) for name in of_own if received}
            for block in plan.blocks_of(turn.received):
                add_gradients(call, upstream, named | received, gradients | of_received, block, exchange.place(block))
            if returning is not None:
                exchange.add_returned(*returning, of_own)
            returning = turn, exchange.send_gradients(turn, of_received, of_own)
            del received, of_received
        if returning is not None:
            exchange.add_returned(*returning, of_own)
        return None, *(gradients[name].to(x.dtype) if name in gradients else None for name, x in named.items())
