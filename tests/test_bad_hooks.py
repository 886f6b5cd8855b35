"""Tokens, states, queries and keys that do not fit are refused at an encoding's hooks, in plain words."""

import pytest
import torch
from witness import assert_refuses

import lengthwise as lw

X, P = torch.randn(2, 5, 21), torch.arange(5)
Q = torch.randn(2, 7, 5, 4)
EITHER = (ValueError, TypeError)

STEP_ENCODINGS = pytest.mark.parametrize("name", ["cable", "cable-nw", "k-cable", "fox"])


def make(name, **options):
    return lw.make(name, heads=7, width=21, **options)


TOKENS = {
    "too narrow": (X[..., :20], "(batch, position, 21)", "(2, 5, 20)"),
    "without a batch": (X[0], "(batch, position, 21)", "(5, 21)"),
    "integers": (X.long(), "floating-point", "torch.int64"),
    "missing": (None, "floating-point", "None"),
    "too few": (X[:, :4], "one token per", "4", "5"),
}

EVERY_TOKENS = pytest.mark.parametrize("case", TOKENS.values(), ids=TOKENS.keys())


@EVERY_TOKENS
@STEP_ENCODINGS
def test_a_bias_of_steps_refuses_tokens(name, case):
    x, *phrases = case
    assert_refuses(lambda: make(name).bias(x, lw.TokenLayout.of(P)), ValueError, *phrases)


@EVERY_TOKENS
@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_an_embedding_refuses_tokens(name, case):
    x, *phrases = case
    assert_refuses(lambda: make(name).embed(x, lw.TokenLayout.of(P)), ValueError, *phrases)


@pytest.mark.parametrize("case", list(TOKENS.values())[:-1], ids=list(TOKENS)[:-1])
@STEP_ENCODINGS
def test_a_state_refuses_tokens(name, case):
    x, *phrases = case
    assert_refuses(lambda: make(name).state(x), EITHER, *phrases)


KEY_MASKS = {
    "of numbers": (torch.ones(2, 5), EITHER, "key_mask", "torch.float32"),
    "too short": (torch.ones(2, 4).bool(), EITHER, "key_mask", "(2, 4)"),
    "of three axes": (torch.ones(2, 1, 5).bool(), EITHER, "key_mask", "(2, 1, 5)"),
    "of three sequences": (torch.ones(3, 5).bool(), EITHER, "key_mask", "(3, 5)"),
    "a list": ([[True] * 5] * 2, EITHER, "key_mask", "list"),
}


@pytest.mark.parametrize("case", KEY_MASKS.values(), ids=KEY_MASKS.keys())
@STEP_ENCODINGS
def test_a_state_refuses_a_key_mask(name, case):
    key_mask, error, *phrases = case
    assert_refuses(lambda: make(name).state(X, key_mask), error, *phrases)


STATES = {
    "too short": ({"step": torch.zeros(2, 7, 4)}, ValueError, "cover all 5 keys", "got 4", "append"),
    "of six heads": ({"step": torch.zeros(2, 6, 5)}, EITHER, "state", "(2, 6, 5)"),
    "of three sequences": ({"step": torch.zeros(3, 7, 5)}, EITHER, "state", "(3, 7, 5)"),
    "of two axes": ({"step": torch.zeros(7, 5)}, EITHER, "state", "(7, 5)"),
    "empty": ({}, EITHER, "state", "'step'"),
    "a tensor": (torch.zeros(2, 7, 5), EITHER, "state", "(2, 7, 5)"),
}


@pytest.mark.parametrize("case", STATES.values(), ids=STATES.keys())
@STEP_ENCODINGS
def test_a_bias_of_steps_refuses_a_state(name, case):
    state, error, *phrases = case
    assert_refuses(lambda: make(name).bias(X[:, -2:], lw.TokenLayout.of(P[-2:], P), state), error, *phrases)


@pytest.mark.parametrize("start", [5, 7])
@STEP_ENCODINGS
def test_queries_behind_all_keys_have_no_levels(name, start):
    encoding = make(name)
    layout = lw.TokenLayout.of(P[-2:] + 2, P, start=start)
    assert_refuses(lambda: encoding.bias(X[:, -2:], layout, encoding.state(X)), EITHER, f"slot {start}", "5 keys")


TURNED = {
    "of another width": (Q[..., :2], Q, P, P, EITHER, "(2, 7, 5, 2)"),
    "without a batch": (Q[0], Q, P, P, EITHER, "(7, 5, 4)"),
    "of integers": (Q.long(), Q, P, P, EITHER, "torch.int64"),
    "that are missing": (None, Q, P, P, EITHER, "None"),
    "with too few positions": (Q, Q, P[:4], P, EITHER, "query", "4"),
    "with one position for all": (Q, Q, P[:1], P, EITHER, "query", "1"),
    "whose keys have too few": (Q, Q, P, P[:4], EITHER, "key", "4"),
}


@pytest.mark.parametrize("case", TURNED.values(), ids=TURNED.keys())
def test_rope_refuses_queries_and_keys(case):
    q, k, query, key, error, *phrases = case
    layout = lw.TokenLayout.of(query, key, causal=False)
    assert_refuses(lambda: make("rope", head_dim=4).rotate(q, k, layout), error, *phrases)
