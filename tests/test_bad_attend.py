"""Bad input to attention is refused at the door, in plain words, and never by torch."""

import pytest
import torch
from witness import assert_refuses

import lengthwise as lw
from lengthwise.attention import BACKENDS, backend
from lengthwise.attention.backend import Refusal

Q = torch.randn(2, 7, 5, 4)
BOOL = torch.ones(2, 5, dtype=torch.bool)
INTS = BOOL.long()
EITHER = (ValueError, TypeError)


def attend(q=Q, k=Q, v=Q, **options):
    if {"documents", "start", "cu_seqlens"} & options.keys():
        options["layout"] = layout(q.shape[2], k.shape[2], **{x: options.pop(x) for x in PLACES if x in options})
    return lw.attend(q, k, v, **options)


PLACES = ("documents", "start", "cu_seqlens", "key_mask", "causal")


def layout(queries, keys, cu_seqlens=None, **options):
    if cu_seqlens is not None:
        return lw.layout(queries, cu_seqlens=cu_seqlens, **options)
    key = torch.arange(keys)
    return lw.TokenLayout.of(key[:queries], key, **options)


def alibi(queries=5, keys=5, heads=7):
    encoding = lw.make("alibi", heads=heads, width=21, head_dim=3)
    query, key = torch.arange(queries), torch.arange(keys)
    return encoding.bias(
        torch.zeros(1, queries, 21), lw.TokenLayout.of(query, key, start=0 if keys >= queries else keys)
    )


def alibi_table(shift):
    positions = torch.arange(5) * shift
    return lw.DistanceBias(torch.zeros(7, 4), positions, positions)


def falling():
    level = torch.arange(5.0, dtype=torch.float64).flip(0)[None, None]
    return lw.LevelBias(level, level, torch.ones(1, 1, 1), rising=True)


TENSORS = {
    "a list": ({"q": [[1.0]]}, TypeError, "q must be a tensor", "list"),
    "three axes": ({"k": Q[0]}, ValueError, "(batch, head, position, dim)", "(7, 5, 4)"),
    "integers": ({"q": Q.long()}, TypeError, "floating-point", "torch.int64"),
    "complex numbers": ({"q": Q.cfloat()}, TypeError, "floating-point", "torch.complex64"),
    "two dtypes of q and k": ({"k": Q.double()}, TypeError, "share dtype", "torch.float32", "torch.float64"),
    "two dtypes of q and v": ({"v": Q.bfloat16()}, TypeError, "share dtype", "v torch.bfloat16"),
    "two batches": ({"q": Q[:1]}, ValueError, "agree in batch", "q (1, 7, 5, 4)"),
    "two dims": ({"q": Q[..., :2]}, ValueError, "agree in batch and dim", "q (2, 7, 5, 2)"),
    "more keys than values": ({"v": Q[:, :, :4]}, ValueError, "k and v in batch, head and position", "v (2, 7, 4, 4)"),
    "more heads of k than of v": ({"v": Q[:, :1]}, ValueError, "k and v in batch, head and position"),
    "heads that do not divide": ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "multiple", "7 heads", "3 in k"),
    "no heads": ({"q": Q[:, :0]}, ValueError, "multiple", "0 heads"),
    "no heads of keys": ({"k": Q[:, :0], "v": Q[:, :0]}, ValueError, "multiple", "0 in k"),
    "no dims": ({"q": Q[..., :0], "k": Q[..., :0]}, ValueError, "dim 0", "heads of 0"),
}

MASKS = {
    "key_mask of numbers": ({"key_mask": BOOL.float()}, TypeError, "key_mask must be bool", "torch.float32"),
    "key_mask of integers": ({"key_mask": INTS}, TypeError, "key_mask must be bool", "torch.int64"),
    "key_mask as a list": ({"key_mask": BOOL.tolist()}, EITHER, "key_mask", "list"),
    "key_mask without a batch": ({"key_mask": BOOL[0]}, ValueError, "(batch or 1, 5)", "(5,)"),
    "key_mask too short": ({"key_mask": BOOL[:, :4]}, ValueError, "(batch or 1, 5)", "(2, 4)"),
    "key_mask of three": ({"key_mask": BOOL[[0, 0, 0]]}, ValueError, "2 sequences", "got 3"),
    "key_mask per query": ({"key_mask": BOOL[:, None, None]}, ValueError, "one entry per key", "(2, 1, 1, 5)"),
    "documents of numbers": (
        {"documents": BOOL.float()},
        TypeError,
        "documents must be an integer tensor",
        "torch.float32",
    ),
    "documents of booleans": ({"documents": BOOL}, TypeError, "must be an integer tensor", "torch.bool"),
    "documents of complex": (
        {"documents": INTS.cfloat()},
        TypeError,
        "documents must be an integer tensor",
        "torch.complex64",
    ),
    "documents as a list": ({"documents": INTS.tolist()}, EITHER, "documents", "list"),
    "documents without a batch": ({"documents": INTS[0]}, ValueError, "(batch or 1, 5)", "(5,)"),
    "documents too short": ({"documents": INTS[:, :4]}, ValueError, "(batch or 1, 5)", "(2, 4)"),
    "documents of three": ({"documents": INTS[[0, 0, 0]]}, ValueError, "2 sequences", "got 3"),
    **{
        f"window {window!r}": ({"window": window}, ValueError, "window must be a positive int", repr(window))
        for window in (0, -1, True, 2.5, "3")
    },
    "causal as a word": ({"causal": "no"}, EITHER, "causal", "'no'"),
    "causal as nothing": ({"causal": None}, EITHER, "causal", "None"),
    "start before the first slot": ({"start": -1}, EITHER, "start", "-1"),
    "start behind too few": ({"q": Q[:, :, :2], "start": 4}, EITHER, "start", "got 4"),
    "start beyond the room": ({"start": 1}, EITHER, "start", "1"),
    "start between slots": ({"q": Q[:, :, :2], "start": 2.5}, EITHER, "start", "2.5"),
    "start as true": ({"q": Q[:, :, :2], "start": True}, EITHER, "start", "True"),
    "start as a real tensor": ({"q": Q[:, :, :2], "start": torch.tensor(0.5)}, EITHER, "start"),
    "start of every sequence": ({"q": Q[:, :, :2], "start": torch.tensor([0, 1])}, EITHER, "start"),
    "more queries than keys": ({"k": Q[:, :, :4], "v": Q[:, :, :4]}, ValueError, "at most 4", "got 5", "causal=False"),
    "more queries than keys in a window": (
        {"k": Q[:, :, :4], "v": Q[:, :, :4], "causal": False, "window": 3},
        ValueError,
        "at most 4",
        "got 5",
        "window",
    ),
    "borders that fall": ({"cu_seqlens": [0, 4, 2, 5]}, ValueError, "cu_seqlens must rise from 0 to the length 5"),
    "borders that end too soon": ({"cu_seqlens": [0, 4]}, ValueError, "rise from 0 to the length 5", "[0, 4]"),
    "borders that begin too late": ({"cu_seqlens": [1, 5]}, ValueError, "rise from 0 to the length 5", "[1, 5]"),
    "a single border": ({"cu_seqlens": [5]}, ValueError, "two borders or more", "got 1"),
    "real borders": ({"cu_seqlens": [0.0, 5.0]}, TypeError, "cu_seqlens must be an integer tensor", "torch.float32"),
    "a layout of fewer": ({"layout": lw.layout(4)}, ValueError, "5 queries and 5 keys", "got one of 4 and 4"),
    "a layout that is none": ({"layout": torch.arange(5)}, TypeError, "must be a TokenLayout", "lw.layout"),
    "a mask beside a layout": ({"layout": lw.layout(5), "key_mask": BOOL}, ValueError, "got them beside it"),
    "bands of nothing": ({"window": ()}, TypeError, "a Band or a tuple of Bands"),
    "bands of numbers": ({"window": (1, 2)}, TypeError, "a Band or a tuple of Bands"),
}

ADDED = {
    "a tensor": ({"bias": torch.zeros(5, 5)}, TypeError, "described Bias", "got a Tensor", "DenseBias(tensor)"),
    "a number": ({"bias": 3}, TypeError, "must be a Bias", "got 3", "encoding.bias"),
    "an encoding": (
        {"bias": lw.make("alibi", heads=7, width=21)},
        TypeError,
        "must be a Bias",
        "got an Alibi",
        "encoding.bias",
    ),
    "too few queries": ({"bias": alibi(queries=4)}, ValueError, "must fit", "(2, 7, 5, 5)", "(1, 7, 4, 5)"),
    "too few keys": ({"bias": alibi(keys=4)}, ValueError, "must fit", "(2, 7, 5, 5)", "(1, 7, 5, 4)"),
    "other heads": ({"bias": alibi(heads=3)}, ValueError, "must fit", "(2, 7, 5, 5)", "(1, 3, 5, 5)"),
    "another batch": ({"bias": lw.DenseBias(torch.zeros(3, 7, 5, 5))}, ValueError, "must fit", "(3, 7, 5, 5)"),
    "rescore a number": ({"rescore": 3}, TypeError, "described Rescore", "got 3", "encoding.rescore"),
    "rescore an encoding": (
        {"rescore": lw.make("cope", heads=7, width=28)},
        TypeError,
        "described Rescore",
        "got a Cope",
        "encoding.rescore",
    ),
    "a network of other heads": (
        {"rescore": lw.make("dape", heads=4, width=28).rescore(torch.zeros(2, 5, 28), lw.layout(5))},
        ValueError,
        "the 7 heads of q",
        "got 4",
    ),
    "contextual positions of other channels": (
        {"rescore": lw.make("cope", heads=7, width=56).rescore(torch.zeros(2, 5, 56), lw.layout(5))},
        ValueError,
        "the 4 channels of q",
        "got 8",
    ),
    "a bias of another layout": (
        {"bias": alibi_table(3), "layout": lw.layout(5)},
        ValueError,
        "must be of this layout",
        "positions differ",
    ),
    "levels that fall": ({"bias": falling()}, ValueError, "declares rising", "got levels that do"),
    "a sink of five": ({"sink": torch.zeros(5)}, ValueError, "sink must be (7,)", "(5,)"),
    "a sink of other rows": ({"sink": torch.zeros(1, 7, 4)}, ValueError, "sink must be", "(1, 7, 4)"),
    "a sink of integers": ({"sink": torch.zeros(7).long()}, TypeError, "sink must be a floating-point", "int64"),
    "a sink a number": ({"sink": 0.5}, TypeError, "sink must be a floating-point tensor", "0.5"),
    "a logit scale per head": ({"logit_scale": torch.ones(7)}, ValueError, "(batch or 1, head or 1, query or 1)"),
    "a logit scale of four": ({"logit_scale": torch.ones(1, 1, 4)}, ValueError, "(2, 7, 5)", "(1, 1, 4)"),
    "a logit scale a number": ({"logit_scale": 2.0}, TypeError, "logit_scale must be a floating-point", "2.0"),
    "a softcap of 0": ({"softcap": 0.0}, EITHER, "softcap must be a finite number above 0", "0.0"),
    "a softcap a word": ({"softcap": "x"}, EITHER, "softcap", "'x'"),
    "lse of a backend without": (
        {"return_lse": True, "backend": "sdpa"},
        NotImplementedError,
        "does not give the log-sum-exp",
        "can take it",
    ),
    "scale a word": ({"scale": "x"}, EITHER, "scale", "'x'"),
    "scale a list": ({"scale": [1.0]}, EITHER, "scale"),
    "unknown backend": ({"backend": "flash"}, ValueError, "unknown backend 'flash'", "'sdpa'", "'reference'", "'auto'"),
    "backend a list": ({"backend": ["sdpa"]}, EITHER, "backend", "'auto'"),
}


@pytest.mark.parametrize("case", TENSORS.values(), ids=TENSORS.keys())
def test_attend_refuses_queries_keys_and_values(case):
    options, *refusal = case
    assert_refuses(lambda: attend(**options), *refusal)


@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS.keys())
def test_attend_refuses_masks(case):
    options, *refusal = case
    assert_refuses(lambda: attend(**options), *refusal)


@pytest.mark.parametrize("case", ADDED.values(), ids=ADDED.keys())
def test_attend_refuses_biases_and_the_rest(case):
    options, *refusal = case
    assert_refuses(lambda: attend(**options), *refusal)


EMPTY_BANDS = {
    "empty": ({"nearest": 3, "farthest": 3}, ValueError, "must not be empty", "farthest=3"),
    "backwards": ({"nearest": 3, "farthest": 1}, ValueError, "must not be empty"),
    "of half a token": ({"nearest": 0.5}, TypeError, "nearest must be an int", "0.5"),
    "of no chunk": ({"chunk": 0}, ValueError, "chunk must be a positive int", "0"),
    "of no first": ({"first": 0}, ValueError, "first must be a positive int", "0"),
}


@pytest.mark.parametrize("case", EMPTY_BANDS.values(), ids=EMPTY_BANDS.keys())
def test_a_band_is_refused_when_it_is_made(case):
    options, *refusal = case
    assert_refuses(lambda: lw.Band(**options), *refusal)


def test_a_refusing_backend_describes_the_call_and_its_reason():
    five = lw.layout(5, key_mask=BOOL)
    cope = lw.make("cope", heads=7, width=28).rescore(torch.zeros(1, 5, 28), five)
    kerple = lw.make("kerple", heads=7, width=28).bias(torch.zeros(1, 5, 28), five)
    with pytest.raises(NotImplementedError) as raised:
        attend(layout=five, rescore=cope, bias=kerple, window=3, backend="sdpa")
    first, *lines = str(raised.value).splitlines()
    assert first == "backend 'sdpa' cannot take this call"
    part = {line.split()[0]: line for line in lines}
    assert "float32 cpu  batch=2 head=7 query=5 dim=4" in part["q"]
    assert "key=5" in part["k"]
    assert "DistanceBias, needs a gradient" in part["bias"]
    assert "ContextualPositions" in part["rescore"]
    assert all(word in part["masks"] for word in ("causal", "key_mask", "window=3"))
    assert "rescore replaces the scores" in part["sdpa:"]
    assert "'row_block' or 'reference' can take it" in lines[-1]


def test_where_no_backend_can_take_a_call_none_is_recommended(monkeypatch):
    monkeypatch.setattr(backend, "total_bytes", lambda: 0)
    for name, module in BACKENDS.items():
        if name not in ("reference", "sdpa"):
            monkeypatch.setattr(module, "plan", lambda call: Refusal.because("it is asleep"))
    with pytest.raises(NotImplementedError) as raised:
        attend(sink=torch.zeros(7))
    assert "no backend can take this call" in str(raised.value)
    assert "can take it" not in str(raised.value)
