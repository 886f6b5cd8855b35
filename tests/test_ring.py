"""Ring attention: several processes give what one gives, for every encoding that does not rescore."""

import copy
import dataclasses
import functools
import itertools
import math
import re
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rounding import Inside, assert_within_rounding, rounding_noise
from train_kit import Processes

import lengthwise as lw
from lengthwise.attention import checked_call
from lengthwise.distributed import gather, ring, ring_attend, ring_loss, spread, take
from lengthwise.distributed import layout as layout_module
from lengthwise.distributed.collectives import Transfer
from lengthwise.distributed.sharding import SEGMENT_TOKENS, cut, zigzag
from lengthwise.encodings._table_cache import STEP, table_reach
from lengthwise.encodings.registry import find
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.testing import Subject, assert_near
from lengthwise.token_layout import Ring

SPREAD = [name for name, cls in lw.ENCODINGS.items() if not cls.overrides("rescore")]
VARIANTS = [
    ("alibi", {"learned": True}),
    ("bam", {"learned": "all"}),
    ("fire", {"threshold": 8.0}),
    ("grape-m", {"per_head": True}),
    ("rope", {"scaling": {"type": "dynamic", "factor": 4.0}}),
    ("rope+fox+ssmax+sink", {}),
]
CASES = [(name, {}) for name in SPREAD] + VARIANTS
NAMES = [name + "".join(f"-{option}" for option in options) for name, options in CASES]
ROADS = [
    *("cable", "k-cable", "alibi", "rope", "xpos", "carope", "selective-rope", "kerple", "fire", "t5", "shaw"),
    *("deberta", "inkling", "grape-a", "learned", "logn", "rope+fox+ssmax+sink"),
]
"""One of each: levels, rotations, a common middle, sums of angles, a halo, tables, lines, profiles of queries and keys,
functions, embeddings, counts of tokens, and all of it composed. The rest is behind prove."""


@pytest.fixture(scope="module")
def in_ring():
    """Some work in the processes of one group, which do that of all tests here."""
    processes = Processes()
    yield processes
    processes.close()


@contextmanager
def in_segments(tokens, near=1):
    """Chunks are worked with in segments of so few tokens, of which so many are in one block with their queries."""
    with mock.patch.dict(SEGMENT_TOKENS, cpu=tokens), mock.patch.object(ring, "NEAR", near):
        yield


def documents_and_padding(length, *, causal=True):
    """Two sequences: three documents in one, padding at both ends of the other."""
    slots = torch.arange(length)
    documents = torch.stack(
        [torch.bucketize(slots, torch.tensor([length // 4, length // 2 + 2]), right=True), 0 * slots]
    )
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, :5] = mask[1, -3:] = False
    return lw.layout(length, key_mask=mask, documents=documents, causal=causal)


def attention_inputs(layer, x, layout, **options):
    """What `attend` is given for one layer, whoever has the tokens."""
    encoding = layer.encoding
    x = encoding.embed(x, layout)
    q, k, v = layer.qkv(x)
    own_qk = encoding.own_qk("bias", q, k)
    state = encoding.state(x, layout.query_mask, **encoding.own_qk("state", q, k))
    q, k = encoding.rotate(q, k, layout, state)
    made = {
        "bias": encoding.bias(x, layout, state, **own_qk),
        "logit_scale": encoding.logit_scale(x, layout),
        "sink": encoding.sink(x),
        "scale": layer.scale,
    }
    return (q, k, v), made | options | {"layout": layout, "return_lse": True}


def attention(layer, x, layout, backend="auto", **options):
    """Output and log-sum-exp of one layer."""
    qkv, made = attention_inputs(layer, x, layout, **options)
    return lw.attend(*qkv, **made, backend=backend)


def loss_directions(out, lse, real):
    """Two gradients of the output and the log-sum-exp, none where a token is padding."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        d_out = torch.randn(out, generator=generator) * real[:, None, :, None]
        yield d_out, torch.randn(lse, generator=generator) * real[:, None]


def alone(layer, x, layout, backend, **options):
    """Output, log-sum-exp and gradients in one process, by name."""
    x = x.clone().requires_grad_()
    out, lse = attention(layer, x, layout, backend, **options)
    sources = {"x": x} | dict(layer.named_parameters())
    results = {"out": [real_rows(out, layout)], "lse": [real_rows(lse, layout)]}
    for d_out, d_lse in loss_directions(out.shape, lse.shape, real_tokens(layout)):
        losses = (out * d_out.to(out.dtype)).sum() + (lse.where(lse.isfinite(), 0) * d_lse.to(lse.dtype)).sum()
        collect(
            results, sources, torch.autograd.grad(losses, list(sources.values()), retain_graph=True, allow_unused=True)
        )
    return {name: torch.stack(own).detach() for name, own in results.items()}


def together(layer, x, layout, **options):
    """The same with the tokens spread over the processes, whole in each of them."""
    part = spread(layout)
    own = take(x, part).requires_grad_()
    out, lse = attention(layer, own, part, **options)
    learned = dict(layer.named_parameters())
    results = {"out": [real_rows(gather(out, part, 2), layout)], "lse": [real_rows(gather(lse, part, 2), layout)]}
    shapes = (*out.shape[:2], layout.key_count, out.shape[3]), (*lse.shape[:2], layout.key_count)
    for d_out, d_lse in loss_directions(*shapes, real_tokens(layout)):
        losses = (out * take(d_out, part, 2)).sum()
        losses = losses + (lse.where(lse.isfinite(), 0) * take(d_lse, part, 2)).sum()
        sources = [own, *learned.values()]
        d_own, *others = torch.autograd.grad(losses, sources, retain_graph=True, allow_unused=True)
        for gradient in others:
            if gradient is not None:
                dist.all_reduce(gradient)
        collect(results, {"x": own} | learned, [gather(d_own, part), *others])
    return {name: torch.stack(tensors).detach() for name, tensors in results.items()}


def collect(results, sources, gradients):
    for name, gradient in zip(sources, gradients, strict=True):
        if gradient is not None:
            results.setdefault(name, []).append(gradient)


def real_tokens(layout):
    mask = layout.key_mask
    return torch.ones(layout.batch, layout.key_count, dtype=torch.bool) if mask is None else mask


def real_rows(x, layout):
    """0 for rows of padding: what they hold is nobody's business."""
    real = real_tokens(layout)[:, None, :]
    return x.where(real if x.ndim == 3 else real[..., None], 0)


def assert_like_one_process(name, options, layout, **more):
    """Output, log-sum-exp and all gradients are those of one process, and the same bits when it is done again."""
    subject = Subject(name, options, "auto", causal=layout.causal, length=layout.key_count)
    layer, x = subject.layer(), subject.tokens()
    ours, again = (together(layer, x, layout, **more) for _ in range(2))
    for result in ours:
        assert torch.equal(ours[result], again[result]), f"{name}: {result} differs from run to run"
    if dist.get_rank() == 0:
        twin, tokens, given = copy.deepcopy(layer).double(), x.double(), in_double(more)
        plain, exact = alone(layer, x, layout, "reference", **more), alone(twin, tokens, layout, "reference", **given)
        assert ours.keys() == exact.keys(), name
        terms = x.shape[0] * x.shape[1]
        try:
            assert_within_rounding(ours, plain, exact, {}, terms=terms)
        except AssertionError:  # what cancels is only worked out where it is needed
            try:
                assert_within_rounding(ours, plain, exact, noise(twin, tokens, layout, **given), terms=terms)
            except AssertionError as error:
                raise AssertionError(f"{name} {options}: {error}") from error


def noise(layer, x, layout, **options):
    """By name what random roundings inside change, over both gradients of the output."""
    x = x.clone().requires_grad_()
    qkv, made = attention_inputs(layer, x, layout, **options)
    inside = Inside.of(checked_call(*qkv, **made))
    learned = {"x": x} | dict(layer.named_parameters())
    totals = {}
    for d_out, d_lse in loss_directions(inside.out.shape, inside.lse.shape, real_tokens(layout)):
        for name, own in rounding_noise(inside, d_out.double(), d_lse.double(), learned).items():
            totals[name] = math.hypot(totals.get(name, 0.0), own)
    return totals


def in_double(options):
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def like_one_process_packed_and_padded(names, length):
    for name, tokens in zip(names, itertools.cycle((5, length)), strict=False):
        with in_segments(tokens):
            assert_like_one_process(name, {}, documents_and_padding(length))


def like_one_process_plain(names, length):
    for name in names:
        assert_like_one_process(name, {}, lw.layout(length))


def like_one_process_in_all_layouts(name, options):
    for layout in (lw.layout(37), documents_and_padding(38)):
        assert_like_one_process(name, options, layout)
    with in_segments(4, near=2):
        assert_like_one_process(name, options, documents_and_padding(64))
    if find(name).two_sided:
        for layout in (lw.layout(37, causal=False), documents_and_padding(41, causal=False)):
            assert_like_one_process(name, options, layout)


def test_two_processes_give_what_one_gives_packed_and_padded(in_ring):
    in_ring(2, like_one_process_packed_and_padded, ROADS, 37, patience=300)


def test_four_processes_give_what_one_gives(in_ring):
    in_ring(4, like_one_process_plain, ("cable", "selective-rope"), 29, patience=120)


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_processes_gives_what_one_gives_with_every_encoding(in_ring, size, case):
    in_ring(size, like_one_process_in_all_layouts, *case, patience=300)


def two_rings_of_two():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    length = (37, 45)[mine]
    subject = Subject("rope+fox", length=length)
    layer, x = subject.layer(), subject.tokens()
    layout = lw.layout(length)
    part = spread(layout, groups[mine])
    ours = [gather(own, part, 2) for own in attention(layer, take(x, part), part)]
    for own, whole in zip(ours, attention(layer, x, layout), strict=True):
        assert_near(own, whole, f"ring {mine}")
    other = groups[1 - mine]
    refuses(lambda: spread(layout, other), ValueError, "must be one of the group's, got a group without it")


def test_rings_of_some_of_the_processes_do_not_meet(in_ring):
    in_ring(4, two_rings_of_two)


WINDOWS = [7, (lw.Band(0, 6), lw.Band(6, first=3)), lw.Band(0, 1, chunk=8), lw.Band(3, 20)]


def windows_and_more():
    for window, tokens in zip(WINDOWS, (5, 5, 37, 37), strict=True):
        assert_like_one_process("kerple", {}, lw.layout(37), window=window)
        with in_segments(tokens, near=2):
            assert_like_one_process("kerple", {}, documents_and_padding(37), window=window)
    assert_like_one_process("alibi", {}, lw.layout(37, causal=False), window=9)
    assert_like_one_process("cable", {}, lw.layout(37), softcap=3.0, sink=torch.linspace(-1, 1, 3))


def test_windows_bands_sinks_scales_and_caps_are_those_of_one_process(in_ring):
    in_ring(2, windows_and_more, patience=200)


def seeded():
    return torch.Generator().manual_seed(5)


def grouped_heads():
    g = seeded()
    q, k, v = (torch.randn(1, heads, 40, 8, generator=g) for heads in (6, 2, 2))
    step = torch.rand(1, 6, 40, generator=g)
    layout = lw.layout(40)
    part = spread(layout)
    level = part.ring.running_sums(take(step, part, 2))
    own = lw.LevelBias(level, level, torch.ones(1, 6, 1))
    whole = lw.LevelBias.of_steps(step, torch.ones(1, 6, 1), start=0, queries=40)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.to(dtype) for x in (q, k, v)]
        ours = gather(lw.attend(*(take(x, part, 2) for x in rounded), layout=part, bias=own), part, 2)
        assert ours.dtype == dtype
        expected = lw.attend(*(x.float() for x in rounded), layout=layout, bias=whole, backend="reference")
        if dtype == torch.float32:
            assert_near(ours, expected, "grouped heads")
        else:
            # Weights are rounded before they meet values, and so is what comes out.
            assert (ours.float() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


def test_heads_of_queries_may_share_keys_in_half_precision_too(in_ring):
    in_ring(2, grouped_heads)


def batches_of(rank, size, length):
    """What one of several processes sends and receives, forward and backward, in the order in which it asks for it."""
    batches = []

    def record(sent, to, received, source, **others):
        batch = [("send", to, tuple(x.shape)) for x in sent]
        batches.append(batch + [("receive", source, tuple(x.shape)) for x in received.values()])
        return Transfer([], [], {name: x.zero_() for name, x in received.items()})

    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=size),
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch.object(layout_module, "check_alike"),
        mock.patch.object(ring, "transfer", record),
    ):
        part = spread(lw.layout(length))
        qkv = torch.randn(3, 1, 1, part.query_count, 2, generator=seeded()).requires_grad_()
        lw.attend(*qkv, layout=part).sum().backward()
    return batches


def left_waiting(batches):
    """By process the batches that never end, where each process works on one at a time and tags are not looked at."""
    waiting = [[list(batch) for batch in own if batch] for own in batches]
    has_moved = True
    while has_moved:
        has_moved = False
        for process, own in enumerate(waiting):
            for kind, to, shape in [operation for operation in (own[0] if own else ()) if operation[0] == "send"]:
                others = [op for op in (waiting[to][0] if waiting[to] else ()) if op[:2] == ("receive", process)]
                if others:
                    assert others[0][2] == shape, "what is sent is not what the other process expects next"
                    own[0].remove((kind, to, shape))
                    waiting[to][0].remove(others[0])
                    has_moved = True
        for own in waiting:
            if own and not own[0]:
                own.pop(0)
                has_moved = True
    return waiting


@pytest.mark.parametrize("tokens", [2, 3, 100])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_no_process_waits_for_ever_where_exchanges_end_in_the_order_of_their_beginning(size, tokens):
    with in_segments(tokens):
        assert left_waiting([batches_of(rank, size, 12 * size + 1) for rank in range(size)]) == [[]] * size


def sent_tokens(work):
    """How many tokens' keys this process sends while some work is done."""
    sizes, transfer = [], dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda operations: (
        sizes.extend(op.tensor.shape[2] for op in operations if op.op is dist.isend and op.tensor.ndim == 4),
        transfer(operations),
    )[1]
    try:
        work()
    finally:
        dist.batch_isend_irecv = transfer
    return sum(sizes) // 2  # keys and values


def count_exchanges():
    length = 512
    g = seeded()
    q, k, v = torch.randn(3, 1, 2, length, 8, generator=g)
    part = spread(lw.layout(length))
    own = [take(x, part, 2) for x in (q, k, v)]
    position = part.key[:, None].double()

    def far(slope):
        return lw.LevelBias(position, position, torch.tensor([slope, 2 * slope]).view(1, 2, 1))

    everything = sent_tokens(lambda: lw.attend(*own, layout=part))
    windowed = sent_tokens(lambda: lw.attend(*own, layout=part, window=16))
    steep = sent_tokens(lambda: lw.attend(*own, layout=part, bias=far(2.0)))
    flat = sent_tokens(lambda: lw.attend(*own, layout=part, bias=far(0.01)))
    with lw.skipping(False):
        unskipped = sent_tokens(lambda: lw.attend(*own, layout=part, bias=far(2.0)))
    totals = torch.tensor([everything, windowed, steep, flat, unskipped])
    dist.all_reduce(totals)
    # Each of four chunks is 64 tokens; a chunk needs 15 of the one before, unless that is of the same process.
    chunks = zigzag(length, dist.get_world_size())
    borders = sum(a.owner != b.owner for a, b in itertools.pairwise(chunks))
    assert totals[1] == 15 * borders
    assert totals[2] == 64 * borders, "tiles of 64 keys"
    assert totals[3] == totals[4] == totals[0]


def test_a_window_and_a_steep_bias_leave_out_exchanges(in_ring):
    in_ring(4, count_exchanges)


STEEP = torch.tensor([0.3, 0.9, 2.0])


def steep_level(layout, slope):
    position = layout.key[:, None].double()
    return lw.LevelBias(position, position, slope.view(1, 3, 1))


def steep_table(layout, slope):
    return lw.DistanceBias(-slope[:, None] * torch.arange(layout.whole.key_count), layout.query, layout.key)


def with_gradients(make, layout, qkv, d_out):
    """Output, log-sum-exp, and the gradients of q, k, v and the slopes."""
    sources = [*qkv.clone().requires_grad_(), STEEP.clone().requires_grad_()]
    out, lse = lw.attend(*sources[:3], layout=layout, bias=make(layout, sources[3]), return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out * d_out).sum() + lse.sum(), sources)]


def with_sent_tokens(work):
    """How many tokens' keys are sent, and the results."""
    results = []
    return sent_tokens(lambda: results.extend(work())), results


def skipped_and_not():
    qkv = torch.randn(3, 1, 3, 1600, 8, generator=seeded())
    d_out = torch.randn(1, 3, 1600, 8, generator=seeded())
    layout = lw.layout(1600)
    part = spread(layout)
    for make in (steep_level, steep_table):
        own = functools.partial(with_gradients, make, part, take(qkv, part, 3), take(d_out, part, 2))
        sent, skipped = with_sent_tokens(own)
        with lw.skipping(False):
            all_sent, unskipped = with_sent_tokens(own)
        totals = torch.tensor([sent, all_sent])
        dist.all_reduce(totals)
        assert totals[0] < totals[1], f"{make.__name__}: nothing is skipped"
        alone = with_gradients(make, layout, qkv, d_out)
        for name, ours, theirs, whole in zip(("out", "lse", *"qkv", "slope"), skipped, unskipped, alone, strict=True):
            assert_near(ours, theirs, f"{make.__name__}: {name}")
            if name == "slope":
                dist.all_reduce(ours)
            assert_near(ours if name == "slope" else gather(ours, part, 2), whole, f"{make.__name__}: {name} of one")


def not_finite_behind_what_is_skipped():
    q, k, v = torch.randn(3, 1, 3, 1600, 8, generator=seeded())
    layout = lw.layout(1600)
    part = spread(layout)
    for fault in (math.nan, math.inf):
        v[0, 1, 3, 0] = fault
        ours = lw.attend(*(take(x, part, 2) for x in (q, k, v)), layout=part, bias=steep_level(part, STEEP))
        whole = lw.attend(q, k, v, layout=layout, bias=steep_level(layout, STEEP), backend="reference")
        assert torch.equal(gather(ours, part, 2).isfinite(), whole.isfinite())
        assert not whole[0, 1, -1].isfinite().all()


def test_a_value_that_is_not_finite_is_not_hidden_by_a_weight_of_0(in_ring):
    in_ring(2, not_finite_behind_what_is_skipped)


def skipped_in_double_precision():
    q, k, v = torch.randn(3, 1, 3, 1600, 8, generator=seeded()).double()
    layout = lw.layout(1600)
    part = spread(layout)
    ours = lw.attend(*(take(x, part, 2) for x in (q, k, v)), layout=part, bias=steep_level(part, STEEP))
    whole = lw.attend(q, k, v, layout=layout, bias=steep_level(layout, STEEP), backend="reference")
    assert_near(gather(ours, part, 2), whole, "float64")


def test_double_precision_is_bounded_by_its_own_smallest_number(in_ring):
    in_ring(2, skipped_in_double_precision)


def height_difference(rows, columns, query, key, height):
    """A bias with a number of keys that is the same for all of them."""
    return (query[:, rows, None] - key[:, None, columns])[:, None] * height[:, :, None, columns]


def one_number_for_all_keys():
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=seeded())
    layout = lw.layout(40)
    part = spread(layout)
    results = []
    for of, inputs in ((part, [take(x, part, 2) for x in (q, k, v)]), (layout, [q, k, v])):
        height = torch.tensor([-0.3, 0.1]).view(1, 2, 1).requires_grad_()
        bias = lw.FunctionBias(height_difference, (of.query.float(), of.key.float(), height), "qkk")
        out = lw.attend(*inputs, layout=of, bias=bias)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), height)))
    (ours, d_ours), (whole, d_whole) = results
    dist.all_reduce(d_ours)
    assert_near(gather(ours, part, 2), whole, "output")
    assert_near(d_ours, d_whole, "gradient of the height")


def test_a_number_that_all_keys_share_is_sent_as_one(in_ring):
    in_ring(2, one_number_for_all_keys)


def test_what_is_skipped_changes_nothing_forward_or_backward(in_ring):
    in_ring(2, skipped_and_not)


def loss_of_a_model(**changes):
    """The loss, those of tokens, and all gradients, of documents and of padding."""
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 24, "vocab_size": 64, "n_positions": 64}
    torch.manual_seed(0)
    model = LengthwiseForCausalLM(LengthwiseConfig.preset("nano", **(sizes | changes))).train()
    ids = torch.randint(64, (2, 45), generator=seeded())
    documents = torch.cat([torch.arange(20), torch.arange(25)])[None].expand(2, -1)
    padded = torch.ones_like(ids)
    padded[1, :7] = 0
    labels = ids.clone()
    labels[1, :8] = -100  # the first real token would be predicted from padding
    for options in ({}, {"position_ids": documents}, {"attention_mask": padded}):
        targets = labels if "attention_mask" in options else ids
        model.zero_grad()
        loss = ring_loss(model, ids, targets, **options)
        loss.backward()
        every = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for tensor in (total := loss.detach().clone(), *every.values()):
            dist.all_reduce(tensor)
        with torch.no_grad():
            tokens = ring_loss(model, ids, targets, **options, reduction="none")
        twin = copy.deepcopy(model)
        twin.zero_grad()
        whole = twin.loss(ids, targets, **options, reduction="sum")
        whole.backward()
        where = f"{model.config.label} with {[*options]}"
        assert_near(total, whole, f"loss of {where}")
        with torch.no_grad():
            expected = twin.loss(ids, targets, **options, reduction="none")
        assert_near(tokens, expected, f"losses of tokens of {where}")
        theirs = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
        assert every.keys() == theirs.keys(), where
        assert_near(
            *(torch.cat([x.flatten() for x in own.values()]) for own in (every, theirs)), f"gradient of {where}"
        )


def loss_of_three_kinds_of_layer():
    loss_of_a_model(layers="cable,kerple:16,rope+fox", n_layer=3)


def loss_with_encoding(name, options):
    loss_of_a_model(encoding=name, encoding_options=options)


def test_the_loss_of_a_model_and_its_gradients_are_those_of_one_process(in_ring):
    in_ring(2, loss_of_three_kinds_of_layer)


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_loss_with_every_encoding_is_that_of_one_process(in_ring, case):
    in_ring(4, loss_with_encoding, *case, patience=120)


def test_chunks_are_a_part_of_the_sequence_each_and_balanced():
    for length, size in ((8, 4), (37, 2), (1000, 7)):
        chunks = zigzag(length, size)
        assert [c.first for c in chunks] == [0, *itertools.accumulate(c.count for c in chunks)][:-1]
        work = [sum(c.count * (c.first + c.stop) / 2 for c in chunks if c.owner == rank) for rank in range(size)]
        assert max(work) - min(work) <= 3 * length


def test_every_chunk_is_cut_into_as_many_segments():
    for length, size, most in ((8, 2, 2), (37, 2, 4), (1000, 7, 64), (1000, 7, 500)):
        chunks = zigzag(length, size)
        segments = cut(chunks, most)
        slots = [[*range(s.own.start, s.own.stop)] for s in segments]
        assert [s.first for s in segments] == [0, *itertools.accumulate(s.count for s in segments)][:-1]
        assert 1 <= min(s.count for s in segments) <= max(s.count for s in segments) <= most
        assert len(segments) % len(chunks) == 0
        for rank in range(size):
            own = [slot for s, of in zip(segments, slots, strict=True) if s.owner == rank for slot in of]
            assert own == [*range(sum(c.count for c in chunks if c.owner == rank))]


def test_a_table_reaches_over_the_tokens_of_all_processes():
    class Of(Ring):
        running_sums = before = attend = None

    ring = Of()
    ring.whole = lw.layout(8 * STEP)
    part = dataclasses.replace(lw.layout(STEP), facts=ring.whole.facts, ring=ring)
    assert table_reach(part) == 8 * STEP


def refuses(call, kind, *words):
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


BAD_CALLS = [
    ({"bias": torch.zeros(1, 1, 4, 4)}, TypeError, "got a Tensor; wrap it: DenseBias(tensor)"),
    ({"logit_scale": torch.ones(2)}, ValueError, "logit_scale must be (batch or 1, head or 1, query or 1)"),
    ({"sink": torch.ones(1, 1)}, ValueError, "sink must be (1,), one logit per head"),
    ({"sink": 1.0}, TypeError, "sink must be a floating-point tensor, got 1.0"),
    ({"window": [lw.Band(0, 3)]}, ValueError, "window must be a positive int, got a list"),
    ({"scale": "x"}, TypeError, "scale must be a finite number, got 'x'"),
    ({"softcap": -1.0}, TypeError, "softcap must be a finite number above 0, got -1.0"),
]
"""Of one head and this process's four tokens."""


def refused():
    refuses(lambda: spread(lw.layout(3)), ValueError, "a sequence of 4 tokens or more", "got 3")
    refuses(lambda: spread(lw.layout(3, past=9)), ValueError, "one pass over all tokens, got 3 queries and 12 keys")
    masked = lw.TokenLayout.of(torch.arange(8), mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
    refuses(lambda: spread(masked), NotImplementedError, "explicit mask")
    refuses(lambda: spread(12), TypeError, "layout must be a TokenLayout, got 12")
    rank = dist.get_rank()
    unlike = lw.layout(8 + rank)
    refuses(lambda: spread(unlike), ValueError, "must spread the same layout, got length of 8, 9")
    halves, mask = (torch.arange(8) < 4 + rank)[None].long(), (torch.arange(8) >= rank)[None]
    for name, other in {
        "positions": lw.TokenLayout.of(torch.arange(8) + rank),
        "padding": lw.TokenLayout.of(torch.arange(8), key_mask=mask),
        "documents": lw.TokenLayout.of(torch.arange(8), documents=halves),
    }.items():
        refuses(lambda other=other: spread(other), ValueError, f"got other {name} in process 1 than in process 0")
    moved = lw.TokenLayout.of(torch.arange(8) + 1, torch.arange(8))
    refuses(lambda: spread(moved), ValueError, "the same positions as queries and as keys, got others")
    part = spread(lw.layout(8))
    refuses(lambda: take(torch.ones(1, 9), part), ValueError, "the whole sequence's 8 tokens along axis 1", "(1, 9)")
    refuses(lambda: gather(torch.ones(1, 8), part), ValueError, "this process's 4 tokens along axis 1", "(1, 8)")
    refuses(lambda: take(torch.ones(8), part), ValueError, "along axis 1", "(8,)")
    refuses(lambda: spread(part), ValueError, "spread already")
    q = torch.ones(1, 1, 4, 2)
    refuses(lambda: ring_attend(q, q, q, layout=lw.layout(4)), ValueError, "one of a single process")
    refuses(lambda: lw.explain(q, q, q, layout=part), ValueError, "not explained")
    whole = torch.ones(1, 1, 8, 2)
    refuses(lambda: lw.attend(whole, whole, whole, layout=part), ValueError, "this process's 4 tokens, got 8")
    for options, kind, words in BAD_CALLS:
        refuses(lambda options=options: lw.attend(q, q, q, layout=part, **options), kind, words)
    refuses(lambda: lw.attend(q[0], q, q, layout=part), ValueError, "q must be (batch, head, position, dim)")
    dense = lw.DenseBias(torch.zeros(1, 1, 4, 4))
    refuses(lambda: lw.attend(q, q, q, layout=part, bias=dense), NotImplementedError, "DenseBias", "describe it")
    other = lw.make("alibi", heads=1, width=2).bias(q[0], lw.layout(8))
    refuses(lambda: lw.attend(q, q, q, layout=part, bias=other), ValueError, "make it of this layout")
    with torch.no_grad():
        steps = lw.LevelBias.of_steps(q[..., 0], torch.ones(1, 1, 1), start=0, queries=4)
    for own in (steps, lw.SumBias((lw.SumBias((steps,)),))):
        refuses(lambda own=own: lw.attend(q, q, q, layout=part, bias=own), ValueError, "ring=layout.ring")
    rescore = lw.make("dape", heads=1, width=2).rescore(q[:, 0], part)
    refuses(lambda: lw.attend(q, q, q, layout=part, rescore=rescore), NotImplementedError, "cannot rescore")
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(lw.attend(leaf, q, q, layout=part).square().sum(), leaf, create_graph=True)
    refuses(lambda: gradient.sum().backward(), RuntimeError, "once_differentiable")
    config = LengthwiseConfig.preset("nano", encoding="kerple+dapev2", n_layer=1, n_head=2, n_embd=8, vocab_size=64)
    model = LengthwiseForCausalLM(config)
    refuses(lambda: ring_loss(model, torch.zeros(1, 8).long()), NotImplementedError, "'dapev2' replaces the scores")
    refuses(lambda: ring_loss(model, torch.zeros(1, 8).long(), reduction="mean"), ValueError, "'sum' or 'none'")
    plain = LengthwiseForCausalLM(LengthwiseConfig.preset("nano", n_layer=1, n_head=2, n_embd=8, vocab_size=64))
    ids, same = torch.arange(8)[None] + rank, torch.arange(8)[None]
    refuses(lambda: ring_loss(plain, ids), ValueError, "have the same sequences, got other input_ids in process 1")
    refuses(lambda: ring_loss(plain, same, ids), ValueError, "got other labels in process 1 than in process 0")


def test_what_cannot_be_spread_is_refused(in_ring):
    in_ring(2, refused)
    refuses(lambda: spread(lw.layout(8)), RuntimeError, "a process group must be there", "torchrun")


def test_the_python_of_the_page_on_scale_runs():
    page = (Path(__file__).parents[1] / "docs/scale.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "scale.md", "exec"), {})
    assert not dist.is_initialized()
