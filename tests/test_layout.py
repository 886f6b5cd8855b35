"""Where tokens stand: positions, documents, padding and caches, known without reading a tensor where nobody may."""

import functools
import inspect
import sys
import threading
from dataclasses import replace

import pytest
import torch

import lengthwise as lw
from lengthwise.attention.call import AttentionCall
from lengthwise.token_layout import Facts, TokenLayout, documents_of
from lengthwise.visibility import Visibility

PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1]]).bool()
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 7, 7, 7, 9]])
SCATTERED = torch.tensor([[1, 0, 1, 0, 2, 1]])


def test_tokens_are_counted_from_0():
    layout = lw.layout(4)
    assert layout.query.tolist() == layout.key.tolist() == [[0, 1, 2, 3]]
    assert (layout.query_count, layout.key_count, layout.start, layout.batch) == (4, 4, 0, 1)
    assert layout.is_plain
    assert layout.queries_last


def test_a_tensor_tells_how_many_tokens_there_are_and_on_which_device():
    layout = lw.layout(torch.empty(2, 5, 3, device="meta"))
    assert layout.query_count == 5
    assert layout.query.device.type == "meta"


def test_new_tokens_come_after_those_of_the_past():
    layout = lw.layout(2, past=3)
    assert layout.query.tolist() == [[3, 4]]
    assert layout.key.tolist() == [[0, 1, 2, 3, 4]]
    assert layout.start == 3
    assert layout.queries_last


def test_padding_takes_no_position():
    layout = lw.layout(6, key_mask=PADDED)
    assert layout.key.tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3]]
    assert torch.equal(layout.query_mask, PADDED)


def test_positions_begin_anew_in_each_document():
    assert lw.layout(6, documents=PACKED).key.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 0]]
    assert lw.layout(6, documents=SCATTERED).key.tolist() == [[0, 0, 1, 1, 0, 2]]


def test_padding_in_a_document_takes_no_position_either():
    layout = lw.layout(6, documents=PACKED, key_mask=PADDED)
    assert layout.key.tolist() == [[0, 0, 0, 0, 1, 2], [0, 1, 0, 0, 0, 0]]


def test_masks_and_documents_of_the_queries_are_those_of_their_slots():
    layout = lw.layout(2, past=4, documents=PACKED, key_mask=PADDED)
    assert torch.equal(layout.query_documents, PACKED[:, 4:])
    assert torch.equal(layout.query_mask, PADDED[:, 4:])
    early = TokenLayout.of(torch.arange(2), torch.arange(6), documents=PACKED, key_mask=PADDED, start=1)
    assert torch.equal(early.query_documents, PACKED[:, 1:3])
    assert torch.equal(early.query_mask, PADDED[:, 1:3])


@pytest.mark.parametrize("borders", [[0, 2, 2, 5, 6], torch.tensor([0, 2, 2, 5, 6]), (0, 2, 2, 5, 6)])
def test_borders_say_the_same_as_documents(borders):
    by_borders = lw.layout(4, past=2, cu_seqlens=borders)
    by_documents = lw.layout(4, past=2, documents=torch.tensor([[0, 0, 2, 2, 2, 3]]))
    for name in ("query", "key", "query_documents", "key_documents"):
        assert torch.equal(getattr(by_borders, name), getattr(by_documents, name)), name
    assert by_borders.facts == by_documents.facts
    assert documents_of(borders, 6).tolist() == [[0, 0, 2, 2, 2, 3]]


@pytest.mark.parametrize(
    ("borders", "words"),
    [([0, 3], "must rise from 0 to the length 6"), ([1, 6], "from 0"), ([0, 4, 2, 6], "rise"), ([0], "two borders")],
)
def test_borders_that_do_not_cover_the_tokens_are_refused(borders, words):
    with pytest.raises(ValueError, match=words):
        lw.layout(6, cu_seqlens=borders)


def test_a_start_as_a_tensor_is_the_same_place():
    positions = torch.arange(6)
    known = TokenLayout.of(positions[2:4], positions, documents=PACKED, key_mask=PADDED, start=2)
    hidden = TokenLayout.of(positions[2:4], positions, documents=PACKED, key_mask=PADDED, start=torch.tensor(2))
    assert hidden.facts is None
    for name in ("query_documents", "query_mask"):
        assert torch.equal(getattr(known, name), getattr(hidden, name)), name
    assert torch.equal(known.query_slots(), hidden.query_slots())
    for a, b in zip(known.indices(), hidden.indices(), strict=True):
        assert torch.equal(a, b)


# Some of the keys.


def test_a_part_of_the_keys_keeps_the_queries_where_they_are():
    part = lw.layout(2, past=4, key_mask=PADDED, documents=PACKED).keys(1, 3)
    assert (part.key_count, part.key_start, part.query_start, part.start) == (3, 1, 4, 3)
    assert torch.equal(part.key_mask, PADDED[:, 1:4])
    assert torch.equal(part.key_documents, PACKED[:, 1:4])
    assert torch.equal(part.query_documents, PACKED[:, 4:])


def test_a_part_of_a_part_is_a_part_of_the_whole():
    whole = lw.layout(3, past=3, key_mask=PADDED, documents=SCATTERED)
    twice, once = whole.keys(1, 4).keys(1, 2), whole.keys(2, 2)
    for name in ("query", "key", "key_mask", "key_documents", "query_index", "key_index"):
        assert torch.equal(getattr(twice, name), getattr(once, name)), name
    assert (twice.start, twice.facts) == (once.start, once.facts)


def test_tokens_are_counted_over_all_keys_also_where_only_some_are_left():
    whole = lw.layout(2, past=4, key_mask=PADDED, documents=SCATTERED)
    query, key = whole.indices()
    part_query, part_key = whole.keys(2, 3).indices()
    assert torch.equal(part_query, query)
    assert torch.equal(part_key, key[:, 2:5])


@pytest.mark.parametrize("cut", [(0, 0), (6, 0), (3, 0)])
def test_there_may_be_no_keys_left(cut):
    part = lw.layout(2, past=4, documents=PACKED).keys(*cut)
    assert part.key_count == 0
    assert part.facts is not None


@pytest.mark.parametrize("cut", [(-1, 2), (0, 7), (5, 2), (3, -1)])
def test_keys_that_there_are_not_are_refused(cut):
    with pytest.raises(ValueError, match="within the 6 keys"):
        lw.layout(6).keys(*cut)


def test_queries_behind_padded_keys_may_see_a_part_of_them():
    """Nobody can count tokens there, and nobody asks."""
    behind = TokenLayout.of(torch.arange(9, 11), torch.arange(6), key_mask=PADDED, start=9)
    part = behind.keys(2, 3)
    assert part.start == 7
    assert torch.equal(part.key_mask, PADDED[:, 2:5])
    q, k = torch.randn(2, 1, 2, 4), torch.randn(2, 1, 3, 4)
    assert lw.attend(q, k, k, layout=part).isfinite().all()
    with pytest.raises(ValueError, match="counted"):
        part.indices()


def test_new_tokens_alone_are_queries_and_keys_at_once():
    alone = lw.layout(2, past=4, key_mask=PADDED, documents=PACKED).new_tokens()
    assert alone.key is alone.query
    assert (alone.start, alone.key_count) == (0, 2)
    assert torch.equal(alone.key_mask, PADDED[:, 4:])
    assert torch.equal(alone.key_documents, PACKED[:, 4:])


def test_the_facts_of_one_new_token_are_those_that_would_be_read():
    for own in (lw.layout(1, past=5), lw.layout(1, past=5, key_mask=PADDED, documents=PACKED)):
        alone = own.new_tokens()
        assert alone.facts == replace(alone, facts=None).with_facts().facts


def test_without_a_past_new_tokens_are_all_tokens():
    layout = lw.layout(5)
    assert layout.new_tokens() is layout


# Counting.


def counted_in_loops(real: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    number = torch.zeros(real.shape, dtype=torch.int64)
    for row in range(real.shape[0]):
        for token in range(real.shape[1]):
            own = [t for t in range(token + 1) if real[row, t] and documents[row, t] == documents[row, token]]
            number[row, token] = len(own) - 1
    return number


def test_a_token_s_number_counts_the_real_tokens_of_its_document():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        real = torch.rand(3, 12, generator=generator) < 0.7
        documents = torch.randint(-2, 3, (3, 12), generator=generator)
        query, key = lw.layout(5, past=7, key_mask=real, documents=documents).indices()
        expected = counted_in_loops(real, documents)
        assert torch.equal(key, expected)
        assert torch.equal(query, expected[:, 7:])
        one = lw.layout(5, past=7, key_mask=real, documents=documents[:1]).indices()[1]
        assert torch.equal(one, counted_in_loops(real, documents[:1].expand(3, -1)))


def test_where_nothing_is_padded_or_packed_a_token_s_number_is_its_slot():
    query, key = lw.layout(2, past=3).keys(1, 4).indices()
    assert query.tolist() == [[3, 4]]
    assert key.tolist() == [[1, 2, 3, 4]]


# Facts.


def test_facts_of_counted_tokens_come_from_plain_numbers():
    assert lw.layout(2, past=3).facts == Facts(lowest=3, highest=4, furthest=4, offsets=(0,))
    assert lw.layout(torch.empty(1, 7, 2, device="meta")).facts == Facts(0, 6, 6, (0,))


def test_facts_are_those_of_the_positions():
    layout = TokenLayout.of(torch.tensor([[7, 8], [9, 10]]), torch.tensor([[5, 6, 7, 8], [0, 1, 2, 3]]))
    assert layout.facts == Facts(lowest=7, highest=10, furthest=10, offsets=(0, 7))


def test_positions_with_gaps_do_not_follow_slots():
    facts = TokenLayout.of(torch.tensor([0, 2, 3])).facts
    assert facts is not None
    assert facts.offsets is None


def test_padding_and_other_documents_do_not_count_in_offsets():
    left = lw.layout(6, key_mask=PADDED[:1]).facts
    packed = lw.layout(6, documents=PACKED).facts
    assert left is not None
    assert left.offsets == (0,)
    assert packed is not None
    assert packed.offsets == (0,)


def offsets_in_loops(layout: TokenLayout) -> list[set[int]]:
    """For every sequence by how much position distances exceed slot distances, over all pairs that may meet."""
    seen = Visibility(layout).mask().any(1)
    found = []
    for row in range(layout.batch):
        pairs = [(int(i), int(j)) for i, j in seen[row if seen.shape[0] > 1 else 0].nonzero()]
        query, key = (x[row if x.shape[0] > 1 else 0] for x in (layout.query, layout.key))
        found.append({int(query[i] - key[j]) - (int(layout.start) + i - j) for i, j in pairs})
    return found


def test_offsets_hold_for_every_pair_that_may_meet():
    generator = torch.Generator().manual_seed(1)
    known = 0
    for _ in range(200):
        padding = torch.rand(2, 8, generator=generator) < 0.8
        packing = torch.randint(0, 2, (2, 8), generator=generator).cumsum(1)
        options = [{}, {"key_mask": padding}, {"documents": packing}, {"key_mask": padding, "documents": packing}]
        chosen = options[int(torch.randint(0, 4, (), generator=generator))]
        past = int(torch.randint(0, 8, (), generator=generator))
        layout = lw.layout(8 - past, past=past, causal=bool(torch.randint(0, 2, (), generator=generator)), **chosen)
        first = int(torch.randint(0, 8, (), generator=generator))
        for own in (layout, layout.keys(first, 8 - first)):
            assert own.facts is not None
            if own.facts.offsets is not None:
                stated = own.facts.offsets * (own.batch if len(own.facts.offsets) == 1 else 1)
                for offset, found in zip(stated, offsets_in_loops(own), strict=True):
                    assert found <= {offset}
                known += 1
    assert known > 100


def test_a_query_before_position_0_is_refused():
    with pytest.raises(lw.PositionError, match="0 or more, got -1"):
        TokenLayout.of(torch.tensor([-1, 0]))


# Nothing is read where nobody may look.


def meta_layouts() -> dict[str, TokenLayout]:
    def on(x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")

    positions = torch.arange(6, device="meta")
    return {
        "padding": lw.layout(4, past=2, key_mask=on(PADDED), device="meta"),
        "documents": lw.layout(6, documents=on(SCATTERED), device="meta"),
        "borders": lw.layout(6, cu_seqlens=torch.tensor([0, 2, 6], device="meta")),
        "everything": lw.layout(3, past=3, key_mask=on(PADDED), documents=on(PACKED), device="meta", causal=False),
        "positions": TokenLayout.of(positions[2:], positions),
        "mask": TokenLayout.of(positions, mask=torch.ones(1, 1, 6, 6, dtype=torch.bool, device="meta")),
    }


@pytest.mark.parametrize("name", meta_layouts())
def test_a_layout_reads_no_tensor(name):
    """A tensor on `meta` has no numbers, and whoever reads one gets an error."""
    layout = meta_layouts()[name]
    assert layout.facts is None
    for own in (layout, layout.keys(1, 4), layout.new_tokens()):
        assert own.facts is None
        query, key = own.indices()
        assert (query.shape[1], key.shape[1]) == (own.query_count, own.key_count)
        for window, bands in ((None, ()), (3, ()), (None, (lw.Band(0, 2), lw.Band(1, 9, 4, 2)))):
            visibility = Visibility(own, window, bands)
            assert visibility.mask().shape[2:] == (own.query_count, own.key_count)
            assert visibility.intervals()[1][0].shape[-1] == own.query_count
            assert visibility.seen().shape[-1] == own.query_count


@pytest.mark.parametrize("kind", [TokenLayout, Facts, lw.Band, Visibility, AttentionCall])
def test_nothing_is_cached_in_a_value(kind):
    """functools.cached_property breaks a compiled graph on Python 3.11."""
    assert not [n for n, member in inspect.getmembers_static(kind) if isinstance(member, functools.cached_property)]
    with pytest.raises(AttributeError):
        object.__new__(kind).anything = 1


@pytest.mark.parametrize(("padded", "packed"), [(False, False), (True, False), (True, True)])
def test_a_compiled_graph_makes_the_same_layout(padded, packed):
    def make(x, key_mask, documents):
        whole = lw.layout(x, past=2, key_mask=key_mask if padded else None, documents=documents if packed else None)
        found = []
        for layout in (whole, whole.keys(1, 4), whole.new_tokens()):
            visibility = Visibility(layout, None, (lw.Band(0, 2),))
            found += [layout.query, layout.key, *layout.indices(), visibility.mask(), visibility.seen()]
        return found

    inputs = (torch.zeros(2, 4, 3), PADDED, PACKED)
    torch.compiler.reset()
    compiled = torch.compile(make, fullgraph=True, backend="eager")
    for got, wanted in zip(compiled(*inputs), make(*inputs), strict=True):
        assert torch.equal(got, wanted)


# Two threads.


@pytest.mark.parametrize("decoding", [False, True])
def test_two_threads_get_the_biases_of_their_own_layouts(decoding):
    """FIRE is a table within L and straight lines beyond; the layout decides, and no thread sees another's."""
    torch.manual_seed(0)
    fire = lw.make("fire", heads=2, width=8, head_dim=4, train_length=16, threshold=16.0)
    with torch.no_grad():
        for parameter in fire.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    lengths = (10, 40)

    def bias(length: int) -> torch.Tensor:
        layout = lw.layout(1, past=length - 1) if decoding else lw.layout(length)
        with torch.no_grad():
            return fire.bias(torch.zeros(1, layout.query_count, 8), layout).dense()

    expected = {length: bias(length) for length in lengths}
    wrong: list[int] = []
    ready = threading.Barrier(len(lengths))

    def work(length: int) -> None:
        ready.wait()
        for _ in range(200):
            if not torch.allclose(bias(length), expected[length], rtol=1e-5, atol=1e-6):
                wrong.append(length)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("name", ["cable", "fox", "k-cable", "path"])
def test_without_a_state_padding_between_tokens_counts_for_nothing_too(name):
    encoding = lw.make(name, heads=3, width=24, head_dim=8)
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False, False, True, True]])
    layout = lw.layout(x, key_mask=mask)
    hook = encoding.rescore if name == "path" else encoding.bias
    found, expected = hook(x, layout), hook(x, layout, encoding.state(x, mask))
    if name == "path":
        q = torch.randn(1, 3, 6, 8, generator=torch.Generator().manual_seed(1))
        outs = [lw.attend(q, q, q, layout=layout, rescore=rescore) for rescore in (found, expected)]
    else:
        outs = [found.dense(), expected.dense()]
    assert torch.equal(*outs)


# These have numbers for both sides whatever they were made for.
BOTH_SIDES = ("alibi", "alibi-2d", "swin", "grape-a")


@pytest.mark.parametrize(
    "name", [name for name, cls in lw.ENCODINGS.items() if cls.hook() == "bias" and name not in BOTH_SIDES]
)
def test_an_encoding_of_causal_attention_is_not_asked_for_later_keys(name):
    shape = {"heads": 4, "width": 32, "head_dim": 8, "train_length": 64}
    encoding, x = lw.make(name, **shape), torch.zeros(1, 6, 32)
    q = torch.zeros(1, 4, 6, 8)
    with pytest.raises(ValueError, match="made for causal attention got a two-sided layout; make it with"):
        encoding.bias(x, lw.layout(6, causal=False), **encoding.own_qk("bias", q, q))
