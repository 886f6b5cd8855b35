"""Stretching other people's RoPE models: the same bands, with each family's own rotation, cache and generate."""

import copy

import pytest
import torch
import transformers as hf
from inspect_kit import LLAMA, MODELS, ids, make_model

import lengthwise as lw
from lengthwise.model.stretch import stretched

COHERE = {"logit_scale": 1.0, "use_qk_norm": True}
GEMMA3 = {
    "head_dim": 8,
    "pad_token_id": 0,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
OWN = {
    "mistral-full": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=None)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**LLAMA, **COHERE)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA, **GEMMA3)),
}
FAMILIES = ["llama", "qwen3", "gpt_neox", *OWN]
EVERYWHERE = [family for family in FAMILIES if family != "gemma3"]
LENGTH = 31
RELATIVE = 1e-5
"""What the identity law of issue 19 allows, of the largest logit."""


@pytest.fixture(autouse=True)
def own_models(monkeypatch):
    for name, make in OWN.items():
        monkeypatch.setitem(MODELS, name, make)


def assert_near(logits, wanted, label):
    off = ((logits - wanted).abs().max() / wanted.abs().max()).item()
    assert off <= RELATIVE, f"{label} is off by {off:.1e} of the largest"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bands_that_change_no_distance_give_the_model_itself(family):
    model, tokens = make_model(family), ids(length=LENGTH)
    plain = model(tokens).logits
    for spec in ("self-extend:1:7", "leaky-rerope:7:1", "rerope:31", "linear:1"):
        assert_near(lw.stretch(model, spec)(tokens).logits, plain, spec)
        assert torch.equal(lw.unstretch(model)(tokens).logits, plain), "undone bit for bit"


@pytest.mark.parametrize("family", EVERYWHERE)
@torch.no_grad()
def test_the_control_is_the_model_under_a_mask_of_that_window(family):
    model, tokens = make_model(family), ids(length=LENGTH)
    place = torch.arange(LENGTH)
    d = place[:, None] - place
    windowed = model(tokens, attention_mask=((d >= 0) & (d < 9))[None, None].expand(2, 1, -1, -1)).logits
    assert_near(lw.stretch(model, "window:9")(tokens).logits, windowed, "window:9")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["rerope:7", "self-extend:4:7", "dca:6:9", "streaming:7:3", "yarn:4"])
@torch.no_grad()
def test_cached_decoding_is_one_pass_and_generate_follows_it(family, spec):
    model, tokens = lw.stretch(make_model(family), spec), ids(length=LENGTH)
    whole = model(tokens).logits
    cache, parts, first = hf.DynamicCache(config=model.config), [], 0
    for stop in (11, 12, 13, 24, 31):
        parts.append(model(tokens[:, first:stop], past_key_values=cache, use_cache=True).logits)
        first = stop
    assert_near(torch.cat(parts, 1), whole, spec)
    written = model.generate(tokens[:1], max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    again = model(written[:, :-1]).logits[0, LENGTH - 1 :].argmax(-1)
    assert torch.equal(written[0, LENGTH:], again)


def test_errors_name_the_function_that_takes_out_what_is_in_place():
    model, tokens = lw.stretch(make_model("llama"), "rerope:7"), ids(length=LENGTH)
    with pytest.raises(ValueError, match=r"take it out first: lw\.unstretch\(model\)"):
        lw.stretch(model.model, "rerope:7")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"call lw\.unstretch\(model\) before"):
        model(tokens)
    fitted = lw.fit(make_model("llama"), "alibi")
    with pytest.raises(ValueError, match=r"take it out first: lw\.unfit\(model\)"):
        lw.stretch(fitted, "rerope:7")


def test_attention_dropout_is_refused_by_name_in_training():
    model, tokens = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, attention_dropout=0.1)).train(), ids(length=LENGTH)
    lw.stretch(model, "rerope:7")
    with pytest.raises(NotImplementedError, match=r"LlamaAttention trains with attention dropout 0\.1.*model\.eval"):
        model(tokens)
    assert model.eval()(tokens).logits.isfinite().all()


@torch.no_grad()
def test_left_padding_static_caches_and_copies_change_nothing():
    model, tokens = lw.stretch(make_model("llama"), "self-extend:4:7"), ids(batch=1, length=LENGTH)
    whole = model(tokens).logits
    mask = torch.ones(1, LENGTH + 5, dtype=torch.long)
    mask[:, :5] = 0
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], 1)
    assert_near(model(padded, attention_mask=mask).logits[:, 5:], whole, "left padding")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, cache_implementation="static", disable_compile=True, **options), plain)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 5:], plain)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens).logits, whole)
    lw.unstretch(twin)
    assert torch.equal(model(tokens).logits, whole), "the copy alone was undone"


@torch.no_grad()
def test_gemmas_layers_with_a_window_stay_as_they_are():
    model = lw.stretch(make_model("gemma3"), "rerope:7")
    assert len(stretched(model).encodings) == 1
    assert stretched(model).encodings[0].rope.scaling.rope_base.base == 1000000.0


def smollm3() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**LLAMA, no_rope_layers=[1, 0], pad_token_id=0)).eval()


@pytest.mark.parametrize("spec", ["window:4", "streaming:4:3", "lm-infinite:4:3"])
@torch.no_grad()
def test_keys_that_are_dropped_are_not_seen_through_layers_without_rope(spec):
    model, tokens = smollm3(), ids(batch=1, length=LENGTH)
    plain = model(tokens).logits
    whole = lw.stretch(model, spec)(tokens).logits
    if spec == "window:4":
        place = torch.arange(LENGTH)
        d = place[:, None] - place
        windowed = lw.unstretch(model)(tokens, attention_mask=((d >= 0) & (d < 4))[None, None]).logits
        assert_near(lw.stretch(model, spec)(tokens).logits, windowed, spec)
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 90
    # Two layers of 4 keys: what is 7 tokens back comes in through no way.
    assert torch.equal(model(other).logits[:, 12:], whole[:, 12:])
    cache = hf.DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split([20, 1, 10], 1)]
    assert_near(torch.cat(parts, 1), whole, "cached")
    assert torch.equal(lw.unstretch(model)(tokens).logits, plain)


def test_what_cannot_be_stretched_is_refused_by_name():
    for family, spec, words in (
        ("gpt2", "rerope:7", "GPT2LMHeadModel has none"),
        ("mistral", "rerope:7", "see beyond the trained length, 64, and MistralForCausalLM has none"),
        ("gptj", "rerope:7", "attention code of its own"),
    ):
        model = make_model(family)
        with pytest.raises(NotImplementedError, match=words):
            lw.stretch(model, spec)
        assert stretched(model) is None
