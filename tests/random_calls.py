"""Random calls of attention and a float64 definition to judge them by, written apart from the library.

    call = random_call(17)          the same call every time
    print(call)                     in one line
    judge(call, "native")           True; False if the backend refuses it; an AssertionError if it is wrong

Everything in a call hangs on its seed. Its tensors are leaves, which may reach `attend` as views with other strides;
gradients are compared at the leaves. The definition fills in whole matrices, and finds out what a query may see by
comparing every pair of tokens.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from rounding import Inside, Tensors, rounding_noise, roundings
from torch import Tensor

import lengthwise as lw
from lengthwise.attention import BACKENDS, checked_call
from lengthwise.attention.backend import Refusal
from lengthwise.bias import two_floats

View = tuple[str, int]

DIMS = (1, 2, 3, 5, 7, 8, 8, 16, 16, 17, 24, 32, 33, 64)


@dataclass(frozen=True)
class Leaf:
    """A tensor that a gradient may flow to, and how it is looked at on its way to `attend`."""

    base: Tensor
    view: View = ("plain", 0)


@dataclass(frozen=True)
class Part:
    """A bias or a rescore, twice: as the library has it, and as the definition fills it in."""

    words: str
    make: Callable[[Tensors, lw.TokenLayout | None], Any]
    fill: Callable[..., Tensor]


@dataclass(frozen=True)
class Place:
    """Where the tokens of a call stand: in slots of one long row, a part of which are its keys."""

    words: str
    make: Callable[[], dict[str, Any]]
    """What `attend` is given for it: a layout, or `causal` and `key_mask`."""
    visible: Tensor
    """(batch or 1, head or 1, query, key), without window and bands."""
    query_slots: Tensor
    key_slots: Tensor
    query_number: Tensor
    """(batch or 1, query): what a Band counts."""
    key_number: Tensor
    query: Tensor
    """(batch or 1, query): positions."""
    key: Tensor
    can_count: bool = True

    @property
    def first_query(self) -> int | None:
        """Its number among the keys; None if the queries are not all among them."""
        first = int(self.query_slots[0] - self.key_slots[0]) if len(self.query_slots) and len(self.key_slots) else -1
        return first if 0 <= first <= len(self.key_slots) - len(self.query_slots) else None


@dataclass
class RandomCall:
    """One call, whole."""

    seed: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value: int
    dtype: torch.dtype
    place: Place
    window: Any
    visible: Tensor
    leaves: dict[str, Leaf]
    learned: tuple[str, ...] = ()
    bias: Part | None = None
    rescore: Part | None = None
    scale: float | None = None
    softcap: float | None = None
    return_lse: bool = False
    skip: bool = True
    cotangents: tuple[Tensor | None, Tensor | None] = (None, None)
    noises: dict[float, dict[str, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            f"{str(self.dtype).removeprefix('torch.')} batch={self.batch} heads={self.heads}/{self.kv_heads} "
            f"queries={self.queries} keys={self.keys} dim={self.dim}/{self.value}",
            self.place.words,
            *([f"window={self.window}"] if self.window is not None else []),
            *(part.words for part in (self.bias, self.rescore) if part is not None),
            *(f"{name}={value:g}" for name, value in (("scale", self.scale), ("softcap", self.softcap)) if value),
            *(
                f"{name} {'x'.join(map(str, viewed(leaf).shape))}"
                for name, leaf in self.leaves.items()
                if name in ("sink", "logit_scale")
            ),
            *(f"{name} {leaf.view[0]}" for name, leaf in self.leaves.items() if leaf.view[0] != "plain"),
            *(["lse"] if self.return_lse else []),
            *([] if self.skip else ["no skipping"]),
            f"learned: {', '.join(self.learned) or 'nothing'}",
        ]
        return f"random_call({self.seed}): " + "; ".join(parts)

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """What `attend` is given."""
        place = self.place.make()
        layout = place.get("layout")
        own: dict[str, Any] = {name: tensors[name] for name in ("q", "k", "v")}
        own |= {name: tensors[name] for name in ("sink", "logit_scale") if name in tensors}
        own |= {name: part.make(tensors, layout) for name, part in self.parts()}
        return own | place | {"window": self.window, "scale": self.scale, "softcap": self.softcap}

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The bias and the rescore, if there are any."""
        for name in ("bias", "rescore"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    @cached_property
    def exact(self) -> Tensors:
        """Output, log-sum-exp and gradients in float64."""
        return self.defined(torch.float64)

    @cached_property
    def plain(self) -> Tensors:
        """The same by the same formulas in float32, rounded to what the leaves and the output are."""
        return self.defined(torch.float32)

    def noise(self, eps: float) -> dict[str, float]:
        """`rounding_inside`, drawn once."""
        if eps not in self.noises:
            self.noises[eps] = rounding_inside(self, eps)
        return self.noises[eps]

    def defined(self, dtype: torch.dtype) -> Tensors:
        """What the definition gives in a precision."""

        def run(tensors: Tensors) -> tuple[Tensor, Tensor]:
            out, lse, *_ = define(self, tensors)
            return (out.to(self.dtype), lse) if dtype == torch.float32 else (out, lse)

        def start(leaf: Tensor) -> Tensor:
            return leaf.double() if dtype == torch.float64 else leaf

        def inside(x: Tensor) -> Tensor:
            return x if x.dtype == torch.float64 else x.to(dtype)

        return results(self, run, start, inside)


def viewed(leaf: Leaf, base: Tensor | None = None) -> Tensor:
    """The leaf as it is given to `attend`."""
    x = leaf.base if base is None else base
    how, number = leaf.view
    match how:
        case "transposed":
            return x.transpose(number, number + 1)
        case "every second":
            return x[..., 1::2]
        case "inner":
            return x[..., 2:-1, :]
        case "expanded":
            return x.expand(number, *x.shape[1:])
        case "one head":
            return x.expand(-1, number, *x.shape[2:])
    return x


class Draw:
    """Choices and tensors that hang on a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves: dict[str, Leaf] = {}

    def chance(self, share: float) -> bool:
        """True in so many of all cases."""
        return self.random.random() < share

    def pick(self, *options: Any) -> Any:
        """One of them."""
        return self.random.choice(options)

    def whole(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return self.random.randint(low, high)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0 and 1."""
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """From low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def leaf(self, name: str, values: Tensor, dtype: torch.dtype | None = None) -> str:
        """Keep a tensor under a name, at times so that it has other strides than its shape suggests."""
        values = values if dtype is None else values.to(dtype)
        how = self.pick("transposed", "every second", "inner", "expanded", "one head") if self.chance(0.25) else "plain"
        leaf = Leaf(values)
        if how == "transposed" and values.ndim > 1:
            axis = 1 if values.ndim == 4 and self.chance(0.7) else values.ndim - 2
            leaf = Leaf(values.transpose(axis, axis + 1).contiguous(), (how, axis))
        elif how == "every second":
            base = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), torch.nan, dtype=values.dtype)
            base[..., 1::2] = values
            leaf = Leaf(base, (how, 0))
        elif how == "inner" and values.ndim > 1:
            base = torch.full((*values.shape[:-2], values.shape[-2] + 3, values.shape[-1]), torch.nan).to(values.dtype)
            base[..., 2:-1, :] = values
            leaf = Leaf(base, (how, 0))
        elif how == "expanded" and values.ndim > 2 and values.shape[0] > 1:
            leaf = Leaf(values[:1].clone(), (how, values.shape[0]))
        elif how == "one head" and values.ndim > 2 and values.shape[1] > 1:
            leaf = Leaf(values[:, :1].clone(), (how, values.shape[1]))
        self.leaves[name] = leaf
        return name


def random_call(seed: int) -> RandomCall:
    """The call of a seed."""
    d = Draw(seed)
    learns = d.chance(0.6)
    batch, kv_heads = d.pick(1, 1, 2, 2, 3), d.pick(1, 1, 1, 2, 2, 3)
    heads = kv_heads * d.pick(*range(1, 6 // kv_heads + 1))
    few = d.chance(0.1 if learns else 0.6)
    queries = d.whole(1, 4) if few else d.pick(d.whole(1, 20), d.whole(5, 40), d.whole(33, 70))
    if d.chance(0.01):
        queries = 0
    dim = d.pick(*DIMS)
    value = d.pick(dim, dim, dim, *DIMS)
    dtype = d.pick(torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)
    sizes = (batch, heads, queries)

    place = random_place(d, batch, heads, queries)
    keys = len(place.key_slots)
    window = random_window(d, place) if d.chance(0.4) else None
    visible = place.visible & within(window, place)
    d.leaf("q", d.pick(0.5, 1, 1, 3) * d.normal(batch, heads, queries, dim), dtype)
    d.leaf("k", d.normal(batch, kv_heads, keys, dim), dtype)
    d.leaf("v", d.normal(batch, kv_heads, keys, value), dtype)
    small = dtype if d.chance(0.2) else torch.float32
    bias = random_bias(d, (batch, heads), place, "bias", small) if d.chance(0.75) else None
    rescore = random_rescore(d, heads, queries, dim, small, visible.shape[1] == 1) if d.chance(0.2) else None
    if d.chance(0.25):
        shape = d.pick((heads,), (heads,), (d.pick(1, batch), heads, d.pick(1, queries)))
        d.leaf("sink", 2 * d.normal(*shape), small)
    if d.chance(0.25):
        factor = 0.2 + 2 * d.uniform(d.pick(1, batch), d.pick(1, heads), d.pick(1, queries))
        if d.chance(0.3):
            factor = factor * d.integers(-1, 2, *factor.shape)
        d.leaf("logit_scale", factor, small)
    return_lse = d.chance(0.5)
    call = RandomCall(
        seed,
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        dim,
        value,
        dtype,
        place,
        window,
        visible,
        d.leaves,
        bias=bias,
        rescore=rescore,
        scale=d.pick(1.0, 0.3, -0.5, 0.0) if d.chance(0.2) else None,
        softcap=d.pick(0.7, 3.0, 30.0) if d.chance(0.2) else None,
        return_lse=return_lse,
        skip=d.chance(0.7),
    )
    keep_off_kinks(call)
    if learns:
        able = [name for name in d.leaves if not name.endswith("knots")]
        share = d.pick(0.3, 1, 1)
        call.learned = tuple(name for name in able if d.chance(share)) or (d.pick(*able),)
        sides = d.pick("out", "out", "both", "both", "lse") if return_lse else "out"
        d_out = d.normal(*sizes, value).to(dtype) if sides != "lse" else None
        call.cotangents = d_out, d.normal(*sizes) if sides != "out" else None
    return call


# Where the tokens stand.


def random_place(d: Draw, batch: int, heads: int, queries: int) -> Place:
    """One of all ways to say where tokens stand."""
    how = d.pick("bare", "bare", "layout", "layout", "layout", "of", "of", "cut", "cut")
    causal = d.chance(0.75)
    total = queries + d.pick(0, 0, d.whole(0, 8), d.whole(0, 60), d.whole(0, 200 - queries))
    if how == "bare":
        return bare_place(d, batch, queries, total, causal=causal)
    real = random_padding(d, batch, total) if d.chance(0.4) else None
    documents, borders = random_documents(d, batch, total) if d.chance(0.4) else (None, None)
    if how == "layout" or (how == "cut" and d.chance(0.6)):
        return counted_place(d, queries, total, real, documents, borders, causal=causal, cut=how == "cut")
    return free_place(d, batch, heads, queries, total, real, documents, causal=causal, cut=how == "cut")


def bare_place(d: Draw, batch: int, queries: int, total: int, *, causal: bool) -> Place:
    """Without a layout: the queries are the last keys. Positions are whatever a bias holds."""
    if not causal and d.chance(0.2):
        total = d.whole(0, queries)  # across two sequences
    real = random_padding(d, batch, total) if d.chance(0.35) else None
    query_slots, key_slots = torch.arange(total - queries, total), torch.arange(total)
    numbers = tokens_passed(real, None, total)
    can_count = total >= queries
    query_number = numbers[:, total - queries :] if can_count else query_slots[None]
    query, key = random_positions(d, batch, query_slots, key_slots)
    return Place(
        f"bare{'' if causal else ', two-sided'}{', padding' if real is not None else ''}",
        lambda: {"causal": causal, "key_mask": real},
        pairs_that_meet(query_slots, key_slots, real, None, causal=causal),
        query_slots,
        key_slots,
        query_number,
        numbers,
        query,
        key,
        can_count,
    )


def counted_place(
    d: Draw,
    queries: int,
    total: int,
    real: Tensor | None,
    documents: Tensor | None,
    borders: list[int] | None,
    *,
    causal: bool,
    cut: bool,
) -> Place:
    """By lw.layout, which counts positions itself: padding takes none, and they begin anew in each document."""
    first, count = random_cut(d, total) if cut else (0, total)
    query_slots, key_slots = torch.arange(total - queries, total), torch.arange(first, first + count)
    numbers = tokens_passed(real, documents, total)
    positions = numbers.clamp(min=0)
    packed: dict[str, Any] = {"documents": documents}
    if borders is not None:
        packed = {"cu_seqlens": borders if d.chance(0.5) else torch.tensor(borders)}

    def make() -> dict[str, Any]:
        whole = lw.layout(queries, past=total - queries, key_mask=real, causal=causal, **packed)
        return {"layout": whole.keys(first, count) if cut else whole}

    words = f"lw.layout past={total - queries}{'' if causal else ', two-sided'}"
    return Place(
        words + said(real, documents, borders) + f", keys({first}, {count})" * cut,
        make,
        pairs_that_meet(query_slots, key_slots, real, documents, causal=causal),
        query_slots,
        key_slots,
        numbers[:, query_slots],
        numbers[:, key_slots],
        positions[:, query_slots],
        positions[:, key_slots],
    )


def free_place(
    d: Draw,
    batch: int,
    heads: int,
    queries: int,
    total: int,
    real: Tensor | None,
    documents: Tensor | None,
    *,
    causal: bool,
    cut: bool,
) -> Place:
    """By TokenLayout.of: any positions, the queries among the keys or behind them, at times an explicit mask."""
    behind = documents is None and d.chance(0.2)
    start: int | Tensor = total + d.whole(0, 30) if behind else d.pick(0, total - queries, d.whole(0, total - queries))
    query_slots, all_slots = torch.arange(int(start), int(start) + queries), torch.arange(total)
    query, key = random_positions(d, batch, query_slots, all_slots)
    mask = d.uniform(d.pick(1, batch), d.pick(1, heads), queries, total) < 0.6 if d.chance(0.15) else None
    first, count = random_cut(d, total) if cut else (0, total)
    key_slots = torch.arange(first, first + count)
    numbers = tokens_passed(real, documents, total)
    can_count = not behind or real is None
    given = d.pick(start, torch.tensor(start)) if not behind and d.chance(0.2) else start
    if start == total - queries and d.chance(0.5):
        given = None

    def make() -> dict[str, Any]:
        whole = lw.TokenLayout.of(query, key, key_mask=real, documents=documents, start=given, causal=causal, mask=mask)
        return {"layout": whole.keys(first, count) if cut else whole}

    visible = pairs_that_meet(query_slots, key_slots, real, documents, causal=causal and mask is None)
    words = f"TokenLayout.of start={given!r}{'' if causal else ', two-sided'}{', mask' if mask is not None else ''}"
    return Place(
        words + said(real, documents, None) + f", keys({first}, {count})" * cut,
        make,
        visible if mask is None else visible & mask[..., key_slots],
        query_slots,
        key_slots,
        query_slots[None] if behind else numbers[:, query_slots],
        numbers[:, key_slots],
        query,
        key[:, key_slots],
        can_count,
    )


def said(real: Tensor | None, documents: Tensor | None, borders: list[int] | None) -> str:
    """Padding and documents in words."""
    packed = "" if documents is None else f", documents {documents.shape[0]}" if borders is None else ", cu_seqlens"
    return packed + (f", padding {real.shape[0]}" if real is not None else "")


def random_cut(d: Draw, total: int) -> tuple[int, int]:
    """Some of the keys: often the last or the first ones, at times none."""
    first = d.pick(0, d.whole(0, total))
    return first, d.pick(total - first, d.whole(0, total - first))


def random_padding(d: Draw, batch: int, total: int) -> Tensor:
    """At one end, at both, in holes, or of whole sequences."""
    real = torch.ones(d.pick(1, batch), total, dtype=torch.bool)
    for row in real:
        how = d.pick("left", "right", "both", "holes", "holes", "all", "none")
        reach = total // 3
        if how in ("left", "both"):
            row[: d.whole(0, reach)] = False
        if how in ("right", "both"):
            row[total - d.whole(0, reach) :] = False
        if how == "holes":
            row &= d.uniform(total) < d.pick(0.3, 0.8, 0.95)
        if how == "all":
            row[:] = False
    return real


def random_documents(d: Draw, batch: int, total: int) -> tuple[Tensor, list[int] | None]:
    """In pieces one after the other, at times as borders, or scattered."""
    how = d.pick("borders", "pieces", "pieces", "scattered")
    if how == "borders":
        inner = sorted(d.whole(0, total) for _ in range(d.whole(0, 4)))
        borders = [0, *inner, total]
        return torch.tensor([sum(border <= t for border in borders[1:]) for t in range(total)])[None].long(), borders
    rows = d.pick(1, batch)
    if how == "scattered":
        return d.integers(-1, d.whole(0, 4), rows, total), None
    return (d.uniform(rows, total) < d.pick(0.03, 0.1, 0.4)).long().cumsum(1) - d.whole(0, 1), None


def random_positions(d: Draw, batch: int, query_slots: Tensor, key_slots: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys: their slots, moved apart, with gaps, or anything."""
    how = d.pick("slots", "moved", "gaps", "anything")
    rows = d.pick(1, batch)
    low = min([0, *query_slots.tolist()])
    end = max([0, *query_slots.tolist(), *key_slots.tolist()]) + 1
    if how == "anything":
        return d.integers(0, 50, d.pick(1, rows), len(query_slots)), d.integers(0, 50, rows, len(key_slots))
    of_slot = torch.arange(end - low)[None]
    if how == "gaps":
        of_slot = d.integers(0, 3, rows, end - low).cumsum(1)
    query, key = of_slot[:, query_slots - low], of_slot[:, key_slots - low]
    if how == "moved":
        return query + d.integers(0, 9, rows, 1), key + d.integers(0, 9, d.pick(1, rows), 1)
    return query, key


def tokens_passed(real: Tensor | None, documents: Tensor | None, total: int) -> Tensor:
    """For each token how many real tokens of its own document stand before it: pair by pair, itself left out."""
    rows = max(x.shape[0] for x in (real, documents, torch.zeros(1)) if x is not None)
    counted = torch.ones(rows, total, total, dtype=torch.bool).tril()
    if documents is not None:
        counted = counted & (documents[:, :, None] == documents[:, None, :])
    if real is not None:
        counted = counted & real[:, None, :]
    return counted.sum(-1) - 1


def pairs_that_meet(
    query_slots: Tensor, key_slots: Tensor, real: Tensor | None, documents: Tensor | None, *, causal: bool
) -> Tensor:
    """Which queries may see which keys, (batch or 1, 1, query, key), but for window and bands."""
    seen = torch.ones(1, 1, len(query_slots), len(key_slots), dtype=torch.bool)
    if causal:
        seen = seen & ~(key_slots[None, :] > query_slots[:, None])
    if real is not None:
        seen = seen & real[:, None, None, key_slots]
    if documents is not None:
        seen = seen & (documents[:, None, query_slots, None] == documents[:, None, None, key_slots])
    return seen


def random_window(d: Draw, place: Place) -> Any:
    """Slots back, one Band, or several."""
    across = len(place.query_slots) > 0 and int(place.query_slots[0]) < 0
    if across:
        return None  # refused: there is no slot to count from
    if not place.can_count or d.chance(0.4):
        return d.pick(1, 2, d.whole(1, 20), d.whole(1, 80))

    def band() -> lw.Band:
        chunk = d.pick(1, 1, 1, 2, 5, 16)
        nearest = d.pick(0, 0, -d.whole(1, 9), d.whole(1, 9))
        farthest = None if d.chance(0.3) else nearest + d.pick(1, d.whole(1, 12), d.whole(1, 60))
        return lw.Band(nearest, farthest, d.pick(None, None, d.whole(1, 12)), chunk)

    return d.pick(band(), tuple(band() for _ in range(d.whole(1, 3))))


def within(window: Any, place: Place) -> Tensor:
    """Which pairs a window or bands leave, (batch or 1, 1, query, key)."""
    if window is None:
        return torch.ones((), dtype=torch.bool)
    if isinstance(window, int):
        return ((place.query_slots[:, None] - place.key_slots[None, :]).abs() < window)[None, None]
    query, key = place.query_number[:, None, :, None], place.key_number[:, None, None, :]
    inside = torch.zeros((), dtype=torch.bool)
    for band in (window,) if isinstance(window, lw.Band) else window:
        passed = query // band.chunk - key // band.chunk
        own = passed >= band.nearest
        if band.farthest is not None:
            own = own & (passed < band.farthest)
        if band.first is not None:
            own = own & (key < band.first)
        inside = inside | own
    return inside


# Biases.


def random_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    """One of every kind, or a sum."""
    kinds = [distance_bias, distance_bias, level_bias, level_bias, step_bias, line_bias, function_bias, dense_bias]
    if d.seed % 4 == 3:
        kinds = [profile_bias] * len(kinds) + kinds
    if name == "bias" and d.chance(0.2):
        terms = [d.pick(*kinds)(d, sizes, place, f"{name}{n}", small) for n in range(d.whole(2, 3))]
        return Part(
            f"SumBias({', '.join(term.words for term in terms)})",
            lambda t, layout: lw.SumBias(tuple(term.make(t, layout) for term in terms)),
            lambda t: sum(term.fill(t) for term in terms),
        )
    return d.pick(*kinds)(d, sizes, place, name, small)


def held_positions(d: Draw, place: Place) -> Callable[[lw.TokenLayout | None], tuple[Tensor, Tensor]]:
    """The positions that a bias holds: the layout's own tensors, or others with the same numbers."""
    if d.chance(0.3):
        return lambda layout: (place.query.clone(), place.key.clone())
    return lambda layout: (place.query, place.key) if layout is None else (layout.query, layout.key)


def distance_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    heads = d.pick(1, sizes[1], sizes[1])
    length = d.pick(1, d.whole(1, 12), d.whole(1, 90))
    first = d.pick(0, 0, -d.whole(1, 2 * length), 2)
    table = d.leaf(f"{name}.table", d.pick(1, 1, 8) * d.normal(heads, length), small)
    held = held_positions(d, place)

    def fill(t: Tensors) -> Tensor:
        apart = place.query[:, :, None] - place.key[:, None, :]
        column = (apart - first).clamp(0, length - 1)
        return torch.stack([row[column] for row in t[table]], 1)

    return Part(
        f"DistanceBias({heads} x {length}, first={first})",
        lambda t, layout: lw.DistanceBias(t[table], *held(layout), first),
        fill,
    )


def profile_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    side, beyond = d.pick("query", "query", "key"), d.pick("clamp", "zero")
    tokens = len(place.query_slots if side == "query" else place.key_slots)
    count, length = d.pick(1, 3, 16, 17), d.pick(1, d.whole(1, 12), d.whole(1, 90), d.whole(1, 300))
    first = d.pick(0, 0, -d.whole(1, 2 * length), 2)
    batch, heads = d.pick(1, sizes[0]), d.pick((1, 1), (1, sizes[1]), (sizes[1], 1), (sizes[1], sizes[1]))
    rows = d.leaf(f"{name}.rows", d.normal(batch, heads[0], tokens, count), small)
    profiles = d.leaf(f"{name}.profiles", d.pick(1, 1, 4) * d.normal(heads[1], count, length) / count**0.5, small)
    held = held_positions(d, place)

    def fill(t: Tensors) -> Tensor:
        column = place.query[:, :, None] - place.key[:, None, :] - first
        curves = t[profiles][:, :, column.clamp(0, length - 1)]  # (head, profile, batch, query, key)
        if beyond == "zero":
            curves = curves * ((column >= 0) & (column < length))
        own = t[rows][:, :, :, None] if side == "query" else t[rows][:, :, None]
        return (own * curves.permute(2, 0, 3, 4, 1)).sum(-1)

    return Part(
        f"QueryDistanceBias({batch}x{heads[0]}, {heads[1]}x{count}x{length}, first={first}, {side}, {beyond})",
        lambda t, layout: lw.QueryDistanceBias(t[rows], t[profiles], *held(layout), first, side, beyond),
        fill,
    )


def random_slope(d: Draw, sizes: tuple[int, int], queries: int, name: str, small: torch.dtype) -> str:
    """Mild or steep, at times below 0."""
    slope = d.pick(0.05, 0.5, 0.5, 12) * (0.1 + d.uniform(d.pick(1, sizes[0]), d.pick(1, sizes[1]), d.pick(1, queries)))
    return d.leaf(f"{name}.slope", slope * d.pick(1, 1, 1, -1, d.integers(-1, 1, *slope.shape)), small)


def curved(curve: str, difference: Tensor, slope: Tensor) -> Tensor:
    """-slope * curve(|difference|), the difference in float64."""
    apart = difference.to(slope.dtype)
    return -slope[..., None] * (apart.abs() if curve == "linear" else (1 + apart * apart).log())


def level_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    queries = len(place.query_slots)
    curve = d.pick("linear", "linear", "log1p_square")
    rows, heads = d.pick(1, sizes[0]), d.pick(1, sizes[1])
    low = int(min(place.query_slots.tolist() + place.key_slots.tolist(), default=0))
    high = int(max(place.query_slots.tolist() + place.key_slots.tolist(), default=0)) + 1
    rises = d.chance(0.6)
    steps = d.uniform(rows, heads, high - low) if rises else d.normal(rows, heads, high - low)
    # At times a token hardly climbs. It always does a little: where two levels are equal |difference| has a kink, at
    # which row_block's channels take the slope of one side and the others 0.
    steps = steps * (d.uniform(rows, heads, high - low) < 0.8) + 1e-3
    levels = steps.double().cumsum(2) + d.pick(0, 0, 1e5)
    of_query, of_key = (levels[..., slots - low].clone() for slots in (place.query_slots, place.key_slots))
    slope = random_slope(d, sizes, queries, name, small)
    declared = rises and d.chance(0.7)
    two = d.chance(0.15)
    words = f"LevelBias({curve}, {rows}x{heads}{', rising' * declared}{', two floats' * two})"
    names = [f"{name}.query_level", f"{name}.key_level", f"{name}.query_rest", f"{name}.key_rest"]
    if not two:
        d.leaf(names[0], of_query)
        d.leaf(names[1], of_key)
        return Part(
            words,
            lambda t, layout: lw.LevelBias(t[names[0]], t[names[1]], t[slope], curve, declared),
            lambda t: curved(curve, t[names[0]][..., :, None] - t[names[1]][..., None, :], t[slope]),
        )
    for whole, rest, level in ((names[0], names[2], of_query), (names[1], names[3], of_key)):
        high_part, low_part = two_floats(level)
        d.leaf(whole, high_part)
        d.leaf(rest, low_part)

    def fill(t: Tensors) -> Tensor:
        query, key = (t[names[i]].double() + t[names[i + 2]].double() for i in (0, 1))
        return curved(curve, query[..., :, None] - key[..., None, :], t[slope])

    return Part(
        words,
        lambda t, layout: lw.LevelBias(
            t[names[0]], t[names[1]], t[slope], curve, declared, query_rest=t[names[2]], key_rest=t[names[3]]
        ),
        fill,
    )


def step_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    first, queries, keys = place.first_query, len(place.query_slots), len(place.key_slots)
    if first is None:
        return level_bias(d, sizes, place, name, small)
    curve = d.pick("linear", "linear", "log1p_square")
    rises = d.chance(0.7)
    shape = (d.pick(1, sizes[0]), d.pick(1, sizes[1]), keys)
    step = d.leaf(f"{name}.step", d.uniform(*shape) if rises else d.normal(*shape), small)
    slope = random_slope(d, sizes, queries, name, small)

    def fill(t: Tensors) -> Tensor:
        level = t[step].double().cumsum(2)
        return curved(curve, level[..., first : first + queries, None] - level[..., None, :], t[slope])

    return Part(
        f"LevelBias.of_steps({curve}, {shape[0]}x{shape[1]}{', rising' * rises})",
        lambda t, layout: lw.LevelBias.of_steps(
            t[step], t[slope], start=first, queries=queries, curve=curve, rising=rises
        ),
        fill,
    )


def line_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    """Curve, factors and knots have few bits, so that no pair stands on a knot, where a line's gradient jumps."""
    queries = len(place.query_slots)
    heads, knots = d.pick(1, sizes[1], sizes[1]), d.whole(0, 6)
    length, two_sided = d.whole(1, 60), d.chance(0.5)
    first = 1 - length if two_sided else 0
    rising = d.integers(0, 2, length).cumsum(0) / 16
    if two_sided:
        rising = torch.cat([rising[1:].flip(0), rising])
    curve = d.leaf(f"{name}.curve.table", rising[None])
    factor = d.leaf(f"{name}.factor", d.integers(1, 16, d.pick(1, sizes[0]), queries) / 8)
    at = ((d.integers(0, 1200, knots).unique() * 2 + 1) / 256).sort().values
    slope = d.normal(heads, len(at) + 1)
    jumps = (slope[:, :-1] - slope[:, 1:]) * at
    intercept = torch.cat([d.normal(heads, 1), jumps], 1).cumsum(1)
    d.leaf(f"{name}.knots", at)
    d.leaf(f"{name}.lines", slope)
    d.leaf(f"{name}.intercept", intercept)
    held = held_positions(d, place)

    def fill(t: Tensors) -> Tensor:
        apart = place.query[:, :, None] - place.key[:, None, :]
        x = t[factor][:, :, None] * t[curve][0][(apart - first).clamp(0, t[curve].shape[1] - 1)]
        passed = (x.detach()[..., None] >= t[f"{name}.knots"]).sum(-1)
        lines = zip(t[f"{name}.lines"], t[f"{name}.intercept"], strict=True)
        return torch.stack([slope[passed] * x + intercept[passed] for slope, intercept in lines], 1)

    def make(t: Tensors, layout: lw.TokenLayout | None) -> lw.Bias:
        shape = lw.DistanceBias(t[curve], *held(layout), first)
        return lw.LineBias(shape, t[factor], t[f"{name}.knots"], t[f"{name}.lines"], t[f"{name}.intercept"])

    return Part(f"LineBias({heads} x {len(at) + 1}, first={first})", make, fill)


@lw.registered
def wave(rows: Any, columns: Any, query: Tensor, key: Tensor, rate: Tensor, height: Tensor) -> Tensor:
    """height[h] * sin(rate[h] * distance) of positions."""
    apart = (query[:, None, rows, None] - key[:, None, None, columns]).to(rate.dtype)
    return height[:, None, None] * torch.sin(rate[:, None, None] * apart)


@lw.registered
def product(rows: Any, columns: Any, query: Tensor, key: Tensor) -> Tensor:
    """tanh(query * key) of one number a token."""
    return torch.tanh(query[..., rows, None] * key[..., None, columns])


def function_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    if d.chance(0.5):
        heads = d.pick(1, sizes[1])
        d.leaf(f"{name}.rate", 0.3 * d.normal(heads))
        d.leaf(f"{name}.height", d.normal(heads))

        def fill(t: Tensors) -> Tensor:
            apart = (place.query[:, None, :, None] - place.key[:, None, None, :]).to(t[f"{name}.rate"].dtype)
            rate, height = (t[f"{name}.{what}"].view(1, -1, 1, 1) for what in ("rate", "height"))
            return height * (rate * apart).sin()

        return Part(
            f"FunctionBias(wave, {heads})",
            lambda t, layout: lw.FunctionBias(wave, (place.query, place.key, t[f"{name}.rate"], t[f"{name}.height"])),
            fill,
        )
    rows, heads = d.pick(1, sizes[0]), d.pick(1, sizes[1])
    query = d.leaf(f"{name}.query", d.normal(rows, heads, len(place.query_slots)))
    key = d.leaf(f"{name}.key", d.normal(rows, heads, len(place.key_slots)))
    return Part(
        f"FunctionBias(product, {rows}x{heads})",
        lambda t, layout: lw.FunctionBias(product, (t[query], t[key])),
        lambda t: (t[query].unsqueeze(3) * t[key].unsqueeze(2)).tanh(),
    )


def dense_bias(d: Draw, sizes: tuple[int, int], place: Place, name: str, small: torch.dtype) -> Part:
    shape = (d.pick(1, sizes[0]), d.pick(1, sizes[1]), len(place.query_slots), len(place.key_slots))
    value = d.leaf(f"{name}.value", d.pick(1, 1, 10) * d.normal(*shape), small)
    return Part(f"DenseBias({shape[0]}x{shape[1]})", lambda t, layout: lw.DenseBias(t[value]), lambda t: t[value])


# Rescores. `fill` takes the tensors, content, bias, q and the mask.


@lw.registered
def blend(
    content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice, gain: Tensor, row_gain: Tensor
) -> Tensor:
    """Something of the whole row, of the query and of all heads."""
    length = q.square().mean(-1, keepdim=True)
    whole = content.cumsum(-1) / (1 + content.shape[-1])
    return content * (1 + 0.1 * length.tanh()) + gain * whole + row_gain[rows, None] * bias + bias.mean(1, keepdim=True)


def random_rescore(d: Draw, heads: int, queries: int, dim: int, small: torch.dtype, one_mask: bool) -> Part:
    """A small network along the heads, if all have one mask, contextual positions, or a function."""
    how = d.pick("contextual", "contextual", "function", *["network", "network"] * one_mask)
    if how == "network":
        hidden, kernel = d.pick(1, 4, 7, 16), d.pick(1, 3)
        d.leaf("network.weight_in", d.normal(hidden, 2 * heads, kernel) / (2 * heads * kernel) ** 0.5, small)
        d.leaf("network.bias_in", 0.3 * d.normal(hidden))
        d.leaf("network.weight_out", d.normal(heads, hidden, kernel) / (hidden * kernel) ** 0.5, small)
        d.leaf("network.bias_out", d.normal(heads), small)
        parts = [f"network.{part}" for part in ("weight_in", "bias_in", "weight_out", "bias_out")]
        return Part(
            f"HeadNetwork(hidden={hidden}, kernel={kernel})",
            lambda t, layout: lw.HeadNetwork(*(t[part] for part in parts)),
            lambda t, content, bias, q, mask: content + bias + head_network(t, content, bias, mask)[1],
        )
    if how == "contextual":
        d.leaf("contextual.table", d.normal(dim, d.pick(2, 3, 6, 12)), small)
        return Part("ContextualPositions", lambda t, layout: lw.ContextualPositions(t["contextual.table"]), contextual)
    d.leaf("blend.gain", d.normal(1))
    d.leaf("blend.row_gain", d.normal(queries))

    def fill(t: Tensors, content: Tensor, bias: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        ahead = torch.ones(content.shape[-1], content.shape[-1], dtype=content.dtype).triu()
        whole = content @ ahead / (1 + content.shape[-1])
        size = ((q * q).sum(-1) / q.shape[-1]).tanh()[..., None]
        total = content + 0.1 * size * content + t["blend.gain"] * whole + t["blend.row_gain"][:, None] * bias
        return total + bias.sum(1, keepdim=True) / bias.shape[1]

    return Part(
        "ScoreFunction(blend)",
        lambda t, layout: lw.ScoreFunction(blend, (t["blend.gain"], t["blend.row_gain"])),
        fill,
    )


def head_network(t: Tensors, content: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What enters the activation and what leaves the network, by torch's own convolution over each row."""
    kernel = t["network.weight_in"].shape[2]
    wide = content.dtype
    weight_in, bias_in, weight_out, bias_out = (
        t[f"network.{part}"].to(wide) for part in ("weight_in", "bias_in", "weight_out", "bias_out")
    )
    both = torch.cat([content, bias], 1)
    if both.numel() == 0:
        return both[:, :0], content
    before = torch.nn.functional.conv2d(both, weight_in[:, :, None], bias_in, padding=(0, kernel // 2))
    active = torch.where(before > 0, before, 0.01 * before) * mask
    return before, torch.nn.functional.conv2d(active, weight_out[:, :, None], bias_out, padding=(0, kernel // 2))


def contextual_positions(content: Tensor, mask: Tensor) -> Tensor:
    """How far back a key stands, in gates, before the table's end cuts it off."""
    gates = mask / (1 + (-content).exp())
    behind = torch.ones(content.shape[-1], content.shape[-1], dtype=content.dtype).tril()
    return gates @ behind


def contextual(t: Tensors, content: Tensor, bias: Tensor, q: Tensor, mask: Tensor) -> Tensor:
    """Straight lines between the table's columns, as sums of hats: one hat a column, 1 there and 0 at the next."""
    table = t["contextual.table"].to(content.dtype)
    place = contextual_positions(content, mask).clamp(max=table.shape[1] - 1)
    of_column = q @ table
    total = content + bias
    for column in range(table.shape[1]):
        total = total + (1 - (place - column).abs()).clamp(min=0) * of_column[..., column, None]
    return total


def keep_off_kinks(call: RandomCall) -> None:
    """Move the call a little where rounding alone would decide on which side of a kink a number falls.

    There the gradient jumps, and two exact roads may take different sides.
    """
    if "network.bias_in" in call.leaves:
        name = "network.bias_in"
        tensors = tensors_of(call, lambda x: x.double())
        *_, content, bias, _ = define(call, tensors)
        before, _ = head_network(tensors, content, bias, call.visible)
        own = viewed(call.leaves[name])
        for unit in range(before.shape[1]):
            seen = before[:, unit][call.visible[:, 0].expand_as(before[:, unit])].sort().values
            near = seen[(seen.abs() < 1)]
            near = torch.cat([near.new_tensor([-1.0]), near, near.new_tensor([1.0])])
            widest = int(near.diff().argmax())
            own[unit] -= float(near[widest] + near[widest + 1]) / 2
    if "contextual.table" in call.leaves:
        ends = viewed(call.leaves["contextual.table"]).shape[1] - 1
        q = call.leaves["q"].base
        if call.scale == 0:
            call.scale = 0.7
        for _ in range(40):
            content = define(call, tensors_of(call, lambda x: x.double()))[3]
            place = contextual_positions(content, call.visible)
            place = place[call.visible.expand_as(place) & (place < ends + 0.5)]
            # A sum of gates has some roundings of its size, which is at most the table's end.
            if not bool(((place - place.round()).abs() < 32 * ends * 2**-24).any()):
                break
            q.mul_(0.95)
        else:  # gates of one half each, say, whose sums are whole numbers
            call.rescore = None
            del call.leaves["contextual.table"]


# The definition.


def tensors_of(call: RandomCall, change: Callable[[Tensor], Tensor]) -> Tensors:
    """The leaves as `attend` sees them."""
    return {name: viewed(leaf, change(leaf.base)) for name, leaf in call.leaves.items()}


def define(call: RandomCall, t: Tensors) -> tuple[Tensor, ...]:
    """Output, log-sum-exp, weights with the sink's last, content, bias and scores; whole matrices throughout."""
    group = call.heads // call.kv_heads
    q = t["q"]
    k, v = (t[name][:, [head // group for head in range(call.heads)]] for name in ("k", "v"))
    seen = call.visible
    content = (q[:, :, :, None, :] * k[:, :, None, :, :]).sum(-1) if call.dim < 4 else q @ k.mT
    content = content * (1 / math.sqrt(call.dim) if call.scale is None else call.scale)
    if call.softcap is not None:
        content = call.softcap * torch.tanh(content / call.softcap)
    content = torch.where(seen, content, 0)
    bias = torch.zeros_like(content)
    if call.bias is not None:
        bias = torch.where(seen, call.bias.fill(t).to(content.dtype).expand_as(content), 0)
    scores = content + bias
    if call.rescore is not None:
        scores = call.rescore.fill(t, content, bias, q, seen)
    if "logit_scale" in t:
        scores = t["logit_scale"].to(scores.dtype)[..., None] * scores
    sink = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    if "sink" in t:
        own = t["sink"].to(q.dtype)
        sink = (own[None, :, None] if own.ndim == 1 else own).expand_as(sink)
    logits = torch.cat([torch.where(seen, scores, -torch.inf), sink[..., None]], -1)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    powers = torch.exp(logits - top)
    total = powers.sum(-1, keepdim=True)
    nothing = total == 0
    weights = powers / torch.where(nothing, 1, total)
    lse = torch.where(nothing, -torch.inf, torch.where(nothing, 1, total).log() + top)[..., 0]
    return weights[..., :-1] @ v, lse, weights, content, bias, scores


# The judge.


def results(
    call: RandomCall,
    run: Callable[[Tensors], tuple[Tensor, Tensor | None]],
    start: Callable[[Tensor], Tensor] = lambda leaf: leaf,
    inside: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensors:
    """Output, log-sum-exp and the gradients of what is learned, by name."""
    bases = {name: start(leaf.base).detach() for name, leaf in call.leaves.items()}
    for name in call.learned:
        bases[name] = bases[name].clone().requires_grad_()
    with torch.enable_grad() if call.learned else torch.no_grad():
        tensors = {name: viewed(leaf, inside(bases[name])) for name, leaf in call.leaves.items()}
        out, lse = run(tensors)
    found = {"out": out.detach()}
    if lse is not None:
        found["lse"] = lse.detach()
    if not call.learned:
        return found
    sides = zip((out, lse), call.cotangents, strict=True)
    pairs = [(y, dy.to(y.dtype)) for y, dy in sides if y is not None and dy is not None and y.requires_grad]
    learned = [bases[name] for name in call.learned]
    gradients: tuple[Tensor | None, ...] = (None,) * len(learned)
    if pairs:
        gradients = torch.autograd.grad([y for y, _ in pairs], learned, [dy for _, dy in pairs], allow_unused=True)
    for name, base, gradient in zip(call.learned, learned, gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(base) if gradient is None else gradient
    return found


def run_backend(call: RandomCall, backend: str) -> Tensors | None:
    """What a backend gives, or None if it refuses the call."""
    accepted = True

    def run(tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        nonlocal accepted
        own = call.arguments(tensors)
        if backend != "auto":
            checked = checked_call(**own, return_lse=call.return_lse)
            if isinstance(BACKENDS[backend].plan(checked), Refusal):
                accepted = False
                return torch.zeros(0), None
        got = lw.attend(**own, return_lse=call.return_lse, backend=backend)
        return got if call.return_lse else (got, None)

    with nullcontext() if call.skip else lw.skipping(False):
        found = results(call, run)
    return found if accepted else None


def accepts(call: RandomCall, backend: str) -> bool:
    """Whether a backend takes the call; it is not run."""
    with torch.enable_grad() if call.learned else torch.no_grad(), lw.skipping(call.skip):
        bases = {name: leaf.base.detach().requires_grad_(name in call.learned) for name, leaf in call.leaves.items()}
        tensors = {name: viewed(leaf, bases[name]) for name, leaf in call.leaves.items()}
        checked = checked_call(**call.arguments(tensors), return_lse=call.return_lse)
        return not isinstance(BACKENDS[backend].plan(checked), Refusal)


def judge(call: RandomCall, backend: str) -> bool:
    """Whether the backend takes the call; an AssertionError with the call and what is wrong if it is wrong."""
    try:
        ours = run_backend(call, backend)
    except Exception as error:
        raise AssertionError(f"{backend} raised {type(error).__name__}: {error}\n{call}") from error
    if ours is None:
        return False
    wrong = list(faults(call, ours))
    assert not wrong, f"{backend}: {'; '.join(wrong)}\n{call}"
    return True


def faults(call: RandomCall, ours: Tensors) -> Iterator[str]:
    """What is wrong with an answer, in words.

    An error may be twice that of the plain float32 computation, plus rounding: as many roundings of the tensor's norm
    as a sum of all keys in another order has, or where terms cancel what random roundings of the terms amount to.
    """
    if ours["out"].dtype != call.dtype:
        yield f"out is {ours['out'].dtype}"
    if "lse" in ours and ours["lse"].dtype != torch.float32:
        yield f"lse is {ours['lse'].dtype}"
    for name, got in ours.items():
        exact, plain = call.exact[name], call.plain[name]
        assert not exact.isnan().any(), f"the definition of {name} is not a number: {call}"
        if got.shape != exact.shape:
            yield f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
            continue
        finite = exact.isfinite()
        if not torch.equal(got.double().where(~finite, 0), exact.where(~finite, 0)) or not got[finite].isfinite().all():
            yield f"{name} is not finite in {int((~got.isfinite()).sum())} places instead of {int((~finite).sum())}"
            continue
        exact, plain, got = (x.double().where(finite, 0) for x in (exact, plain, got))
        error, allowed = float((got - exact).norm()), 2 * float((plain - exact).norm())
        half = ours[name].dtype in (torch.bfloat16, torch.float16)
        kind = torch.finfo(ours[name].dtype if half else torch.float32)
        terms = max(call.queries, call.keys, 1)
        # What is below the smallest normal number has fewer digits, and kernels may take it as 0.
        underflow = terms * got.numel() ** 0.5 * max(kind.tiny * kind.eps, 1e3 * torch.finfo(torch.float32).tiny)
        allowed += kind.eps * terms**0.5 * float(exact.norm()) + underflow
        if error > allowed:
            allowed += roundings(exact.numel()) * call.noise(kind.eps).get(name, 0.0)
        if error > allowed:
            size = float(exact.norm())
            yield f"{name} is off by {error:.2e} of {size:.2e}, allowed are {allowed:.2e}"


def rounding_inside(call: RandomCall, eps: float) -> dict[str, float]:
    """By name, what random roundings inside of the definition amount to."""
    bases = {name: leaf.base.double().requires_grad_(name in call.learned) for name, leaf in call.leaves.items()}
    t = {name: viewed(leaf, base) for (name, base), leaf in zip(bases.items(), call.leaves.values(), strict=True)}
    out, lse, weights, _, bias, scores = define(call, t)
    k, v = (t[name].repeat_interleave(call.heads // call.kv_heads, 1) for name in ("k", "v"))
    sink = torch.zeros(1, call.heads, 1) if "sink" not in t else t["sink"]
    sink = (sink[None, :, None] if sink.ndim == 1 else sink).expand(call.batch, -1, call.queries)
    with torch.no_grad():
        scale = 1 / math.sqrt(call.dim) if call.scale is None else abs(call.scale)
        terms = scale * t["q"].norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :] + bias.abs()
        terms = terms * t["logit_scale"].abs()[..., None] if "logit_scale" in t else terms
        terms = terms + scores.abs() + lse.where(lse.isfinite(), 0).abs()[..., None]
    inside = Inside(torch.where(call.visible, scores, 0), sink, v, weights, terms, out, lse)
    learned = {f"gradient of {name}": bases[name] for name in call.learned}
    return rounding_noise(inside, *call.cotangents, learned, eps=eps, seed=call.seed)
