"""What a query may see, against loops over all pairs: as a mask, as intervals, and counted."""

import random

import pytest
import torch

import lengthwise as lw
from lengthwise.visibility import Visibility

ROUNDS, CHUNKS = 1200, 4


class Draws:
    """Random layouts and windows with everything that they were made of."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.queries, self.past, self.batch = pick.randint(1, 13), pick.randint(0, 5), pick.randint(1, 3)
        total = self.total = self.queries + self.past
        self.causal = pick.random() < 0.6
        self.real = self.documents = self.explicit = None
        if pick.random() < 0.5:
            self.real = torch.rand(pick.choice((1, self.batch)), total, generator=self.generator) > 0.3
        if pick.random() < 0.6:
            rows = pick.choice((1, self.batch))
            self.documents = torch.randint(-2, 3, (rows, total), generator=self.generator)
            if pick.random() < 0.4:
                self.documents = torch.randint(0, 2, (rows, total), generator=self.generator).cumsum(1)
        self.start = pick.randint(0, self.past)
        self.layout = lw.TokenLayout.of(
            torch.arange(self.start, self.start + self.queries),
            torch.arange(total),
            key_mask=self.real,
            documents=self.documents,
            start=self.start,
            causal=self.causal,
        )
        self.first, self.keys = 0, total
        if pick.random() < 0.4:
            self.first = pick.randint(0, total)
            self.keys = pick.randint(0, total - self.first)
            self.layout = self.layout.keys(self.first, self.keys)
        self.window, self.bands = None, ()
        if pick.random() < 0.3:
            self.window = pick.randint(1, 6)
        elif pick.random() < 0.7:
            self.bands = tuple(self.band(pick) for _ in range(pick.randint(1, 3)))
        self.visibility = Visibility(self.layout, self.window, self.bands)
        spread = (self.batch, total)
        self.is_real = (torch.ones(spread) if self.real is None else self.real.expand(spread)).bool().tolist()
        self.document = (torch.zeros(spread) if self.documents is None else self.documents.expand(spread)).tolist()
        self.number = [
            [sum(real[t] and document[t] == document[slot] for t in range(slot + 1)) - 1 for slot in range(total)]
            for real, document in zip(self.is_real, self.document, strict=True)
        ]

    @staticmethod
    def band(pick: random.Random) -> lw.Band:
        nearest = pick.randint(-3, 3)
        farthest = None if pick.random() < 0.3 else nearest + pick.randint(1, 5)
        return lw.Band(nearest, farthest, pick.choice((None, None, 1, 2, 4)), pick.choice((1, 1, 2, 3)))

    def sees(self, row: int, query: int, key: int) -> bool:
        """Of slots."""
        if not self.is_real[row][key] or self.document[row][query] != self.document[row][key]:
            return False
        if (self.causal and key > query) or (self.window is not None and abs(query - key) >= self.window):
            return False
        own, other = self.number[row][query], self.number[row][key]
        return not self.bands or any(
            (passed := own // band.chunk - other // band.chunk) >= band.nearest
            and (band.farthest is None or passed < band.farthest)
            and (band.first is None or other < band.first)
            for band in self.bands
        )

    def pairs(self) -> torch.Tensor:
        """(batch, query, key), pair by pair."""
        queries, keys = range(self.start, self.start + self.queries), range(self.first, self.first + self.keys)
        found = [[[self.sees(row, i, j) for j in keys] for i in queries] for row in range(self.batch)]
        return torch.tensor(found, dtype=torch.bool).view(self.batch, self.queries, self.keys)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_mask_intervals_and_counts_are_those_of_loops(chunk):
    for seed in range(chunk, ROUNDS, CHUNKS):
        draws = Draws(seed)
        visibility, shown = draws.visibility, f"seed {seed}"
        expected = draws.pairs()
        assert torch.equal(visibility.mask()[:, 0].expand_as(expected), expected), shown
        rows, columns = slice(draws.queries // 3, draws.queries), slice(draws.keys // 2, draws.keys)
        assert torch.equal(visibility.mask(rows, columns)[:, 0].expand(draws.batch, -1, -1), expected[:, rows, columns])
        assert torch.equal(visibility.seen()[:, 0].expand(draws.batch, -1), expected.sum(-1)), shown
        some = torch.rand(draws.batch, 2, draws.keys, generator=draws.generator) < 0.5
        wanted = (expected[:, None] & some[:, :, None]).sum(-1)
        assert torch.equal(visibility.seen(some).expand_as(wanted), wanted), shown
        real = torch.ones(1, 1, draws.keys, dtype=torch.bool)
        if draws.layout.key_mask is not None:
            real = draws.layout.key_mask[:, None]  # intervals leave it to the mask which keys are padding
        assert torch.equal(from_intervals(draws) & real, expected), shown


def from_intervals(draws: Draws) -> torch.Tensor:
    """The pairs that the intervals say, each said once."""
    order, (low, high) = draws.visibility.intervals()
    rows = range(draws.batch)
    sorted_keys = [
        list(range(draws.keys)) if order is None else order[min(row, len(order) - 1)].tolist() for row in rows
    ]
    counted = torch.zeros(draws.batch, draws.queries, draws.keys, dtype=torch.int64)
    for begins, ends in zip(low.tolist(), high.tolist(), strict=True):
        for row in rows:
            own = min(row, len(begins) - 1)
            for i, (begin, end) in enumerate(zip(begins[own], ends[own], strict=True)):
                counted[row, i, sorted_keys[row][begin : max(begin, end)]] += 1
    assert not (counted > 1).any()
    return counted > 0


def test_random_layouts_are_of_every_sort():
    drawn = [Draws(seed) for seed in range(ROUNDS)]
    scattered = [d for d in drawn if d.documents is not None and bool((d.documents.diff() < 0).any())]
    assert len(scattered) > 200
    assert sum(len(d.bands) > 1 for d in scattered) > 50
    assert sum(d.keys == 0 for d in drawn) > 10
    assert sum(d.real is not None and d.documents is not None and d.first > 0 for d in drawn) > 30
    assert sum(d.layout.start not in range(d.keys - d.queries + 1) for d in drawn) > 100


def test_an_explicit_mask_replaces_causality_and_nothing_else():
    positions, documents = torch.arange(6), torch.tensor([[0, 0, 0, 1, 1, 1]])
    real = torch.tensor([[True, False, True, True, True, True]])
    explicit = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    layout = lw.TokenLayout.of(positions, documents=documents, key_mask=real, mask=explicit)
    visibility = Visibility(layout, 2)
    assert not visibility.is_causal
    for b in range(2):
        for h in range(3):
            for i in range(6):
                for j in range(6):
                    near = abs(i - j) < 2 and i // 3 == j // 3 and j != 1
                    assert visibility.mask()[b, h, i, j] == (near and explicit[b, h, i, j])
    assert torch.equal(visibility.seen(), visibility.mask().sum(-1))


@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_counted_is_counted_for_each_head_of_the_keys(heads):
    some = torch.rand(2, heads, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(Visibility(lw.layout(5)).seen(some), some.cumsum(-1))


def test_the_window_of_slots_counts_padding_and_a_band_does_not():
    real = torch.tensor([[True, False, False, True]])
    layout = lw.layout(4, key_mask=real)
    assert Visibility(layout, 2).mask()[0, 0, 3].tolist() == [False, False, False, True]
    assert Visibility(layout, None, (lw.Band(0, 2),)).mask()[0, 0, 3].tolist() == [True, False, False, True]


def test_bands_are_counted_inside_a_document():
    layout = lw.layout(6, documents=torch.tensor([[0, 1, 0, 1, 0, 1]]))
    assert Visibility(layout, None, (lw.Band(1, 2),)).mask()[0, 0].nonzero().tolist() == [
        [2, 0],
        [3, 1],
        [4, 2],
        [5, 3],
    ]
    first = Visibility(layout, None, (lw.Band(0, None, first=1),)).mask()[0, 0]
    assert first.nonzero().tolist() == [[0, 0], [1, 1], [2, 0], [3, 1], [4, 0], [5, 1]]


def test_a_chunk_is_seen_whole():
    seen = Visibility(lw.layout(6, causal=False), None, (lw.Band(0, 1, chunk=3),)).mask()[0, 0]
    assert torch.equal(seen, torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_documents_of_any_integers_are_kept_apart(dtype):
    documents = (torch.arange(60) // 10)[None]
    q, k, v = torch.randn(3, 1, 3, 60, 8, generator=torch.Generator().manual_seed(0))
    wide, narrow = (lw.attend(q, k, v, layout=lw.layout(60, documents=x)) for x in (documents, documents.to(dtype)))
    assert torch.equal(narrow, wide)
