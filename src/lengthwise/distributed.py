"""Sequences that several processes share: ring attention with every kind of described bias.

    part = spread(lw.layout(131_072), group)            the layout of this process's tokens
    x = take(tokens, part)                              its part of what every process has
    bias = encoding.bias(x, part)                       hooks as always, of these tokens alone
    out = lw.attend(q, k, v, layout=part, bias=bias)    these queries with the keys of all processes

A described bias has tensors of queries, tensors of keys, and shared ones such as a table. So those of the keys travel
with the keys, and the bias of any two chunks is put together where it is needed, with its true positions.

Every process has two chunks of the sequence, one from its start and one from its end: under causality all have the same
work. Keys and values go from process to process directly and only as far as they are seen: what a window or documents
hide is not sent, and neither is what provably has no weight. Outputs are joined by their log-sum-exp (`lw.merge`).

    forward    own chunks first; then in step t from process rank - t, while the keys of step t + 1 are on their way
    backward   the same again: keys and values of others are not kept but sent a second time, and their gradients return

So memory per process falls as 1 / n with the sequence, and attention is computed twice. All sums are in an order that
does not depend on time: the same processes give the same bits. Levels and angles that are sums over tokens are float64
sums of each chunk, and of the chunks before it.

A block of keys is left out for a head where, of every row,

    m (|q| max|k| scale + largest bias in the block) - lse of the own chunk < log(half of the smallest float32)

m is the row's logit scale. Then every weight in it is 0 in float32, forward and backward: nothing changes.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from lengthwise.attention import attend, merge
from lengthwise.attention.call import is_skipping
from lengthwise.attention.visibility import Visibility
from lengthwise.bias import Axes, Bias, LevelBias, at_least_float32, block_peaks
from lengthwise.encodings.registry import find
from lengthwise.errors import describe
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.model.layout import make_layout
from lengthwise.model.losses import IGNORED, head_loss
from lengthwise.token_layout import Band, Ring, TokenLayout, Window

__all__ = ["gather", "joined", "ring_attend", "ring_loss", "spread", "take"]

BLOCKS = 64
"""Into how many blocks a chunk of keys is cut at most, to see which have weight."""
WIDTH = 64
"""How many keys a block has at least."""
RETURNS = 1000
"""The tags of gradients begin here, above those of keys and values."""


@dataclass(frozen=True)
class Chunk:
    """A run of slots that one process has."""

    first: int
    count: int
    owner: int
    place: int
    """Where it begins among the owner's tokens."""

    @property
    def stop(self) -> int:
        """The slot behind its last."""
        return self.first + self.count

    def local(self, first: int, stop: int) -> slice:
        """Where slots of it lie among the owner's tokens."""
        return slice(self.place + first - self.first, self.place + stop - self.first)


def zigzag(length: int, processes: int) -> list[Chunk]:
    """Two chunks for each process, as long as each other but for one token: the first ones forth, the others back.

    >>> [(chunk.first, chunk.count, chunk.owner) for chunk in zigzag(10, 2)]
    [(0, 2, 0), (2, 3, 1), (5, 2, 1), (7, 3, 0)]
    """
    borders = [i * length // (2 * processes) for i in range(2 * processes + 1)]
    chunks: list[Chunk] = []
    for i in range(2 * processes):
        twin = 2 * processes - 1 - i
        place = 0 if i < processes else borders[twin + 1] - borders[twin]
        chunks.append(Chunk(borders[i], borders[i + 1] - borders[i], min(i, twin), place))
    return chunks


@dataclass(frozen=True, eq=False)
class ProcessRing(Ring):
    """One process's two chunks of a sequence."""

    whole: TokenLayout
    slots: Int[Tensor, " token"]
    pieces: tuple[tuple[slice, int], ...]
    chunks: list[Chunk]
    group: ProcessGroup | None
    rank: int
    size: int
    _seen: dict[Any, list[list[tuple[int, int]]]] = field(default_factory=dict)
    """By window, the slots of each chunk of keys that each chunk of queries sees."""

    @property
    def own(self) -> tuple[int, int]:
        """The numbers of this process's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def in_order(self, gathered: Tensor) -> list[Tensor]:
        """(process, chunk, ...) as a list by the number of the chunk."""
        return [gathered[chunk.owner, int(i >= self.size)] for i, chunk in enumerate(self.chunks)]

    def running_sums(self, step: Float[Tensor, "*rest token"]) -> Float[Tensor, "*rest token"]:
        """Float64 sums of each chunk, and of all before it."""
        sums = [step[..., own].cumsum(-1, dtype=torch.float64) for own, _ in self.pieces]
        totals = self.in_order(_gathered(torch.stack([own[..., -1] for own in sums]), self.group))
        before = torch.stack([torch.zeros_like(totals[0]), *totals[:-1]]).cumsum(0)
        return torch.cat([own + before[i][..., None] for own, i in zip(sums, self.own, strict=True)], -1)

    def before(
        self, numbers: Float[Tensor, "batch head token channel"], count: int
    ) -> list[Float[Tensor, "batch head earlier channel"]]:
        """From the last numbers of every chunk, which all processes get."""
        tails = [numbers[:, :, own][:, :, -count:] if count else numbers[:, :, :0] for own, _ in self.pieces]
        padded = torch.stack([F.pad(tail, (0, 0, count - tail.shape[2], 0)) for tail in tails])
        every = self.in_order(_gathered(padded, self.group))
        halos = []
        for number in self.own:
            parts: list[Tensor] = []
            missing = count
            for i in reversed(range(number)):
                taken = min(missing, self.chunks[i].count)
                parts.insert(0, every[i][:, :, count - taken :])
                missing -= taken
            halos.append(torch.cat(parts, 2) if parts else every[0][:, :, :0])
        return halos

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, key_mask: Tensor | None = None, **options: Any
    ) -> Any:
        """`ring_attend`, for `lw.attend`."""
        if key_mask is not None or not causal:
            raise ValueError("a layout has its own key_mask and causal, got them beside it; give them to lw.layout")
        return ring_attend(q, k, v, **options)

    def seen(self, window: Window | None) -> list[list[tuple[int, int]]]:
        """From the first to behind the last slot of each chunk of keys that each chunk of queries may see.

        Padding between is not looked at. (0, 0) where it sees none.
        """
        if window not in self._seen:
            bands = (window,) if isinstance(window, Band) else window if isinstance(window, tuple) else ()
            begin, end, _ = Visibility(self.whole, window if isinstance(window, int) else None, bands).spans()
            end = end.where(end > begin, 0)
            hulls = []
            for chunk in self.chunks:
                low, high = (x[:, chunk.first : chunk.stop] for x in (begin, end))
                first, stop = int(low.amin()), int(high.amax())
                clipped = [(max(first, key.first), min(stop, key.stop)) for key in self.chunks]
                hulls.append([(a, b) if a < b else (0, 0) for a, b in clipped])
            self._seen[window] = hulls
        return self._seen[window]


def spread(layout: TokenLayout, group: ProcessGroup | None = None) -> TokenLayout:
    """The layout of the tokens that this process has of a sequence, for all hooks and for `lw.attend`.

    `layout` is that of all tokens, the same in all processes of the group. A length need not be a multiple of anything:
    chunks differ by one token at most.
    """
    if not dist.is_initialized():
        raise RuntimeError("a process group must be there to spread a sequence over, got none; start with torchrun")
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {describe(layout)}; make one with lw.layout")
    if layout.ring is not None:
        raise ValueError("the layout must be that of all tokens, got a part that is spread already")
    if layout.mask is not None:
        raise NotImplementedError(
            "an explicit mask cannot be spread over processes, got one; use documents or a window"
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    length = layout.key_count
    if layout.query_count != length or layout.start != 0:
        raise ValueError(
            f"the layout must be one pass over all tokens, got {layout.query_count} queries and {length} keys; a cache "
            "cannot be spread"
        )
    if length < 2 * size:
        raise ValueError(
            f"{size} processes can share a sequence of {2 * size} tokens or more, two chunks each, got {length}; pad "
            "it, or use fewer processes"
        )
    query_index, key_index = layout.indices()
    # Counted once, over all tokens, where a token's number is not its slot.
    whole = replace(layout, query_index=query_index, key_index=key_index) if _counts(layout) else layout
    chunks = zigzag(length, size)
    own = [chunks[i] for i in (rank, 2 * size - 1 - rank)]
    slots = torch.cat([torch.arange(c.first, c.stop, device=layout.key.device) for c in own])
    ring = ProcessRing(
        whole=whole,
        slots=slots,
        pieces=tuple((slice(c.place, c.place + c.count), c.first) for c in own),
        chunks=chunks,
        group=group,
        rank=rank,
        size=size,
    )
    parts = {
        name: None if x is None else x.index_select(1, slots)
        for name, x in (
            ("key", layout.key),
            ("key_mask", layout.key_mask),
            ("key_documents", layout.key_documents),
            ("key_index", key_index),
        )
    }
    assert parts["key"] is not None
    return TokenLayout(
        query=parts["key"],
        key=parts["key"],
        query_mask=parts["key_mask"],
        key_mask=parts["key_mask"],
        query_documents=parts["key_documents"],
        key_documents=parts["key_documents"],
        causal=layout.causal,
        query_index=parts["key_index"],
        key_index=parts["key_index"],
        facts=layout.facts,
        ring=ring,
    )


def _counts(layout: TokenLayout) -> bool:
    return layout.key_mask is not None or layout.key_documents is not None


def take(x: Tensor, layout: TokenLayout, dim: int = 1) -> Tensor:
    """This process's tokens of a tensor that has those of the whole sequence along `dim`."""
    return x.index_select(dim, _ring_of(layout).slots.to(x.device))


def gather(x: Tensor, layout: TokenLayout, dim: int = 1) -> Tensor:
    """The whole sequence along `dim` from the parts of all processes, in each of them; with gradients."""
    ring = _ring_of(layout)
    longest = max(chunk.count for chunk in ring.chunks)
    parts = [x.narrow(dim, own.start, own.stop - own.start) for own, _ in ring.pieces]
    padding = [0, 0] * (x.ndim - 1 - dim % x.ndim)
    padded = torch.stack([F.pad(part, (*padding, 0, longest - part.shape[dim])) for part in parts])
    every = ring.in_order(_gathered(padded, ring.group))
    return torch.cat([part.narrow(dim, 0, c.count) for part, c in zip(every, ring.chunks, strict=True)], dim)


def _ring_of(layout: TokenLayout) -> ProcessRing:
    if not isinstance(layout, TokenLayout) or not isinstance(layout.ring, ProcessRing):
        raise ValueError(f"the layout must be one that is spread over processes, got {_kind(layout)}; use spread")
    return layout.ring


def _kind(layout: object) -> str:
    return "one of a single process" if isinstance(layout, TokenLayout) else describe(layout)


class _Gather(torch.autograd.Function):
    """The same tensor of every process; its gradient is the sum of those of all, in the order of the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, d_every: Tensor) -> tuple[Tensor, None]:
        gradients = _all_gather(d_every, ctx.group)[:, dist.get_rank(ctx.group)]
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        return total, None


def _gathered(x: Tensor, group: ProcessGroup | None) -> Float[Tensor, "process *shape"]:
    gathered: Tensor = _Gather.apply(x, group)
    return gathered


def _all_gather(x: Tensor, group: ProcessGroup | None) -> Float[Tensor, "process *shape"]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)


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
    ring = _ring_of(layout)
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
    if isinstance(bias, LevelBias):
        bias = bias.summed()
    if sink is not None and sink.ndim == 1:
        sink = sink[None, :, None]
    if bias is not None and (bias.shape[2:] != (tokens, tokens)):
        raise ValueError(
            f"the bias must be of this process's {tokens} tokens, got {bias.shape}; make it of this layout"
        )
    parts: dict[str, tuple[Tensor, Axes]] = {
        "q": (q, {"head": 1, "query": 2}),
        "k": (k, {"head": 1, "key": 2}),
        "v": (v, {"head": 1, "key": 2}),
    }
    for name, x in (("logit_scale", logit_scale), ("sink", sink)):
        if x is not None:
            parts[name] = (x, {"head": 1, "query": 2})
    positions: dict[str, str] = {}
    if bias is not None:
        axes = bias.axes()
        for name, x in bias.tensors().items():
            own = axes.get(name, {})
            if "query" in own and "key" in own:
                raise NotImplementedError(
                    f"a bias that is spread over processes must have tensors of queries and of keys, got {name} of "
                    f"both in a {type(bias).__name__}; describe it, e.g. as a FunctionBias"
                )
            if x is layout.query:
                # Those of the layout are known everywhere: they need not travel, and a backend sees that they are its.
                positions[name] = "key" if "key" in own else "query"
            else:
                parts[f"bias.{name}"] = (x, own)
    call = _RingCall(
        ring=ring,
        axes={name: own for name, (_, own) in parts.items()},
        bias=None if bias is None else bias.detached(),
        positions=positions,
        window=window,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=softcap,
        backend=backend,
        group=max(1, q.shape[1] // max(1, k.shape[1])),
        skips=is_skipping() and bias is not None,
    )
    out, lse = _RingAttention.apply(call, *(x for x, _ in parts.values()))
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Job:
    """One block of scores: slots of an own chunk of queries with slots of a chunk of keys."""

    query: int
    rows: slice
    key: int
    keys: slice
    heads: tuple[int, ...] | None = None
    """Heads of the keys; None for all."""


@dataclass(frozen=True)
class _Plan:
    """What is computed here, and what every process gets of every chunk of others."""

    own: list[_Job]
    """With keys of this process."""
    others: list[_Job]
    requests: list[dict[int, slice]]
    """By process, the slots that it gets of a chunk, by the chunk's number."""


@dataclass(frozen=True, eq=False)
class _Transfer:
    """Tensors on their way."""

    works: list[Any]
    sent: list[Tensor]
    """Held until they are away."""
    received: dict[int, dict[str, Tensor]]
    """By the number of the chunk and by name."""

    def wait(self) -> dict[int, dict[str, Tensor]]:
        """What was received, once it is there."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True, eq=False)
class _RingCall:
    """One call but for its tensors, which are named "q", "k", "v", "logit_scale", "sink" and "bias.table"."""

    ring: ProcessRing
    axes: dict[str, Axes]
    bias: Bias | None
    positions: dict[str, str]
    """The bias's tensors that are the layout's own positions, of queries or of keys."""
    window: Window | None
    scale: float
    softcap: float | None
    backend: str
    group: int
    """How many heads of the queries share one of the keys."""
    skips: bool

    @property
    def of_keys(self) -> list[str]:
        """The names of what travels."""
        return [name for name, axes in self.axes.items() if "key" in axes]

    def index(
        self,
        name: str,
        x: Tensor,
        *,
        query: slice | None = None,
        key: slice | None = None,
        heads: tuple[int, ...] | None = None,
    ) -> tuple[Any, ...]:
        """Where the numbers of some queries, keys and heads of keys lie; an axis of 1 is for all of them."""
        index: list[Any] = [slice(None)] * x.ndim
        axes = self.axes[name]
        for role, part in (("query", query), ("key", key)):
            axis = axes.get(role)  # type: ignore[call-overload]
            if part is not None and axis is not None and x.shape[axis] > 1:
                index[axis] = part
        axis = axes.get("head")
        if heads is not None and axis is not None and x.shape[axis] > 1:
            group = 1 if name in ("k", "v") else self.group
            every = [head * group + i for head in heads for i in range(group)]
            index[axis] = torch.tensor(every, device=x.device)
        return tuple(index)

    def indices(self, named: Mapping[str, Tensor], job: _Job, keys: slice) -> dict[str, tuple[Any, ...]]:
        """Where a job's numbers lie in each tensor, if its keys lie at `keys`."""
        query = self.ring.chunks[job.query].local(job.rows.start, job.rows.stop)
        return {name: self.index(name, x, query=query, key=keys, heads=job.heads) for name, x in named.items()}

    def described(self, named: Mapping[str, Tensor], query: Tensor, key: Tensor) -> Bias | None:
        """The bias of some tensors, and of these positions where it has the layout's."""
        if self.bias is None:
            return None
        tensors = {name.removeprefix("bias."): x for name, x in named.items() if name.startswith("bias.")}
        own = {"query": query, "key": key}
        return self.bias.rebuilt(tensors | {name: own[side] for name, side in self.positions.items()})

    def run(self, picked: Mapping[str, Tensor], job: _Job, *, sink: bool) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of one job."""
        layout = self.ring.whole.block(job.rows, job.keys)
        return attend(
            picked["q"],
            picked["k"],
            picked["v"],
            layout=layout,
            bias=self.described(picked, layout.query, layout.key),
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            logit_scale=picked.get("logit_scale"),
            sink=picked.get("sink") if sink else None,
            return_lse=True,
            backend=self.backend,
        )

    def add(
        self,
        total: tuple[Tensor, Tensor],
        named: Mapping[str, Tensor],
        job: _Job,
        keys: slice,
        *,
        sink: bool = False,
    ) -> None:
        """Join the output of one job to that of the jobs before."""
        indices = self.indices(named, job, keys)
        rows = indices["q"][:3]
        part = self.run({name: x[indices[name]] for name, x in named.items()}, job, sink=sink)
        out, lse = merge((total[0][rows], total[1][rows]), part)
        total[0][rows], total[1][rows] = out, lse

    def pull(
        self,
        upstream: tuple[Tensor, Tensor, Tensor, Tensor],
        named: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        job: _Job,
        keys: slice,
        *,
        sink: bool = False,
    ) -> None:
        """Add what one job gives to the gradients of some tensors, from those of all jobs' output.

        With share = exp(own lse - lse) the output is the sum of share * own output.
        """
        indices = self.indices(named, job, keys)
        rows = indices["q"][:3]
        d_out, d_lse, out, lse = (x[rows] for x in upstream)
        picked = {name: x[indices[name]] for name, x in named.items()}
        leaves = {name: picked[name].detach().requires_grad_() for name in gradients}
        with torch.enable_grad():
            own_out, own_lse = self.run(picked | leaves, job, sink=sink)
        share = (own_lse.detach() - lse).exp().masked_fill(own_lse == -math.inf, 0)
        d_own_lse = share * (d_lse + (d_out * (own_out.detach() - out)).sum(-1))
        results = torch.autograd.grad(
            (own_out, own_lse),
            list(leaves.values()),
            ((share[..., None] * d_out).to(own_out.dtype), d_own_lse.to(own_lse.dtype)),
            allow_unused=True,
        )
        for (name, total), gradient in zip(gradients.items(), results, strict=True):
            if gradient is not None:
                total[indices[name]] += gradient

    def diagonal(self) -> list[_Job]:
        """The own chunks, each with itself: every row has a key there."""
        slots = {i: slice(chunk.first, chunk.stop) for i, chunk in enumerate(self.ring.chunks)}
        return [_Job(i, slots[i], i, slots[i]) for i in self.ring.own]

    def plan(self, named: Mapping[str, Tensor], lse: Tensor) -> _Plan:
        """What else is to be done, when the log-sum-exp of the own chunks is known."""
        ring, chunks = self.ring, self.ring.chunks
        seen = ring.seen(self.window)
        every = [
            _Job(a, slice(chunks[a].first, chunks[a].stop), b, slice(*run))
            for a, runs in enumerate(seen)
            for b, run in enumerate(runs)
            if a != b and run[0] < run[1]
        ]
        peaks = self.peaks(named) if self.skips else None
        if peaks is None:
            jobs = [job for job in every if job.query in ring.own]
            requests = [self.requests(p, every) for p in range(ring.size)]
        else:
            jobs = [part for job in every if job.query in ring.own for part in self.weighty(job, named, lse, peaks)]
            own = self.requests(ring.rank, jobs)
            ends = [(own[b].start, own[b].stop) if b in own else (0, 0) for b in range(len(chunks))]
            table = _all_gather(torch.tensor(ends, device=lse.device), ring.group).tolist()
            requests = [{b: slice(*ends) for b, ends in enumerate(row) if ends[0] < ends[1]} for row in table]
        mine = [job for job in jobs if job.key in ring.own]
        return _Plan(mine, [job for job in jobs if job.key not in ring.own], requests)

    def requests(self, process: int, jobs: Sequence[_Job]) -> dict[int, slice]:
        """What a process needs of the chunks of others for its jobs."""
        own = (process, 2 * self.ring.size - 1 - process)
        needed: dict[int, slice] = {}
        for job in jobs:
            if job.query in own and job.key not in own:
                before = needed.get(job.key, job.keys)
                needed[job.key] = slice(min(before.start, job.keys.start), max(before.stop, job.keys.stop))
        return needed

    def peaks(self, named: Mapping[str, Tensor]) -> dict[str, list[Tensor]] | None:
        """What bounds the scores of the blocks of each chunk, by name and by the chunk; None where nothing does."""
        assert self.bias is not None
        ring, (width, count) = self.ring, self.blocks
        by_chunk = []
        for own, first in ring.pieces:
            picked = {name: x[self.index(name, x, key=own)] for name, x in named.items()}
            positions = ring.whole.key[:, first : first + own.stop - own.start]
            bias = self.described(picked, positions, positions)
            peaks = None if bias is None else bias.key_peaks(width, count)
            if peaks is None:
                return None
            lengths = at_least_float32(picked["k"]).norm(dim=-1)
            by_chunk.append({"k": block_peaks(lengths, width, count).clamp(min=0), **peaks})
        return {
            name: ring.in_order(_all_gather(torch.stack([peaks[name] for peaks in by_chunk]), ring.group))
            for name in by_chunk[0]
        }

    @property
    def blocks(self) -> tuple[int, int]:
        """How many keys a block has, and how many blocks a chunk."""
        longest = max(chunk.count for chunk in self.ring.chunks)
        width = max(WIDTH, -(-longest // BLOCKS))
        return width, -(-longest // width)

    def weighty(
        self, job: _Job, named: Mapping[str, Tensor], lse: Tensor, peaks: Mapping[str, list[Tensor]]
    ) -> list[_Job]:
        """The parts of a job that may have weight: heads that need about as many keys of the chunk together."""
        width, _ = self.blocks
        chunk, key = self.ring.chunks[job.query], self.ring.chunks[job.key]
        needed = self.needed(job, named, lse, {name: x[job.key] for name, x in peaks.items()})
        last = -(-(job.keys.stop - key.first) // width)
        needed[..., last:] = False
        needed[..., : (job.keys.start - key.first) // width] = False
        firsts = needed.any(1).int().argmax(-1).tolist()
        used = needed.flatten(1).any(1).tolist()
        # Twice as many keys at most as a head needs, so that there are few calls.
        tails = {head: 1 << (last - firsts[head] - 1).bit_length() for head, is_used in enumerate(used) if is_used}
        parts = []
        for tail in sorted(set(tails.values())):
            heads = tuple(head for head, own in tails.items() if own == tail)
            rows = needed[list(heads)].any(0).any(-1).nonzero()
            parts.append(
                _Job(
                    job.query,
                    slice(chunk.first + int(rows[0]), chunk.first + int(rows[-1]) + 1),
                    job.key,
                    slice(max(job.keys.start, key.first + (last - tail) * width), job.keys.stop),
                    heads if len(heads) < len(used) else None,
                )
            )
        return parts

    def needed(
        self, job: _Job, named: Mapping[str, Tensor], lse: Tensor, peaks: Mapping[str, Tensor]
    ) -> Bool[Tensor, "kv_head row block"]:
        """Where a weight may be more than 0; NaN and infinity mean that it may."""
        chunk = self.ring.chunks[job.query]
        own = chunk.local(chunk.first, chunk.stop)
        picked = {name: x[self.index(name, x, query=own)] for name, x in named.items()}
        positions = self.ring.whole.query[:, chunk.first : chunk.stop]
        bias = self.described(picked, positions, positions)
        assert bias is not None
        lengths = at_least_float32(picked["q"]).norm(dim=-1) * abs(self.scale)
        upper = lengths[..., None] * peaks["k"].repeat_interleave(self.group, 1)[:, :, None]
        upper = upper + bias.ceiling(peaks)
        if "logit_scale" in picked:
            factor = at_least_float32(picked["logit_scale"])[..., None]
            upper = upper * factor.where(factor > 0, torch.nan)
        # One more, for the rounding of the bound itself.
        least = math.log(torch.finfo(lse.dtype).smallest_normal * torch.finfo(lse.dtype).eps / 2) - 1
        needed = ~(upper - lse[:, :, own, None] < least)
        return needed.any(0).unflatten(0, (-1, self.group)).any(1)

    def transfers(self, named: Mapping[str, Tensor], plan: _Plan) -> Iterator[tuple[int, dict[int, dict[str, Tensor]]]]:
        """Step by step the keys' tensors of other processes, while those of the next step are on their way."""
        waiting = self.send_keys(named, plan, 1) if self.ring.size > 1 else None
        for step in range(1, self.ring.size):
            following = self.send_keys(named, plan, step + 1) if step + 1 < self.ring.size else None
            assert waiting is not None
            yield step, waiting.wait()
            waiting = following

    def own_keys(self, job: _Job) -> slice:
        """Where the keys of a job lie among own tokens."""
        return self.ring.chunks[job.key].local(job.keys.start, job.keys.stop)

    def received_keys(self, job: _Job, plan: _Plan) -> slice:
        """Where the keys of a job lie among those that were received of their chunk."""
        first = plan.requests[self.ring.rank][job.key].start
        return slice(job.keys.start - first, job.keys.stop - first)

    def collect(self, gradients: Mapping[str, Tensor], returning: _Transfer, plan: _Plan, step: int) -> None:
        """Add the gradients that another process has of own keys."""
        to, _ = self.peers(step)
        for number, own in returning.wait().items():
            slots = plan.requests[to][number]
            local = self.ring.chunks[number].local(slots.start, slots.stop)
            for name, gradient in own.items():
                gradients[name][self.index(name, gradients[name], key=local)] += gradient

    def peers(self, step: int) -> tuple[int, int]:
        """To whom keys go in a step, and from whom they come."""
        return (self.ring.rank + step) % self.ring.size, (self.ring.rank - step) % self.ring.size

    def send_keys(self, named: Mapping[str, Tensor], plan: _Plan, step: int) -> _Transfer:
        """Begin a step: the keys' tensors that one process needs go there, and those of another are received."""
        ring, (to, source) = self.ring, self.peers(step)
        sent = []
        for number, slots in plan.requests[to].items():
            if ring.chunks[number].owner == ring.rank:
                local = ring.chunks[number].local(slots.start, slots.stop)
                sent += [named[name][self.index(name, named[name], key=local)].contiguous() for name in self.of_keys]
        received = {
            number: {name: self.room(named[name], name, slots) for name in self.of_keys}
            for number, slots in plan.requests[ring.rank].items()
            if ring.chunks[number].owner == source
        }
        return self.transfer(sent, to, received, source)

    def send_gradients(
        self, gradients: Mapping[int, Mapping[str, Tensor]], named: Mapping[str, Tensor], plan: _Plan, step: int
    ) -> _Transfer:
        """The way back: gradients of received keys go to their owner, those of own ones are received where they went.

        `named` has what gradients are wanted of.
        """
        ring, (to, source) = self.ring, self.peers(step)
        received = {
            number: {name: self.room(named[name], name, slots) for name in self.of_keys if name in named}
            for number, slots in plan.requests[to].items()
            if ring.chunks[number].owner == ring.rank
        }
        sent = [x for own in gradients.values() for x in own.values()]
        return self.transfer(sent, source, received, to, tag=RETURNS)

    def room(self, like: Tensor, name: str, slots: slice) -> Tensor:
        """An empty tensor for the keys of some slots."""
        shape = list(like.shape)
        shape[self.axes[name]["key"]] = slots.stop - slots.start
        return like.new_empty(shape)

    def transfer(
        self, sent: list[Tensor], to: int, received: dict[int, dict[str, Tensor]], source: int, tag: int = 0
    ) -> _Transfer:
        """Begin to send and to receive."""
        group, arriving = self.ring.group, [x for own in received.values() for x in own.values()]
        operations = [
            *(dist.P2POp(dist.isend, x, group=group, group_peer=to, tag=tag + i) for i, x in enumerate(sent)),
            *(dist.P2POp(dist.irecv, x, group=group, group_peer=source, tag=tag + i) for i, x in enumerate(arriving)),
        ]
        return _Transfer(dist.batch_isend_irecv(operations) if operations else [], sent, received)


class _RingAttention(torch.autograd.Function):
    """The output and the log-sum-exp of this process's queries; backward the keys of others are sent a second time."""

    @staticmethod
    def forward(ctx: Any, call: _RingCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(call.axes, tensors, strict=True))
        q, v = named["q"], named["v"]
        dtype = at_least_float32(q[:0]).dtype
        total = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        for job in call.diagonal():
            call.add(total, named, job, call.own_keys(job), sink=True)
        plan = call.plan(named, total[1])
        for job in plan.own:
            call.add(total, named, job, call.own_keys(job))
        for _, pieces in call.transfers(named, plan):
            for job in plan.others:
                if job.key in pieces:
                    call.add(total, named | pieces[job.key], job, call.received_keys(job, plan))
        ctx.call, ctx.plan = call, plan
        ctx.save_for_backward(*tensors, *total)
        return total[0].to(q.dtype), total[1]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        call, plan = ctx.call, ctx.plan
        *tensors, out, lse = ctx.saved_tensors
        named = {name: x.detach() for name, x in zip(call.axes, tensors, strict=True)}
        wanted = [name for name, needed in zip(named, ctx.needs_input_grad[1:], strict=True) if needed]
        gradients = {name: torch.zeros_like(at_least_float32(named[name])) for name in wanted}
        # A row that sees nothing has no lse to give a gradient to.
        upstream = at_least_float32(d_out), d_lse.masked_fill(lse == -math.inf, 0), out, lse
        for job in call.diagonal():
            call.pull(upstream, named, gradients, job, call.own_keys(job), sink=True)
        for job in plan.own:
            call.pull(upstream, named, gradients, job, call.own_keys(job))
        of_keys = {name: x for name, x in gradients.items() if name in call.of_keys}
        returning: _Transfer | None = None
        for step, pieces in call.transfers(named, plan):
            back = {
                number: {name: torch.zeros_like(at_least_float32(own[name])) for name in of_keys}
                for number, own in pieces.items()
            }
            for job in plan.others:
                if job.key in pieces:
                    keys = call.received_keys(job, plan)
                    call.pull(upstream, named | pieces[job.key], gradients | back[job.key], job, keys)
            if returning is not None:
                call.collect(of_keys, returning, plan, step - 1)
            returning = call.send_gradients(back, of_keys, plan, step)
        if returning is not None:
            call.collect(of_keys, returning, plan, call.ring.size - 1)
        return None, *(gradients[name].to(x.dtype) if name in gradients else None for name, x in named.items())


def is_shared() -> bool:
    """Whether several processes were joined, by torchrun and `joined`."""
    return dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def joined(device: torch.device) -> Iterator[bool]:
    """The processes that torchrun started as one group, or this one alone; whether this is the first."""
    if "RANK" not in os.environ:
        yield True
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def check_spreadable(config: LengthwiseConfig) -> None:
    """An error for a model with an encoding that ring attention cannot serve, by its name."""
    for spec in config.schedule:
        for name, _ in spec.parts():
            if find(name).overrides("rescore"):
                raise NotImplementedError(
                    f"{name!r} replaces the scores, for which it needs all keys of a row at once: its sequences cannot "
                    "be spread over processes; use another encoding, or no context parallelism"
                )


def ring_loss(
    model: LengthwiseForCausalLM,
    input_ids: Int[Tensor, "batch token"],
    labels: Int[Tensor, "batch token"] | None = None,
    *,
    attention_mask: Int[Tensor, "batch token"] | None = None,
    position_ids: Int[Tensor, "#batch token"] | None = None,
    group: ProcessGroup | None = None,
    reduction: str = "sum",
) -> Tensor:
    """This process's part of the loss of sequences that all processes of the group are given whole.

    The parts add up to `model.loss(..., reduction="sum")`, and so do their gradients. With reduction="none", and no
    gradients, all processes get the losses of all tokens, as from `model.loss`. Labels are the tokens themselves if not
    given, and may be one more than the tokens: what follows the last one.
    """
    if reduction not in ("sum", "none"):
        raise ValueError(
            f"reduction must be 'sum' or 'none', got {reduction!r}: a mean needs the tokens of all processes"
        )
    check_spreadable(model.config)
    whole = make_layout(input_ids, attention_mask=attention_mask, position_ids=position_ids)
    part = spread(whole, group)
    own = take(input_ids, part)
    following = (input_ids if labels is None else labels)[:, 1:]
    count = following.shape[1]
    if count not in (input_ids.shape[1] - 1, input_ids.shape[1]):
        raise ValueError(f"labels must be {input_ids.shape[1]} tokens, or one more, got {count + 1}")
    following = F.pad(following, (0, input_ids.shape[1] - count), value=IGNORED)
    x = model.transformer(own, layout=part, use_cache=False).last_hidden_state
    losses = head_loss(x, model.lm_head.weight, take(following, part), reduction=reduction)
    return losses if reduction == "sum" else gather(losses, part)[:, :count]
