"""Maps of others' models are what those models compute: caught inside torch, family by family."""

import math

import pytest
import torch
import transformers as hf
from inspect_kit import (
    ADDITIVE,
    CHOOSABLE,
    CONTEXTUAL,
    ENCODER_DECODER,
    LENGTH,
    MODELS,
    VOCABULARY,
    Own,
    ids,
    make_model,
    own_attention,
)
from torch import Tensor

from lengthwise.inspect import capture_attention, model_maps, position_maps, position_views
from lengthwise.inspect.model_maps import model_inputs
from lengthwise.model.families import family_of, interface, max_length

PARTS = {family: ["encoder", "decoder", "cross"] if family in ENCODER_DECODER else [""] for family in MODELS}
# LongT5's encoder looks at a band of keys and never has a square of scores.
PARTS["longt5"] = ["decoder", "cross"]
# BLOOM's kin add the key's share of a difference alone; gpt-oss takes away each row's largest score.
SHIFTED = ["bloom", "mpt", "falcon-alibi", "gpt_oss"]
CASES = [
    (family, attention, part)
    for family, parts in PARTS.items()
    for attention in ([None, "eager"] if family in CHOOSABLE else [None])
    for part in parts
]


def own_of(model, family: str, part: str) -> list[Own]:
    """The calls of one part: encoders come first, then a decoder's layers, each with itself and then across."""
    extra = {}
    if family in ENCODER_DECODER:
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        extra["decoder_input_ids"] = ids(1).roll(1, 1).index_fill(1, torch.tensor([0]), start)
    calls = own_attention(model, ids(1), **extra)
    decoder = calls[-4:]
    return {"": calls, "encoder": calls[:2], "decoder": decoder[0::2], "cross": decoder[1::2]}[part]


def assert_same_scores(found: Tensor, own: Tensor, *, shifted: bool) -> None:
    """Where attention may look; `shifted` by a number per row, which no softmax can tell."""
    may = ~found.isnan()
    assert (may == (own > -1e30)).all()
    # Sums of 8 products in another order, and a bias taken as a difference: units in the last place of the largest.
    tolerance = 16 * torch.finfo(torch.float32).eps * own[may].abs().max()
    if shifted:
        found, own = (x - x.diagonal(dim1=-2, dim2=-1)[..., None] for x in (found, own))
    torch.testing.assert_close(found[may], own[may], rtol=0, atol=float(tolerance))


@pytest.mark.parametrize(("family", "attention", "part"), CASES)
def test_map_plus_content_are_the_models_own_scores_and_their_softmax_its_own_weights(family, attention, part):
    model = make_model(family, attention)
    views = position_views(model, ids(1), "all", part=part or None)
    own = own_of(model, family, part)
    assert views["scores"].layers == (0, 1)
    for layer in range(2):
        scores = views["scores"].values[layer]
        own_scores, own_weights = (x[0, ..., :LENGTH] for x in (own[layer].scores, own[layer].weights))
        assert_same_scores(scores, own_scores, shifted=family in SHIFTED)
        if "bias" in views:
            content = views["content"].values[layer]
            torch.testing.assert_close(views["bias"].values[layer] + content, scores, equal_nan=True)
        weights = views["weights"].values[layer].nan_to_num()
        torch.testing.assert_close(weights, own_weights, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ADDITIVE)
def test_an_additive_bias_is_described_and_follows_no_token(family):
    maps = position_maps(make_model(family), ids(3), "all")
    assert all(one.described is not None and one.tiles is None for one in maps.maps)
    assert (maps.context_dependence == 0).all()
    # Slopes that are not powers of two are rounded at every key.
    assert (maps.diagonal_spread < 1e-6).all()


@pytest.mark.parametrize("family", CONTEXTUAL)
def test_a_relative_bias_that_follows_the_tokens_is_pooled_and_says_so(family):
    maps = position_maps(make_model(family), ids(3), "all")
    assert all(single.described is None and single.tiles is not None for single in maps.maps)
    assert (maps.context_dependence > 0.01).all()


@pytest.mark.parametrize("family", [family for family in MODELS if family not in ADDITIVE + CONTEXTUAL])
def test_a_model_without_a_bias_is_refused_one_and_others_are_offered(family):
    with pytest.raises(ValueError, match=r"adds none.*quantity='scores'.*quantity='profile'"):
        position_maps(make_model(family), ids(1))


def test_bloom_and_mpt_are_drawn_as_alibi_is_defined():
    interleaved = torch.tensor([2.0 ** (-8 * h / 4) for h in range(1, 5)] + [2.0 ** (-8 * h / 8) for h in (1, 3)])
    other = torch.tensor([2.0 ** (-8 * h / 8) for h in (2, 4, 6, 8, 1, 3)])
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for family, slopes in {"bloom": interleaved, "mpt": other}.items():
        values = position_maps(make_model(family), ids(1)).values
        expected = (-slopes[:, None, None] * distance).masked_fill(distance < 0, torch.nan)
        torch.testing.assert_close(values, expected, equal_nan=True)


def test_bloom_counts_positions_from_the_padding_mask():
    model = make_model("bloom")
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    mask[:, :5] = 0
    padded = position_maps(model, ids(1), attention_mask=mask).values
    torch.testing.assert_close(padded[:, 5:, 5:], position_maps(model, ids(1)[:, 5:]).values, equal_nan=True)


def hooks_of(model) -> list[tuple[int, int]]:
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


@pytest.mark.parametrize("family", MODELS)
def test_capturing_leaves_a_model_as_it_was(family):
    model = make_model(family).train()
    own, hooks = model.config._attn_implementation, hooks_of(model)
    position_maps(model, ids(1), quantity="scores")
    assert model.training
    assert model.config._attn_implementation == own
    assert hooks_of(model) == hooks


# XLNet itself fails where attention is causal and several sequences have padding.
PADDED = [*(family for family in CONTEXTUAL if family != "xlnet-uni"), "mpnet", "gptj", "gpt_neo", "bloom", "llama"]


@pytest.mark.parametrize("family", PADDED)
def test_padding_is_hidden_and_verified_in_every_sequence(family):
    model = make_model(family)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 17:] = 0
    records = []
    with capture_attention(model, records.append), torch.no_grad():
        model(ids(2), attention_mask=mask)
    assert [record.layer for record in records] == [0, 1]
    for record in records:
        shown = record.mask(slice(0, 17), slice(0, LENGTH)).expand(2, -1, -1, -1)
        assert not shown[1, :, :, 17:].any()
        assert shown[0].any(1).all() or record.causal


def test_capture_reports_the_selected_layers_of_every_pass_and_checks_what_is_selected():
    model, records = make_model("t5"), []
    with capture_attention(model, records.append, layers=[-1], part="cross"), torch.no_grad():
        for _ in range(2):
            model(ids(1), decoder_input_ids=ids(1)[:, :5])
    assert [(record.part, record.layer, record.shape[2:]) for record in records] == [("cross", 1, (5, LENGTH))] * 2
    with (
        pytest.raises(ValueError, match=r"layer must be an int from -2 to 1"),
        capture_attention(model, records.append, layers=[2]),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"part must be .*'encoder'.* got 'head'"),
        capture_attention(model, records.append, part="head"),
    ):
        pass


def test_attention_with_keys_out_of_a_cache_is_captured_or_refused_in_words():
    given = ids(1)
    for family in ("llama", "gpt2"):
        model, shapes = make_model(family), []
        with torch.no_grad():
            cache = model(given[:, :-1], use_cache=True).past_key_values
            with capture_attention(model, lambda record, shapes=shapes: shapes.append(record.shape)):
                model(given[:, -1:], past_key_values=cache)
        assert [shape[2:] for shape in shapes] == [(1, LENGTH)] * 2
    for family in ("gptj", "gpt_neo", "bloom"):
        model = make_model(family)
        with torch.no_grad(), capture_attention(model, lambda record: None):
            cache = model(given[:, :-1], use_cache=True).past_key_values
            with pytest.raises(NotImplementedError, match="without cached keys only"):
                model(given[:, -1:], past_key_values=cache)


def test_xlnets_segments_and_second_stream_are_refused():
    model = make_model("xlnet")
    with torch.no_grad(), capture_attention(model, lambda record: None):
        with pytest.raises(NotImplementedError, match="token_type_ids"):
            model(ids(1), token_type_ids=torch.zeros(1, LENGTH, dtype=torch.long))
        with pytest.raises(NotImplementedError, match="target_mapping"):
            model(ids(1), target_mapping=torch.eye(LENGTH)[None, -1:])


def test_xlnet_is_captured_with_memory_before_the_text():
    model, records = make_model("xlnet"), []
    with torch.no_grad():
        memory = model(ids(1)[:, :9], use_mems=True).mems
        with capture_attention(model, records.append):
            model(ids(1)[:, 9:], mems=memory)
    assert [record.shape[2:] for record in records] == [(LENGTH - 9, LENGTH)] * 2


def test_mpnets_bias_is_its_table_by_the_buckets_of_t5():
    def bucket(distance: int) -> int:
        n = abs(distance)
        near = n if n < 8 else min(15, 8 + int(math.log(n / 8) / math.log(128 / 8) * 8))
        return near + 16 * (distance < 0)

    model = make_model("mpnet")
    table = model.mpnet.encoder.relative_attention_bias.weight.detach()
    values = position_maps(model, ids(1, 64)).values
    expected = torch.stack([torch.stack([table[bucket(i - j)] for j in range(64)]) for i in range(64)])
    assert torch.equal(values, expected.permute(2, 0, 1))


ENDS = {"mpnet": 64, "gptj": 64, "gpt_neo": 64, "gpt2": 64, "opt": 64, "mpt": 64, "deberta-v2-absolute": 64}


@pytest.mark.parametrize("family", MODELS)
def test_the_longest_length_is_where_the_model_itself_ends(family):
    model, end = make_model(family), ENDS.get(family)
    assert max_length(model) == end
    if end is not None:
        with torch.no_grad():
            given = ids(1, end + 1).clamp(min=2)  # 1 is MPNet's padding, which takes no position
            model(given[:, :end])
            with pytest.raises((IndexError, RuntimeError)):
                model(given)


def test_robertas_table_ends_where_its_padding_row_says():
    config = hf.RobertaConfig(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=1, num_attention_heads=6)
    config.max_position_embeddings = 40
    model = hf.RobertaForMaskedLM(config).eval()
    assert max_length(model) == 38
    given = torch.randint(2, VOCABULARY, (1, 39))
    with torch.no_grad():
        model(given[:, :38])
        with pytest.raises((IndexError, RuntimeError)):
            model(given)


def test_a_sliding_window_is_seen_as_keys_that_may_not_be():
    may = ~position_maps(make_model("mistral"), ids(1), quantity="scores").values.isnan()
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    assert (may == ((distance >= 0) & (distance < 7))).all()


@pytest.mark.parametrize("family", ["llama", "phi", "gpt_neox", "falcon-rope", "gptj"])
def test_the_kernel_of_a_rotary_head_is_its_mean_query_turned_against_its_mean_key(family):
    # With one token repeated all queries and all keys of the first layer are the mean: then the kernel is the score.
    model = make_model(family)
    same = torch.full((1, LENGTH), 7)
    views = position_views(model, same, 0, ["scores", "profile"])
    kernel = views["profile"].maps[0].kernel
    assert kernel is not None
    torch.testing.assert_close(kernel, views["scores"].values[:, -1].flip(-1), atol=1e-4, rtol=1e-4)


def test_a_family_that_nothing_is_known_of_is_named_with_what_is_in_the_way():
    config = hf.CodeGenConfig(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
    with pytest.raises(NotImplementedError, match=r"CodeGenForCausalLM has attention code of its own.*needs a file"):
        position_maps(hf.CodeGenForCausalLM(config), ids(1), quantity="scores")
    with pytest.raises(NotImplementedError, match=r"LongT5ForConditionalGeneration has no .* captured in layer 1"):
        position_maps(make_model("longt5"), ids(1), part="encoder")
    with pytest.raises(NotImplementedError, match=r"expected a model of transformers, got Linear"):
        position_maps(torch.nn.Linear(2, 2), ids(1))


def test_falcon_under_eager_attention_which_adds_alibi_twice_is_refused():
    model = make_model("falcon-alibi")
    eager = hf.FalconForCausalLM._from_config(model.config, attn_implementation="eager")
    with pytest.raises(NotImplementedError, match=r"'sdpa', got 'eager'.*add the bias twice"):
        position_maps(eager, ids(1))


def test_attention_that_does_more_than_it_says_is_found_out(monkeypatch):
    honest = interface.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def louder(*args, **kwargs):
        out, weights = honest(*args, **kwargs)
        return 1.01 * out, weights

    model = make_model("llama")
    monkeypatch.setitem(interface.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", louder)
    with pytest.raises(NotImplementedError, match=r"layer 1 of LlamaForCausalLM must give softmax.*does more"):
        position_maps(model, ids(1), quantity="scores")


def sabotaged(own: str, change):
    """The probe with something done to what it hands on."""
    honest = interface._probe(own)

    def probe(*args, **kwargs):
        out, weights = honest(*args, **kwargs)
        return change(out), weights

    return probe


@pytest.mark.parametrize(("family", "own"), [("gpt2", "sdpa"), ("llama", "eager"), ("t5", "sdpa")])
def test_a_probe_that_changes_the_last_bit_of_what_it_hands_on_is_found_out(family, own, monkeypatch):
    changed = sabotaged(own, lambda out: torch.nextafter(out, torch.tensor(torch.inf)))
    monkeypatch.setitem(interface.ALL_ATTENTION_FUNCTIONS._global_mapping, interface.PROBES[own], changed)
    model = make_model(family, own)
    with pytest.raises(AssertionError, match=r"must not change.*the output of .* differs by"):
        position_maps(model, ids(1), quantity="scores")
    assert model.config._attn_implementation == own


def test_a_probe_under_which_a_window_is_lost_is_found_out(monkeypatch):
    masks = interface.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(masks, interface.PROBES["sdpa"], lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match=r"the output of Mistral.* differs by"):
        position_maps(make_model("mistral", "sdpa"), ids(1), quantity="scores")


@pytest.mark.parametrize("family", ["gpt2", "bloom", "t5"])
def test_looking_that_writes_to_what_the_model_reads_is_found_out(family, monkeypatch):
    def careless(record, *_):
        record.out[0, 0, 0, 0] += 1
        return {}

    monkeypatch.setattr(model_maps, "layer_maps", careless)
    with torch.inference_mode(), pytest.raises(AssertionError, match=r"layer 1 of .* were written to"):
        position_maps(make_model(family), ids(1), quantity="scores")


def test_what_a_decoder_reads_is_made_where_the_tokens_are():
    # A device that every machine has beside the CPU: nothing is computed there, but devices must not be mixed.
    model, given = make_model("t5").to("meta"), ids().to("meta")
    read = model_inputs(model, given, None, None, family_of(model))["decoder_input_ids"]
    assert (read.device, read.shape) == (given.device, given.shape)


def test_without_a_text_of_its_own_a_decoder_reads_the_encoders_one_token_behind():
    model, given = make_model("t5"), ids()
    read = model_inputs(model, given, None, None, family_of(model))["decoder_input_ids"]
    assert torch.equal(read[:, 1:], given[:, :-1])
    assert (read[:, 0] == 0).all()


def test_a_decoders_maps_are_named_by_the_tokens_that_it_reads():
    model, names = make_model("t5"), [str(number) for number in range(LENGTH)]
    named = {part: position_maps(model, ids(1), -1, "scores", part=part, tokens=names) for part in PARTS["t5"]}
    assert named["encoder"].tokens == tuple(names)
    assert named["decoder"].tokens == ("<start>", *names[:-1])
    assert named["cross"].tokens is None, "queries and keys have other names"
    own = position_maps(model, ids(1), part="decoder", decoder_input_ids=ids(1)[:, :5], tokens=names)
    assert own.tokens is None, "nobody named these"
