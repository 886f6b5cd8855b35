"""Cached decoding equals one pass: every encoding, cache, chunking, padding and packing, with loud weights."""

import pytest
import torch
from model_kit import CASES, LENGTH, ONE_OF_EACH_KIND, assert_decodes, by_chunks, loud_model, make_cache, tokens

from lengthwise.testing import assert_near

CHUNKS = {"prompt then one by one": [20] + [1] * 9, "chunks": [7, 7, 7, 7, 1]}


@pytest.mark.parametrize("kind", ["dynamic", "static", "early"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoding_with_a_cache_gives_the_logits_of_one_pass(case, kind):
    model, ids = loud_model(case), tokens()
    for name, chunks in CHUNKS.items():
        expected = by_chunks(model, ids, [LENGTH], None) if "dynamic" not in case else growing(model, ids, chunks)
        found = by_chunks(model, ids, chunks, make_cache(kind, model))
        assert_near(found, expected, f"{case}, {kind} cache, {name}")


def growing(model, ids, chunks, **inputs):
    """The logits that each token gets in a pass that ends where its chunk does.

    Angles that depend on the length turn earlier tokens too as a sequence grows, so one pass over all is another thing.
    """
    found, first = [], 0
    for stop in torch.tensor(chunks).cumsum(0).tolist():
        upto = {name: value[:, :stop] for name, value in inputs.items()}
        found.append(model(ids[:, :stop], use_cache=False, **upto).logits[:, first:])
        first = stop
    return torch.cat(found, 1)


@torch.no_grad()
def assert_padding_changes_nothing(case, side, kind, chunks):
    model, ids, pad = loud_model(case), tokens(), 6
    mask = torch.ones(2, LENGTH + pad, dtype=torch.long)
    padded = torch.zeros_like(mask)
    padded[1, :LENGTH] = ids[1]
    mask[1, LENGTH:] = 0
    if side == "left":
        padded[0, pad:], mask[0, :pad] = ids[0], 0
    else:
        padded[0, :LENGTH], mask[0, LENGTH:] = ids[0], 0
    found = by_chunks(model, padded, chunks, make_cache(kind, model, LENGTH + pad + 3), attention_mask=mask)
    alone = growing(model, ids, [LENGTH])
    assert_near(found[mask.bool()].view_as(alone), alone, f"{case}, padded {side}, {kind}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_no_logits_of_one_pass(case, side):
    assert_padding_changes_nothing(case, side, "dynamic", [LENGTH + 6])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "rope-dynamic"])
def test_padding_changes_no_logits_in_chunks(case, kind):
    assert_padding_changes_nothing(case, "left", kind, [11, 20, 1, 1, 1, 1])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_packed_documents_get_the_logits_that_they_get_alone(case):
    model, ids, border = loud_model(case), tokens(), 13
    positions = torch.cat([torch.arange(border), torch.arange(LENGTH - border)])[None].expand(2, -1)
    alone = torch.cat([model(ids[:, :border]).logits, model(ids[:, border:]).logits], 1)
    assert_near(model(ids, position_ids=positions).logits, alone, f"{case}, one pass")
    assert_near(model(ids, position_ids=positions[:1], use_cache=False).logits, alone, f"{case}, one row of positions")
    if case == "rope-dynamic":
        pytest.skip("its angles depend on the length of the whole row, so keys that are cached early differ")
    for chunks in ([LENGTH], [10, 1, 10, 1, 7], [20] + [1] * 9, [13, 16]):
        cache = make_cache("static" if len(chunks) == 5 else "dynamic", model)
        assert_near(by_chunks(model, ids, chunks, cache, position_ids=positions), alone, f"{case}, {chunks}")


# DAPE v2 looks at each key's neighbours in the tensor, padding or not.
@pytest.mark.parametrize("case", [case for case in ONE_OF_EACH_KIND if "dapev2" not in case])
@torch.no_grad()
def test_padding_between_two_turns_takes_no_position(case):
    model, ids = loud_model(case), tokens()
    first, second = ids[:, :8], ids[:, 8:20]
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 6:10] = 0
    alone = model(ids[:1, [0, 1, 2, 3, 4, 5, *range(10, 20)]]).logits
    for positions in (None, (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)):
        cache = make_cache("dynamic", model)
        given = {} if positions is None else {"position_ids": positions[:, :8]}
        model(first, attention_mask=mask[:, :8], past_key_values=cache, **given)
        given = {} if positions is None else {"position_ids": positions[:, 8:]}
        found = model(second, attention_mask=mask, past_key_values=cache, **given).logits
        assert_near(found[:1, 2:], alone[:, 6:], case)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_last_token_changes_no_earlier_logits(case):
    model, ids = loud_model(case), tokens()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    assert torch.equal(model(ids).logits[:, :-1], model(changed).logits[:, :-1])


@pytest.mark.parametrize("case", ["cable", "fox", "k-cable", "dapev2-cable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_half_precision_cache_keeps_the_state_exactly(case, dtype):
    model, ids = loud_model(case).to(dtype), tokens()
    whole = model(ids).logits
    found = by_chunks(model, ids, [20] + [1] * 9, make_cache("early", model))
    # Both are rounded to half precision once a layer.
    assert (found - whole).float().norm() <= 4 * torch.finfo(dtype).eps * whole.float().norm()


@pytest.mark.prove
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("implementation", ["lengthwise", "eager", "sdpa"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "early"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_everything_agrees_with_everything(case, kind, implementation, shared):
    model, pad = loud_model(case, share_encoding=shared), 5
    if model.config.stock_attention and implementation == "sdpa":
        pytest.skip("sdpa cannot replace scores")
    ids = tokens(2, LENGTH)
    alone = model(ids).logits
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, LENGTH + pad, dtype=torch.long)
    padded = torch.zeros_like(mask)
    padded[0, pad:], mask[0, :pad] = ids[0], 0
    padded[1, :LENGTH], mask[1, LENGTH:] = ids[1], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0).masked_fill(mask == 0, 0)
    whole = [LENGTH + pad]
    for chunks in (whole, [1] * whole[0], [12] + [1] * (whole[0] - 12), [9, 9, 9, whole[0] - 27]):
        if case == "rope-dynamic" and chunks is not whole:
            continue
        for given in ({}, {"position_ids": positions}):
            cache = make_cache(kind, model, LENGTH + pad + 2)
            found = by_chunks(model, padded, chunks, cache, attention_mask=mask, **given)
            label = f"{case}, {kind}, {implementation}, {chunks}"
            assert_decodes(found[mask.bool()].view_as(alone), alone, label, model, ids)
