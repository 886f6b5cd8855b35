"""An encoding's state goes through every cache as the keys do: the same tokens, in the same order, to the bit."""

import copy
import pickle

import pytest
import torch
from model_kit import by_chunks, loud_model, make_cache, tokens
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from lengthwise.model.cache import StateLayer, remember
from lengthwise.testing import assert_near

BATCH, HEADS, KEY_HEADS, DIM, ROOM, WINDOW = 2, 3, 1, 4, 16, 5
CACHES = {
    "dynamic": lambda: Cache(layers=[DynamicLayer()]),
    "grown as it is used": lambda: DynamicCache(),
    "static": lambda: Cache(layers=[StaticLayer(ROOM)]),
    "sliding": lambda: Cache(layers=[DynamicSlidingWindowLayer(WINDOW)]),
    "static and sliding": lambda: Cache(layers=[StaticSlidingWindowLayer(ROOM, WINDOW)]),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Tokens:
    """Keys, values and a state that all tell which token of which sequence they belong to."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.k = torch.randn(BATCH, KEY_HEADS, count, DIM, generator=generator).to(dtype)
        self.v = torch.randn(BATCH, KEY_HEADS, count, DIM, generator=generator).to(dtype)
        step = torch.randn(BATCH, HEADS, count, generator=generator)
        turns = torch.randn(BATCH, HEADS, count, 2, 3, generator=generator)
        self.state = {"step": step, "turns": turns}

    def add_to(self, cache, first: int, stop: int, rows=slice(None)):
        state = {name: numbers[rows, :, first:stop] for name, numbers in self.state.items()}
        return remember(cache, 0, self.k[rows, :, first:stop], self.v[rows, :, first:stop], state)

    def assert_together(self, found, slots: list[int], rows=slice(None)) -> None:
        """What came is of these tokens, each number and key its own; a static cache's room behind is not looked at."""
        k, v, state = found
        for name, x in {"k": k, "v": v, **state}.items():
            wanted = getattr(self, name) if name in ("k", "v") else self.state[name]
            assert torch.equal(x[:, :, : len(slots)], wanted[rows][:, :, slots]), name
            assert x.dtype == wanted.dtype
        assert k.shape[2] == state["step"].shape[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_three_heads_of_state_stay_with_one_head_of_keys(kind, early, dtype):
    cache, all_tokens = CACHES[kind](), Tokens(12, dtype)
    if early:
        cache.early_initialization(BATCH, KEY_HEADS, DIM, dtype, torch.device("cpu"))
    first = 0
    for stop in (3, 4, 5, 6, 7, 10, 11, 12):
        found = all_tokens.add_to(cache, first, stop)
        seen = [slot for slot in range(stop) if "sliding" not in kind or slot > first - WINDOW]
        all_tokens.assert_together(found, seen)
        first = stop
    layer = cache.layers[0]
    assert isinstance(layer, StateLayer)
    assert layer.keys.shape[-1] == layer.values.shape[-1] == DIM
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("kind", ["dynamic", "grown as it is used", "sliding"])
def test_cropped_repeated_and_selected_caches_keep_keys_and_state_together(kind):
    cache, all_tokens = CACHES[kind](), Tokens(12, torch.float32)
    cache.activate_past_recording()
    all_tokens.add_to(cache, 0, 9)
    cache.crop(-2)
    seen = list(range(3, 9) if kind == "sliding" else range(9))
    all_tokens.assert_together(all_tokens.add_to(cache, 7, 9), seen)
    cache.crop(0)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    seen = list(range(5, 10) if kind == "sliding" else range(10))
    all_tokens.assert_together(all_tokens.add_to(cache, 9, 10, [1, 0]), seen, [1, 0])


@pytest.mark.parametrize("kind", CACHES)
def test_reordered_copied_and_offloaded_caches_keep_keys_and_state_together(kind):
    cache, all_tokens = CACHES[kind](), Tokens(12, torch.float32)
    all_tokens.add_to(cache, 0, 3)
    twin = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    all_tokens.assert_together(all_tokens.add_to(cache, 3, 4, [1, 1]), [0, 1, 2, 3], [1, 1])
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    all_tokens.assert_together(all_tokens.add_to(cache, 4, 5, [1, 1]), [0, 1, 2, 3, 4], [1, 1])
    all_tokens.assert_together(all_tokens.add_to(pickle.loads(pickle.dumps(twin)), 3, 4), [0, 1, 2, 3])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("with_state", [False, True])
def test_room_behind_the_tokens_of_a_dynamic_layer_changes_nothing_that_was_handed_out(mode, with_state):
    """New tokens are written where there is room; whoever holds earlier keys, or a copy of the layer, keeps them."""
    everything, others = Tokens(12, torch.float32), Tokens(12, torch.float32)
    others.k, others.v = -others.k, -others.v
    handed_out = []

    def add(tokens, cache, first, stop, expected):
        state = {"step": tokens.state["step"][:, :, first:stop]} if with_state else None
        k, v, numbers = remember(cache, 0, tokens.k[:, :, first:stop], tokens.v[:, :, first:stop], state)
        if with_state:
            assert torch.equal(numbers["step"], everything.state["step"][:, :, :stop])
        handed_out.extend([(k, expected[0]), (v, expected[1])])
        assert all(torch.equal(x, wanted) for x, wanted in handed_out)
        return k

    own = [(everything.k[:, :, :n], everything.v[:, :, :n]) for n in range(13)]
    with mode():
        cache = DynamicCache()
        add(everything, cache, 0, 3, own[3])
        first = add(everything, cache, 3, 4, own[4])
        assert add(everything, cache, 4, 6, own[6]).data_ptr() == first.data_ptr()
        copied, twin = copy.copy(cache), copy.deepcopy(cache)
        copied.layers = [copy.copy(cache.layers[0])]
        if with_state:
            copied.layers[0].twin = copy.copy(cache.layers[0].twin)
        add(everything, cache, 6, 7, own[7])
        other = [
            torch.cat([a[:, :, :6], b[:, :, 6:7]], 2) for a, b in ((everything.k, others.k), (everything.v, others.v))
        ]
        add(others, copied, 6, 7, other)
        add(everything, twin, 6, 7, own[7])
        cache.crop(-1)
        add(others, cache, 6, 7, other)
        cache.reorder_cache(torch.arange(BATCH))
        cache.crop(-1)
        add(everything, cache, 6, 8, own[8])
    with torch.no_grad():
        add(everything, cache, 8, 9, own[9])


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_was_reset_keeps_keys_and_state_together(kind):
    cache, all_tokens = CACHES[kind](), Tokens(12, torch.float32)
    all_tokens.add_to(cache, 0, 3)
    cache.layers[0].reset()
    k, v, state = all_tokens.add_to(cache, 0, 2)
    # Up to transformers 5.15 a dynamic cache keeps its tokens as zeros.
    kept = 0 if "static" in kind else k.shape[2] - 2
    assert kept == 0 or not (k[:, :, :kept].any() or state["step"][:, :, :kept].any())
    found = k[:, :, kept:], v[:, :, kept:], {name: numbers[:, :, kept:] for name, numbers in state.items()}
    all_tokens.assert_together(found, [0, 1])


def test_a_cache_that_records_its_past_before_the_first_token_does_so_for_the_state():
    cache, all_tokens = CACHES["sliding"](), Tokens(12, torch.float32)
    cache.activate_past_recording()
    all_tokens.add_to(cache, 0, 9)
    cache.crop(-3)
    all_tokens.assert_together(all_tokens.add_to(cache, 6, 7), [2, 3, 4, 5, 6])


@pytest.mark.parametrize("case", ["cable", "dapev2-cable"])
@torch.no_grad()
def test_keys_of_a_model_with_a_state_are_as_wide_as_a_head(case):
    model, ids = loud_model(case), tokens()
    for kind, slots in (("dynamic", 29), ("static", 37), ("early", 37)):
        cache = make_cache(kind, model)
        model(ids, past_key_values=cache)
        for layer in cache.layers:
            assert layer.keys.shape == layer.values.shape == (2, 3, slots, 8)


@pytest.mark.parametrize("case", ["cable", "dapev2-cable"])
@torch.no_grad()
def test_a_cache_can_be_cropped_and_filled_anew(case):
    model, ids = loud_model(case), tokens()
    cache = make_cache("dynamic", model)
    model(tokens(seed=5), past_key_values=cache)
    cache.crop(-29)
    by_chunks(model, torch.cat([ids[:, :20], tokens(seed=6)[:, 20:]], 1), [29], cache)
    cache.crop(-9)
    found = model(ids[:, 20:], past_key_values=cache).logits
    assert_near(found, model(ids).logits[:, 20:], case)
