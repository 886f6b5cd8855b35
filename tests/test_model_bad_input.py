"""What cannot work is refused, before a weight is allocated where that is possible, with what to do instead."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from model_kit import loud_model, make_cache, make_config, tokens
from transformers import AutoModelForCausalLM, Cache

import lengthwise as lw
from lengthwise.loading import LoadError, load_model
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"n_head": 7}, ValueError, r"n_head=7 and n_embd=768"),
        ({"encoding": "alibo"}, ValueError, "did you mean 'alibi'"),
        ({"encoding": "alibi", "encoding_options": {"base": 10.0}}, TypeError, r"unknown option 'base' for 'alibi'"),
        ({"encoding": "t5", "encoding_options": {"buckets": 1}}, ValueError, "even number of buckets"),
        ({"encoding": "rope", "n_embd": 36}, ValueError, "head_dim must be even, got 3"),
        ({"encoding": "alibi", "slopes": "interleaved"}, TypeError, "encoding_options"),
        ({"n_heads": 8}, TypeError, "Did you mean 'n_head'"),
        ({"n_layer": 0}, ValueError, "n_layer must be a positive int"),
        ({"n_head": "8"}, StrictDataclassFieldValidationError, "n_head"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_once(changes, error, words):
    with pytest.raises(error, match=words):
        LengthwiseConfig(**changes)


def test_a_config_changed_for_the_worse_is_refused_before_weights(monkeypatch):
    config = make_config("kerple")
    config.n_head = 5
    monkeypatch.setattr(torch.nn, "Embedding", lambda *_, **__: pytest.fail("a weight was allocated"))
    with pytest.raises(ValueError, match=r"n_head=5"):
        LengthwiseForCausalLM(config)


def test_an_unknown_preset_is_answered_with_those_that_exist():
    with pytest.raises(ValueError, match="'nano', 'tiny', 'small'"):
        LengthwiseConfig.preset("huge")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 4}, r"n_head=3.*n_head=4"),
        ({"encoding": "alibi"}, r"encoding='kerple'.*encoding='alibi'"),
        ({"share_encoding": True}, r"share_encoding=None.*share_encoding=True"),
    ],
)
def test_a_checkpoint_of_another_kind_names_both(changes, words, tmp_path):
    loud_model("kerple").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        LengthwiseForCausalLM.from_pretrained(tmp_path, **changes)
    if "n_head" in changes:
        with pytest.raises(ValueError, match=words):
            LengthwiseForCausalLM.from_pretrained(tmp_path, num_attention_heads=changes["n_head"])
        make_config("kerple", **changes).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match=words):
            LengthwiseForCausalLM.from_pretrained(tmp_path, config=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=make_config("kerple", **changes))


def test_weights_of_another_encoding_under_this_ones_config_are_named(tmp_path):
    loud_model("kerple").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"encoding": "t5"}))
    with pytest.raises(ValueError, match=r"missing keys.*encoding\.table"):
        LengthwiseForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"encoding": "alibi"}))
    with pytest.raises(ValueError, match=r"unexpected keys.*encoding\.raw_a"):
        LengthwiseForCausalLM.from_pretrained(tmp_path)


def test_a_pickle_checkpoint_is_refused_with_the_reason(tmp_path):
    model = loud_model("kerple")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for load in (LengthwiseForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="can run any code"):
            load(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="can run any code"):
        LengthwiseForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def test_a_config_file_cannot_choose_an_attention_kernel_from_the_net(tmp_path):
    loud_model("kerple").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "somebody/kernel"}))
    with pytest.raises(ValueError, match="somebody/kernel"):
        LengthwiseForCausalLM.from_pretrained(tmp_path)


def test_a_sequence_beyond_a_learned_table_names_the_limit_and_what_has_none():
    model = loud_model("learned")
    with pytest.raises(lw.PositionError, match=r"end at 64, got position 64.*alibi"):
        model(tokens(1, 65))


@pytest.mark.parametrize("shape", [(2, 28), (3, 29), (29,), (2, 29, 29)])
def test_an_attention_mask_of_another_shape_is_named(shape):
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens\) = \(2, 29\)"):
        loud_model("kerple")(tokens(), attention_mask=torch.ones(shape))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 29, 28), torch.bool),
        ((2, 1, 29, 30), torch.bool),
        ((3, 1, 29, 29), torch.bool),
        ((2, 2, 29, 29), torch.float32),
        ((2, 1, 1, 29), torch.bool),
        ((2, 1, 29, 29), torch.long),
    ],
)
def test_a_mask_of_four_axes_that_does_not_fit_is_named(shape, dtype):
    with pytest.raises(ValueError, match=r"boolean or floating-point, \(2, 1 or 3, 29, 29\), got"):
        loud_model("kerple")(tokens(), attention_mask=torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("shape", [(2, 28), (3, 29), (29,)])
def test_position_ids_of_another_shape_are_named(shape):
    with pytest.raises(ValueError, match=r"position_ids must be \(batch or 1, new tokens\) = \(2, 29\)"):
        loud_model("kerple")(tokens(), position_ids=torch.zeros(shape, dtype=torch.long))


def test_empty_missing_and_doubled_input_is_refused():
    model = loud_model("kerple")
    for shape in ((1, 0), (0, 5), (3,)):
        with pytest.raises(ValueError, match="a token at least"):
            model(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match="got neither"):
        model()
    with pytest.raises(ValueError, match="got both"):
        model(tokens(), inputs_embeds=torch.zeros(2, 29, 24))


def test_positions_with_gaps_train_but_are_not_cached():
    model = loud_model("kerple")
    gaps = torch.arange(0, 58, 2)[None]
    assert model(tokens(), position_ids=gaps, use_cache=False).logits.isfinite().all()
    assert model.train()(tokens(), position_ids=gaps).logits.isfinite().all()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.eval()(tokens(), position_ids=gaps)


def test_a_cache_of_another_kind_is_refused():
    model = loud_model("cable")
    with pytest.raises(TypeError, match="DynamicCache"):
        model(tokens(), past_key_values=((torch.zeros(1), torch.zeros(1)),))


def test_a_static_cache_that_is_too_short_is_named():
    model = loud_model("cable")
    with pytest.raises(ValueError, match="static cache of 20 tokens has 0 in it and no room for 29"):
        model(tokens(), past_key_values=make_cache("static", model, 20))


def test_a_quantised_cache_is_refused_for_a_state_and_taken_without():
    from transformers.cache_utils import DynamicLayer

    class QuantisedLayer(DynamicLayer):
        pass

    model, plain = loud_model("cable"), loud_model("kerple")
    with pytest.raises(NotImplementedError, match=r"QuantisedLayer.*quantised"):
        model(tokens(), past_key_values=Cache(layer_class_to_replicate=QuantisedLayer))
    cache = Cache(layer_class_to_replicate=QuantisedLayer)
    assert plain(tokens(), past_key_values=cache).logits.isfinite().all()


def test_a_cache_that_was_filled_without_a_state_is_refused():
    model, plain = loud_model("cable"), loud_model("kerple")
    for kind in ("dynamic", "static"):
        cache = make_cache(kind, model)
        plain(tokens()[:, :20], past_key_values=cache)
        with pytest.raises(ValueError, match="got 20 tokens without the encoding's state"):
            model(tokens()[:, 20:], past_key_values=cache)


def test_our_attention_is_refused_to_models_that_do_not_tell_positions():
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_embd=24, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0))
    other.set_attn_implementation("lengthwise")
    with pytest.raises(NotImplementedError, match="GPT2Attention"):
        other(tokens())


def test_a_config_field_of_another_type_is_named_with_the_reason(tmp_path):
    loud_model("kerple").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"n_layer": 2', '"n_layer": "2"'))
    with pytest.raises(LoadError, match=r"is damaged, or no checkpoint: .*'n_layer'.* expected int"):
        load_model(str(tmp_path))
