"""Where the tokens of one call stand: positions, slots, documents and padding, of queries and of keys.

Order in the tensors decides causality: query i stands in slot query_start + i, key j in slot key_start + j. Documents
decide which tokens may meet. Positions are for the encoding alone. A layout is checked once, when it is made, and is
given to every hook of an encoding and to `attend`.

    layout(100)                                 100 tokens
    layout(x, key_mask=mask)                    as many as x has; padding takes no position
    layout(1, past=99)                          one new token after 99 cached ones
    layout(100, cu_seqlens=[0, 30, 100])        two documents packed into one sequence
    TokenLayout.of(query, key)                  any positions
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lengthwise.errors import check_broadcast, check_flag, check_int, check_tensor, describe, kind_of

Positions = Int[Tensor, "#batch position *axis"]
"""Where tokens stand, counted from 0: one row for all sequences or one for each; more axes for rows and columns."""

Slot = int | Int[Tensor, ""]
"""A place in the order of the tokens; a tensor where a compiled graph must not know it."""


@dataclass(frozen=True)
class Band:
    """Keys by how many real tokens of its own document a query has passed since: nearest <= distance < farthest.

    farthest  None for no end
    first     only among the first `first` tokens of the document
    chunk     distance counts chunks of so many tokens instead: query // chunk - key // chunk
    """

    nearest: int = 0
    farthest: int | None = None
    first: int | None = None
    chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("nearest", "farthest"):
            value = getattr(self, name)
            if (value is not None or name == "nearest") and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"a Band's {name} must be an int, got {describe(value)}")
        check_int("a Band's chunk", self.chunk)
        if self.first is not None:
            check_int("a Band's first", self.first)
        if self.farthest is not None and self.farthest <= self.nearest:
            raise ValueError(f"a Band must not be empty, got nearest={self.nearest} and farthest={self.farthest}")


Window = int | Band | tuple[Band, ...]
"""How far a query sees: slots back, itself included (and as many ahead, two-sided), or bands, which are joined."""


class PositionError(ValueError):
    """A position that an encoding has no answer for."""


@dataclass(frozen=True)
class Facts:
    """What is known of a layout's positions as plain numbers; read from tensors on the CPU in eager mode only."""

    lowest: int
    """The lowest position of a query."""
    highest: int
    """The highest position of a query; -1 if there is none."""
    furthest: int
    """The greatest distance between a query and a key, either way."""
    offsets: tuple[int, ...] | None
    """By how much distances in positions exceed distances in slots, one number per sequence or one for all.

    None unless that holds for every pair that may meet: padding and pairs of different documents do not count.
    """


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The tokens of one call. Make it with `lw.layout` or `TokenLayout.of`, which check what they are given."""

    query: Int[Tensor, "#batch query *axis"]
    key: Int[Tensor, "#batch key *axis"]
    query_start: Slot = 0
    """The slot of the first query."""
    key_start: int = 0
    """The slot of the first key."""
    query_mask: Bool[Tensor, "#batch query"] | None = None
    """True for tokens, False for padding."""
    key_mask: Bool[Tensor, "#batch key"] | None = None
    query_documents: Int[Tensor, "#batch query"] | None = None
    key_documents: Int[Tensor, "#batch key"] | None = None
    mask: Bool[Tensor, "#batch #head query key"] | None = None
    """True where a query may see a key: replaces causality. For the slow backends."""
    causal: bool = True
    query_index: Int[Tensor, "#batch query"] | None = None
    """Each query's number among the real tokens of its document, where it was counted over more keys than these."""
    key_index: Int[Tensor, "#batch key"] | None = None
    facts: Facts | None = None
    """None where nobody may look: in a compiled graph and on devices other than the CPU."""
    ring: "Ring | None" = None
    """Where the rest of the sequence is, if these are the tokens that one of several processes has of it."""

    @classmethod
    def of(
        cls,
        query: Int[Tensor, "*batch query"],
        key: Int[Tensor, "*batch key"] | None = None,
        *,
        key_mask: Bool[Tensor, "#batch key"] | None = None,
        documents: Int[Tensor, "#batch key"] | None = None,
        start: Slot | None = None,
        causal: bool = True,
        mask: Bool[Tensor, "#batch #head query key"] | None = None,
    ) -> "TokenLayout":
        """A layout of given positions; `start` is the slot of the first query, by default that of the last keys.

        Without `key` the tokens are queries and keys at once. Padding may have any position that is not negative.
        """
        query = _rows("query positions", query)
        key = query if key is None else _rows("key positions", key)
        check_broadcast("query and key positions", (query.shape[0], key.shape[0]), "batch")
        queries, keys = query.shape[1], key.shape[1]
        check_flag("causal", causal)
        check_per_key("key_mask", key_mask, "bool", keys)
        check_per_key("documents", documents, "integer", keys)
        if mask is not None:
            check_tensor("mask", mask, ("batch or 1", "head or 1", queries, keys), "bool")
        if start is None:
            start = keys - queries
            if start < 0 and (causal or documents is not None) and mask is None:
                raise ValueError(
                    f"without start the queries are the last keys, so there can be at most {keys} of them, got "
                    f"{queries}; for attention across two sequences use causal=False"
                )
        else:
            _check_start(start, queries, keys)
        among = isinstance(start, Tensor) or 0 <= start <= keys - queries
        if documents is not None and not among:
            raise ValueError("documents need queries that are among the keys; make that layout and take layout.keys")
        own = _slots(start, queries, query.device) if isinstance(start, Tensor) else slice(start, start + queries)
        placed = cls(
            query=query,
            key=key,
            query_start=start,
            query_mask=_picked(key_mask, own) if among else None,
            key_mask=key_mask,
            query_documents=_picked(documents, own) if among else None,
            key_documents=documents,
            mask=mask,
            causal=causal,
        )
        return placed.with_facts()

    def with_facts(self) -> "TokenLayout":
        """The same layout with its facts read, where they may be; an error if a query's position is negative."""
        if self.facts is not None or not self._can_be_read:
            return self
        facts = _read_facts(self)
        if facts.lowest < 0:
            raise PositionError(f"a query's position must be 0 or more, got {facts.lowest}; give padding position 0")
        return replace(self, facts=facts)

    @property
    def _can_be_read(self) -> bool:
        eager = not torch.compiler.is_compiling() and isinstance(self.query_start, int)
        return eager and self.query.device.type == "cpu" and self.query.ndim == 2

    @property
    def query_count(self) -> int:
        """The number of queries."""
        return self.query.shape[1]

    @property
    def key_count(self) -> int:
        """The number of keys."""
        return self.key.shape[1]

    @property
    def batch(self) -> int:
        """The number of sequences that are told apart; 1 where all are alike."""
        parts = (self.query, self.key, self.key_mask, self.key_documents, self.mask)
        return max(part.shape[0] for part in parts if part is not None)

    @property
    def start(self) -> Slot:
        """The slot of the first query, counted from the first key."""
        return self.query_start - self.key_start

    @property
    def queries_last(self) -> bool:
        """Whether the queries are known to be the last keys."""
        return not isinstance(self.start, Tensor) and self.start == self.key_count - self.query_count

    @property
    def is_plain(self) -> bool:
        """Whether order alone masks: no padding, documents or explicit mask, and the queries are the last keys."""
        masks = (self.key_mask, self.key_documents, self.mask)
        return all(mask is None for mask in masks) and self.queries_last

    def query_slots(self) -> Int[Tensor, " query"]:
        """The slots of the queries, counted from the first key."""
        return _slots(self.start, self.query_count, self.query.device)

    def keys(self, first: int, count: int) -> "TokenLayout":
        """The same queries with `count` of the keys from the one numbered `first` on: a window's cache, or a block."""
        if not 0 <= first <= first + count <= self.key_count:
            raise ValueError(f"keys {first} to {first + count} must lie within the {self.key_count} keys")
        part = slice(first, first + count)
        query_index, key_index = self.indices() if self.counts_tokens and self._can_count else (None, None)
        cut = replace(
            self,
            key=self.key[:, part],
            key_start=self.key_start + first,
            key_mask=_picked(self.key_mask, part),
            key_documents=_picked(self.key_documents, part),
            mask=None if self.mask is None else self.mask[..., part],
            query_index=query_index,
            key_index=_picked(key_index, part),
            facts=None,
        )
        return cut.with_facts()

    def block(self, queries: slice, keys: slice) -> "TokenLayout":
        """Some of the queries with some of the keys: what was known of all pairs holds of these."""
        return replace(
            self,
            query=self.query[:, queries],
            key=self.key[:, keys],
            query_start=self.query_start + queries.start,
            key_start=self.key_start + keys.start,
            query_mask=_picked(self.query_mask, queries),
            key_mask=_picked(self.key_mask, keys),
            query_documents=_picked(self.query_documents, queries),
            key_documents=_picked(self.key_documents, keys),
            mask=None if self.mask is None else self.mask[..., queries, keys],
            query_index=_picked(self.query_index, queries),
            key_index=_picked(self.key_index, keys),
        )

    @property
    def whole(self) -> "TokenLayout":
        """All tokens of the sequence, where several processes share it; else these."""
        return self if self.ring is None else self.ring.whole

    def document_ends(self) -> tuple[Int[Tensor, "#batch query"], Int[Tensor, "#batch key"]]:
        """The last position of the document of each token, of queries and of keys; at most that of the last query.

        The slots of a static cache run on behind the queries.
        """
        if self.ring is not None:
            query, key = self.ring.whole.document_ends()
            return query.index_select(1, self.ring.slots), key.index_select(1, self.ring.slots)
        query = run_ends(self.query)
        if self.key is self.query:
            return query, query
        return query, torch.minimum(run_ends(self.key), self.query.amax(1, keepdim=True))

    def new_tokens(self) -> "TokenLayout":
        """The queries alone, as queries and as keys: what turns keys before they are cached."""
        if self.key is self.query:
            return self
        facts = self.facts
        if facts is not None:
            # Of one token nothing need be read: each layer asks for it at every token that is decoded.
            known = Facts(facts.lowest, facts.highest, facts.highest - facts.lowest, offsets=(0,))
            facts = known if self.query_count == 1 else None
        alone = replace(
            self,
            key=self.query,
            key_start=0 if isinstance(self.query_start, Tensor) else self.query_start,
            query_start=0 if isinstance(self.query_start, Tensor) else self.query_start,
            key_mask=self.query_mask,
            key_documents=self.query_documents,
            mask=None,
            query_index=None,
            key_index=None,
            facts=facts,
        )
        return alone.with_facts()

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's number is not simply its slot."""
        return self.key_index is not None or self.key_mask is not None or self.key_documents is not None

    @property
    def _can_count(self) -> bool:
        """Whether tokens were counted, or the queries are among the keys, where they can be."""
        among = isinstance(self.start, Tensor) or 0 <= self.start <= self.key_count - self.query_count
        return among or self.key_index is not None

    def indices(self) -> tuple[Int[Tensor, "#batch query"], Int[Tensor, "#batch key"]]:
        """Each token's number among the real tokens of its own document, of queries and of keys, from 0.

        Padding has the number of the real token before it. Bands and logit scales count in these.
        """
        if self.query_index is not None and self.key_index is not None:
            return self.query_index, self.key_index
        if not self.counts_tokens:
            slots = torch.arange(self.key_start, self.key_start + self.key_count, device=self.key.device)
            return (self.query_slots() + self.key_start)[None], slots[None]
        if not self._can_count:
            raise ValueError("tokens can only be counted where the queries are among the keys; use layout.keys")
        key_index = number_in_document(self.key_mask, self.key_documents)
        return key_index.index_select(1, self.query_slots()), key_index


class Ring(ABC):
    """The part of a sequence that one process has, where others have the rest: see `lengthwise.distributed`.

    Hooks see their own tokens alone. What depends on tokens of other processes they get here.
    """

    whole: TokenLayout
    """All tokens of the sequence."""
    slots: Int[Tensor, " token"]
    """Which of them these are."""
    pieces: tuple[tuple[slice, int], ...]
    """The runs of slots that these are made of: where a run lies among these tokens, and its first slot."""

    @abstractmethod
    def running_sums(self, step: Float[Tensor, "*rest token"]) -> Float[Tensor, "*rest token"]:
        """The sums of the steps of all tokens up to each of these, in float64."""

    @abstractmethod
    def before(
        self, numbers: Float[Tensor, "batch head token channel"], count: int
    ) -> list[Float[Tensor, "batch head earlier channel"]]:
        """The numbers of up to `count` tokens right before each piece; fewer where the sequence begins."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """`lw.attend` of these tokens as queries with all tokens as keys."""


def layout(
    tokens: int | Tensor,
    *,
    key_mask: Bool[Tensor, "#batch key"] | None = None,
    documents: Int[Tensor, "#batch key"] | None = None,
    cu_seqlens: Sequence[int] | Int[Tensor, " border"] | None = None,
    past: int = 0,
    causal: bool = True,
    device: torch.device | str | None = None,
) -> TokenLayout:
    """Where tokens stand that are counted from 0.

    tokens      how many new tokens there are, or a tensor (batch, position, ...) that has them
    key_mask    True for tokens, False for padding, which takes no position; cached tokens included
    documents   a number per token, cached ones included; positions begin anew in each
    cu_seqlens  the same as borders: [0, end of the first document, ..., length]
    past        how many cached tokens come before

    >>> layout(2, past=3).key
    tensor([[0, 1, 2, 3, 4]])
    """
    if isinstance(tokens, Tensor):
        if tokens.ndim < 2:
            raise ValueError(f"tokens must be an int or (batch, position, ...), got {describe(tokens)}")
        device = tokens.device if device is None else device
        tokens = tokens.shape[1]
    check_int("tokens", tokens, least=0)
    check_int("past", past, least=0)
    keys = past + tokens
    if cu_seqlens is not None:
        if documents is not None:
            raise ValueError("documents and cu_seqlens say the same thing, got both")
        documents = documents_of(cu_seqlens, keys, device)
    if documents is not None or key_mask is not None:
        check_per_key("key_mask", key_mask, "bool", keys)
        check_per_key("documents", documents, "integer", keys)
        key = number_in_document(key_mask, documents).clamp(min=0)
        return TokenLayout.of(key[:, past:], key, key_mask=key_mask, documents=documents, start=past, causal=causal)
    check_flag("causal", causal)
    key = torch.arange(keys, device=device)[None]
    facts = None
    if not torch.compiler.is_compiling():
        facts = Facts(lowest=past, highest=keys - 1, furthest=max(keys - 1, 0), offsets=(0,))
    return TokenLayout(query=key if past == 0 else key[:, past:], key=key, query_start=past, causal=causal, facts=facts)


def documents_of(
    cu_seqlens: Sequence[int] | Int[Tensor, " border"], length: int, device: torch.device | str | None = None
) -> Int[Tensor, "1 key"]:
    """The number of the document of each token, from the borders of documents packed into one sequence."""
    borders = torch.as_tensor(cu_seqlens, device=device)
    check_tensor("cu_seqlens", borders, ("border",), "integer")
    readable = not torch.compiler.is_compiling() and borders.device.type == "cpu"
    if borders.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have two borders or more, got {borders.shape[0]}")
    if readable:
        ends = [int(border) for border in borders]
        if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
            raise ValueError(f"cu_seqlens must rise from 0 to the length {length}, got {ends}")
    return torch.bucketize(torch.arange(length, device=borders.device), borders[1:], right=True)[None]


def number_in_document(
    mask: Bool[Tensor, "#batch key"] | None, documents: Int[Tensor, "#batch key"] | None
) -> Int[Tensor, "#batch key"]:
    """Each token's number among the real tokens of its document; that of the one before it, or -1, for padding."""
    if documents is None:
        assert mask is not None
        return mask.cumsum(1) - 1
    documents, order = documents.sort(dim=1, stable=True)
    if mask is None:
        real = torch.ones_like(documents)
    else:
        rows = max(mask.shape[0], documents.shape[0])
        documents, order = documents.expand(rows, -1), order.expand(rows, -1)
        real = mask.expand(rows, -1).gather(1, order).long()
    counted = real.cumsum(1)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    before = (counted - real).where(begins, 0).cummax(1).values
    return torch.empty_like(counted).scatter_(1, order, counted - before - 1)


def run_ends(positions: Int[Tensor, "#batch position"]) -> Int[Tensor, "#batch position"]:
    """For each position the last of its run: where a position does not rise, a new document begins."""
    length = positions.shape[1]
    slots = torch.arange(length, device=positions.device)
    last = torch.ones_like(positions, dtype=torch.bool)
    last[:, :-1] = positions[:, 1:] <= positions[:, :-1]
    end_slot = slots.where(last, length - 1).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, end_slot)


def _read_facts(layout: TokenLayout) -> Facts:
    """The facts, from positions that are on the CPU."""
    query, key = layout.query, layout.key
    if query.numel() == 0 or key.numel() == 0:
        return Facts(lowest=0, highest=-1, furthest=0, offsets=(0,))
    (low, high), (first, last) = ((int(end) for end in positions.aminmax()) for positions in (query, key))
    return Facts(low, high, max(high - first, last - low), _slot_offsets(layout))


def _slot_offsets(layout: TokenLayout) -> tuple[int, ...] | None:
    start, queries, keys = int(layout.start), layout.query_count, layout.key_count
    key = layout.key - torch.arange(keys)
    query = layout.query - torch.arange(start, start + queries)
    offsets = []
    for row in range(layout.batch):
        of_key, of_query = row_of(key, row), row_of(query, row)
        if layout.key_documents is not None:
            relative = _relative_to_document(of_key, of_query, layout, row)
            if relative is None:
                return None
            of_key, of_query = relative
        if layout.key_mask is not None:
            visible = row_of(layout.key_mask, row)
            if not visible.any():
                offsets.append(0)
                continue
            # Under causality queries before the first key that is not padding see nothing.
            first = int(visible.int().argmax())
            of_key = of_key[visible]
            of_query = of_query[max(first - start, 0) :] if layout.causal and layout.mask is None else of_query
        if not _all_equal(of_key) or not _all_equal(of_query):
            return None
        offsets.append(int(of_query[0] - of_key[0]) if len(of_query) else 0)
    return tuple(offsets[:1] if len(set(offsets)) == 1 else offsets)


def _relative_to_document(key: Tensor, query: Tensor, layout: TokenLayout, row: int) -> tuple[Tensor, Tensor] | None:
    """Offsets less the offset of the first key in the same document; None if a document is in more than one piece."""
    start = int(layout.start)
    if start < 0 or start + len(query) > len(key):
        return None
    assert layout.key_documents is not None
    documents = row_of(layout.key_documents, row)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[1:] = documents[1:] != documents[:-1]
    if int(new.sum()) != len(documents.unique()):
        return None
    first = key[new][new.cumsum(0) - 1]
    return key - first, query - first[start : start + len(query)]


def row_of(x: Tensor, row: int) -> Tensor:
    """What belongs to one sequence, where one row may stand for all."""
    return x[row if x.shape[0] > 1 else 0]


def _all_equal(x: Tensor) -> bool:
    return len(x) < 2 or bool((x == x[0]).all())


def _slots(start: Slot, count: int, device: torch.device) -> Int[Tensor, " slot"]:
    return start + torch.arange(count, device=device)


def _picked(x: Tensor | None, part: slice | Tensor) -> Tensor | None:
    if x is None:
        return None
    return x[:, part] if isinstance(part, slice) else x.index_select(1, part)


def _rows(name: str, positions: Tensor) -> Positions:
    if isinstance(positions, Tensor) and positions.ndim == 1:
        positions = positions[None]
    check_tensor(name, positions, ("batch or 1", "position"), "integer", more_axes=True)
    return positions


def check_per_key(name: str, mask: Tensor | None, kind: str, keys: int) -> None:
    """An error unless there is one entry per key, of the kind."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or kind_of(mask) != kind:
        meaning = "bool, True for tokens and False for padding" if kind == "bool" else "an integer tensor"
        raise TypeError(f"{name} must be {meaning}, got {describe(mask)}")
    if mask.ndim != 2 or mask.shape[1] != keys:
        raise ValueError(f"{name} must be (batch or 1, {keys}), one entry per key, got shape {tuple(mask.shape)}")


def _check_start(start: Any, queries: int, keys: int) -> None:
    if isinstance(start, Tensor):
        valid = start.ndim == 0 and kind_of(start) == "integer"
    else:
        valid = isinstance(start, int | torch.SymInt) and not isinstance(start, bool)
    if not valid:
        raise ValueError(f"start must be an int or an integer tensor without axes, got {describe(start)}")
    if not isinstance(start, Tensor) and not (0 <= start <= keys - queries or start >= keys):
        raise ValueError(
            f"start must be the slot of the first of {queries} queries, among {keys} keys or behind all of them, "
            f"got {start}"
        )
