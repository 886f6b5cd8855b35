"""Bad input to attention is refused at the door, in three parts, and never by torch."""

import pytest
import torch
from witness import assert_refuses

import lengthwise as lw

Q = torch.randn(2, 7, 5, 4)
BOOL = torch.ones(2, 5, dtype=torch.bool)
INTS = BOOL.long()
EITHER = (ValueError, TypeError)


def attend(q=Q, k=Q, v=Q, **options):
    return lw.attend(q, k, v, **options)


def alibi(queries=5, keys=5, heads=7):
    encoding = lw.make("alibi", heads=heads, width=21, head_dim=3)
    return encoding.bias(torch.zeros(1, queries, 21), torch.arange(queries), torch.arange(keys))


TENSORS = {
    "a list": ({"q": [[1.0]]}, TypeError, "q must be a tensor", "list"),
    "three axes": ({"k": Q[0]}, ValueError, "(batch, head, position, dim)", "(7, 5, 4)"),
    "integers": ({"q": Q.long()}, TypeError, "floating-point", "torch.int64"),
    "complex numbers": ({"q": Q.cfloat()}, TypeError, "floating-point", "torch.complex64"),
    "two dtypes of q and k": ({"k": Q.double()}, TypeError, "share dtype", "torch.float32", "torch.float64"),
    "two dtypes of q and v": ({"v": Q.bfloat16()}, TypeError, "share dtype", "v is torch.bfloat16"),
    "two batches": ({"q": Q[:1]}, ValueError, "agree in batch", "q (1, 7, 5, 4)"),
    "two dims": ({"q": Q[..., :2]}, ValueError, "agree in batch and dim", "q (2, 7, 5, 2)"),
    "more keys than values": ({"v": Q[:, :, :4]}, ValueError, "k and v in batch, head and position", "v (2, 7, 4, 4)"),
    "more heads of k than of v": ({"v": Q[:, :1]}, ValueError, "k and v in batch, head and position"),
    "heads that do not divide": ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "multiple", "7 heads", "k has 3"),
    "no heads": ({"q": Q[:, :0]}, ValueError, "multiple", "0 heads"),
    "no heads of keys": ({"k": Q[:, :0], "v": Q[:, :0]}, ValueError, "multiple", "k has 0"),
    "no dims": ({"q": Q[..., :0], "k": Q[..., :0]}, ValueError, "dim zero", "heads of 0"),
}

MASKS = {
    "key_mask of numbers": ({"key_mask": BOOL.float()}, TypeError, "key_mask must be bool", "torch.float32"),
    "key_mask of integers": ({"key_mask": INTS}, TypeError, "key_mask must be bool", "torch.int64", "Convert"),
    "key_mask as a list": ({"key_mask": BOOL.tolist()}, EITHER, "key_mask", "list"),
    "key_mask without a batch": ({"key_mask": BOOL[0]}, ValueError, "(batch or 1, key) = (2, 5)", "(5,)"),
    "key_mask too short": ({"key_mask": BOOL[:, :4]}, ValueError, "(batch or 1, key) = (2, 5)", "(2, 4)"),
    "key_mask of three": ({"key_mask": BOOL[[0, 0, 0]]}, ValueError, "(batch or 1, key) = (2, 5)", "(3, 5)"),
    "key_mask per query": ({"key_mask": BOOL[:, None, None]}, ValueError, "(batch or 1, key)", "(2, 1, 1, 5)"),
    "documents of numbers": ({"documents": BOOL.float()}, TypeError, "documents must be integer", "torch.float32"),
    "documents of booleans": ({"documents": BOOL}, TypeError, "documents must be integer", "torch.bool"),
    "documents of complex": ({"documents": INTS.cfloat()}, TypeError, "documents must be integer", "torch.complex64"),
    "documents as a list": ({"documents": INTS.tolist()}, EITHER, "documents", "list"),
    "documents without a batch": ({"documents": INTS[0]}, ValueError, "(batch or 1, key) = (2, 5)", "(5,)"),
    "documents too short": ({"documents": INTS[:, :4]}, ValueError, "(batch or 1, key) = (2, 5)", "(2, 4)"),
    **{
        f"window {window!r}": ({"window": window}, ValueError, "window must be a whole number", repr(window))
        for window in (0, -1, True, 2.5, "3")
    },
    "causal as a word": ({"causal": "no"}, EITHER, "causal", "'no'"),
    "causal as nothing": ({"causal": None}, EITHER, "causal", "None"),
    "start before the first slot": ({"start": -1}, EITHER, "start", "-1"),
    "start beyond the room": ({"start": 1}, EITHER, "start", "1"),
    "start between slots": ({"q": Q[:, :, :2], "start": 2.5}, EITHER, "start", "2.5"),
    "start as true": ({"q": Q[:, :, :2], "start": True}, EITHER, "start", "True"),
    "start as a real tensor": ({"q": Q[:, :, :2], "start": torch.tensor(0.5)}, EITHER, "start"),
    "start of every sequence": ({"q": Q[:, :, :2], "start": torch.tensor([0, 1])}, EITHER, "start"),
    "more queries than keys": ({"k": Q[:, :, :4], "v": Q[:, :, :4]}, ValueError, "5 queries", "4 keys", "causal=False"),
    "more queries than keys in a window": (
        {"k": Q[:, :, :4], "v": Q[:, :, :4], "causal": False, "window": 3},
        ValueError,
        "5 queries",
        "4 keys",
        "window",
    ),
}

ADDED = {
    "a tensor": ({"bias": torch.zeros(5, 5)}, TypeError, "described Bias", "Tensor came", "DenseBias(tensor)"),
    "a number": ({"bias": 3}, TypeError, "must be a Bias", "3 came", "encoding.bias"),
    "an encoding": (
        {"bias": lw.make("alibi", heads=7, width=21)},
        TypeError,
        "must be a Bias",
        "Alibi came",
        "encoding.bias",
    ),
    "too few queries": ({"bias": alibi(queries=4)}, ValueError, "must fit", "(2, 7, 5, 5)", "(1, 7, 4, 5)"),
    "too few keys": ({"bias": alibi(keys=4)}, ValueError, "must fit", "(2, 7, 5, 5)", "(1, 7, 5, 4)"),
    "other heads": ({"bias": alibi(heads=3)}, ValueError, "must fit", "(2, 7, 5, 5)", "(1, 3, 5, 5)"),
    "another batch": ({"bias": lw.DenseBias(torch.zeros(3, 7, 5, 5))}, ValueError, "must fit", "(3, 7, 5, 5)"),
    "rescore a number": ({"rescore": 3}, TypeError, "rescore must be a function", "3 came", "encoding.rescore"),
    "rescore an encoding": (
        {"rescore": lw.make("cope", heads=7, width=28)},
        TypeError,
        "rescore must be a function",
        "Cope came",
        "encoding.rescore",
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


def test_a_refusing_backend_describes_the_call_and_its_objection():
    cope = lw.make("cope", heads=7, width=28)
    kerple = lw.make("kerple", heads=7, width=28).bias(torch.zeros(1, 5, 28), torch.arange(5), torch.arange(5))
    with pytest.raises(NotImplementedError) as raised:
        attend(rescore=cope.rescore, bias=kerple, key_mask=BOOL, window=3, backend="sdpa")
    first, *lines = str(raised.value).splitlines()
    assert first == "backend 'sdpa' cannot take this call."
    said = {line.split()[0]: line for line in lines}
    assert "float32 cpu  batch=2 head=7 query=5 dim=4" in said["q"]
    assert "key=5" in said["k"]
    assert "DistanceBias, needs a gradient" in said["bias"]
    assert "Cope.rescore" in said["rescore"]
    assert all(word in said["masks"] for word in ("causal", "key_mask", "window=3"))
    assert "rescore replaces the scores" in said["sdpa:"]
    assert "backend='row_block' or 'reference', which have no objection" in said["Use"]
