"""What a user of transformers does with a model works with every encoding."""

import copy
import json
import re

import pytest
import torch
from model_kit import ADDITIVE, CASES, LENGTH, RESCORING, loud_model, make_cache, make_config, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache

import lengthwise as lw
from lengthwise.encodings.registry import find
from lengthwise.model import PRESETS, LengthwiseConfig, LengthwiseForCausalLM, LengthwiseModel
from lengthwise.testing import RELATIVE, assert_near

PARAMETERS = {"tiny": 44_670_976, "small": 123_689_472, "medium": 353_822_720}
STEPS = 6
CLASSES = {case: find(name) for case, (name, _) in CASES.items()}


@pytest.mark.parametrize("size", PRESETS)
def test_presets_have_the_parameters_of_the_papers_tables(size):
    config = LengthwiseConfig.preset(size, encoding="none")
    with torch.device("meta"):
        model = LengthwiseForCausalLM(config)
    assert config.head_dim * config.n_head == config.n_embd
    assert model.num_parameters() == PARAMETERS.get(size, model.num_parameters())
    assert (config.n_head, config.head_dim) == (12, 16) or size != "nano"


def test_cable_adds_the_papers_parameters_to_gpt2_small():
    with torch.device("meta"):
        model = LengthwiseForCausalLM(LengthwiseConfig.preset("small", encoding="cable"))
    assert model.num_parameters() - PARAMETERS["small"] == 221_472


@pytest.mark.parametrize("case", CASES)
def test_our_attention_is_what_runs_if_none_is_asked_for(case, monkeypatch):
    model = LengthwiseForCausalLM(make_config(case))
    assert model.config._attn_implementation == "lengthwise"
    calls = []
    monkeypatch.setattr("lengthwise.model.attention.attend", lambda q, k, v, **_: calls.append(1) or v)
    model(tokens())
    assert len(calls) == model.config.n_layer


@pytest.mark.parametrize(
    ("case", "implementation"), [*((case, "sdpa") for case in ADDITIVE), *((case, "eager") for case in CASES)]
)
@torch.no_grad()
def test_stock_attention_gives_what_ours_gives(case, implementation):
    model, ids = loud_model(case), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = torch.cat([torch.arange(12), torch.arange(LENGTH - 12)])[None]

    def run():
        left = model(ids, attention_mask=mask).logits[mask.bool()]
        cache = make_cache("static", model)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split(11, 1)]
        return model(ids).logits, left, model(ids, position_ids=positions).logits, torch.cat(chunks, 1)

    ours = run()
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    for found, expected in zip(run(), ours, strict=True):
        assert_near(found, expected, f"{case}, {implementation}")


@pytest.mark.parametrize("case", ["kerple", "cable"])
@torch.no_grad()
def test_flex_attention_gives_what_ours_gives(case):
    model, ids = loud_model(case, n_layer=1, n_embd=48), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    ours = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("flex_attention")
    found = model(ids, attention_mask=mask).logits[mask.bool()]
    assert_near(found, ours, "flex_attention")


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/evil", "paged|eager"])
def test_attention_that_takes_no_bias_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name.replace("|", r"\|")):
        LengthwiseForCausalLM._from_config(make_config("kerple"), attn_implementation=name)
    model = LengthwiseForCausalLM(make_config("kerple"))
    with pytest.raises(ValueError, match=name.replace("|", r"\|")):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "lengthwise"


@pytest.mark.parametrize("case", RESCORING)
def test_stock_kernels_are_refused_where_scores_are_replaced(case):
    model = LengthwiseForCausalLM(make_config(case))
    assert not any((part._supports_sdpa or part._supports_flex_attn) for part in (model, model.transformer))
    for name in ("sdpa", "flex_attention"):
        with pytest.raises(ValueError, match=f"{name}.*{re.escape(CASES[case][0])}"):
            model.set_attn_implementation(name)
    assert LengthwiseForCausalLM(make_config("kerple"))._supports_sdpa


def test_an_unknown_attention_is_refused_in_the_words_of_transformers():
    model = LengthwiseForCausalLM(make_config("kerple"))
    with pytest.raises(ValueError, match='Specified `attn_implementation="foo"` is not supported'):
        model.set_attn_implementation("foo")


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_eager_attention_gives_the_weights(case):
    model, ids = loud_model(case), tokens()
    ours = model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    found = model(ids, output_attentions=True)
    assert len(found.attentions) == model.config.n_layer
    for theirs, own in zip(found.attentions, ours.attentions, strict=True):
        assert_near(theirs, own, case)


IMPLEMENTATIONS = [(case, name) for case in CASES for name in ("lengthwise", "eager", "sdpa")]


@pytest.mark.parametrize(("case", "name"), [(c, n) for c, n in IMPLEMENTATIONS if n != "sdpa" or c in ADDITIVE])
@torch.no_grad()
def test_a_mask_of_four_axes_says_who_sees_whom(case, name):
    model, ids = loud_model(case), tokens()
    whole, document = model(ids).logits, model(ids, position_ids=PACKED).logits
    model.set_attn_implementation(name)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    apart = causal & (PACKED_DOCUMENTS[:, None] == PACKED_DOCUMENTS)
    for mask, expected, positions in ((causal, whole, None), (apart, document, PACKED)):
        boolean = mask.expand(2, 1, -1, -1)
        lowest = torch.zeros(1, 3, LENGTH, LENGTH).masked_fill(~mask, torch.finfo(torch.float32).min)
        endless = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~mask, -torch.inf)
        for given in (boolean, lowest, endless):
            found = model(ids, attention_mask=given, position_ids=positions).logits
            assert_near(found, expected, f"{case}, {name}, {given.dtype}")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_mask_of_four_axes_works_with_a_cache_and_need_not_be_causal(kind):
    model, ids = loud_model("kerple"), tokens()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:6, :6] = True
    mask[20:, 3] = False
    mask = mask.expand(2, 1, -1, -1)
    whole = model(ids, attention_mask=mask).logits
    assert (whole[:, :5] - model(ids).logits[:, :5]).abs().max() > 1e-2
    cache = make_cache(kind, model)
    first = model(ids[:, :20], attention_mask=mask[:, :, :20, :20], past_key_values=cache).logits
    assert_near(first, whole[:, :20], kind)
    rest = mask[:, :, 20:]
    rest = torch.nn.functional.pad(rest, (0, 8)) if kind == "static" else rest
    assert_near(model(ids[:, 20:], attention_mask=rest, past_key_values=cache).logits, whole[:, 20:], kind)


@pytest.mark.parametrize("name", ["lengthwise", "eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_numbers_in_a_mask_are_added_to_the_scores(name):
    model, ids = loud_model("kerple", n_layer=1, n_embd=48), tokens()
    lowest = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
    soft = torch.randn(2, 3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
    x = model.transformer.h[0].ln_1(model.transformer.wte(ids))
    attention = model.transformer.h[0].attn
    q, k, v = attention.c_attn(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / 4 + attention.encoding.bias(x, lw.layout(LENGTH)).dense() + soft + lowest
    expected = attention.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    found = []
    attention.register_forward_hook(lambda _module, _inputs, out: found.append(out[0]))
    model.set_attn_implementation(name)
    model(ids, attention_mask=soft + lowest)
    assert_near(found[0], expected, name)


def test_a_query_whose_mask_shows_it_nothing_gets_nothing():
    model, ids = loud_model("dapev2-cable"), tokens()
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:, :, 4] = False
    out = model(ids, attention_mask=mask, output_attentions=True)
    assert not out.attentions[0][:, :, 4].any()
    assert out.logits.isfinite().all()


PACKED = torch.cat([torch.arange(12), torch.arange(LENGTH - 12)])[None]
PACKED_DOCUMENTS = (torch.arange(LENGTH) >= 12).long()


def generate(model, ids, **options):
    settings = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, **settings)


@pytest.mark.parametrize("case", CASES)
def test_generate_takes_the_likeliest_token_of_one_pass_every_time(case):
    model, ids = loud_model(case), tokens()[:, :15]
    mask = torch.ones_like(ids)
    padded = ids.clone()
    padded[0, :4], mask[0, :4] = 0, 0
    expected = ids.clone()
    for _ in range(STEPS):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static"), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static", prefill_chunk_size=4), expected)
    alone = generate(model, ids[:1, 4:])
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 4}):
        found = generate(model, padded, attention_mask=mask, **options)
        assert torch.equal(found[:1, 4:], alone), options
        assert torch.equal(found[1], expected[1]), options


@pytest.mark.parametrize("case", CASES)
def test_sampling_beams_and_assistance_work(case):
    model, ids = loud_model(case), tokens(1)[:, :13]
    torch.manual_seed(1)
    assert generate(model, ids, do_sample=True, num_return_sequences=2).shape == (2, 13 + STEPS)
    beams = generate(model, ids, num_beams=3, num_return_sequences=3)
    slow = generate(model, ids, num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(beams, slow) or case == "rope-dynamic"
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1).repeat(2, 1)
    padded[1, :4] = 7
    mask = (padded != 0).long()
    for options in ({}, {"cache_implementation": "static"}):
        both = generate(model, padded, attention_mask=mask, num_beams=3, num_return_sequences=3, **options)
        assert torch.equal(both[:3, 4:], beams)
    helper = copy.deepcopy(model)
    with torch.no_grad():
        helper.transformer.wte.weight += 0.05 * torch.randn_like(helper.transformer.wte.weight)
    if case != "rope-dynamic":
        assert torch.equal(generate(model, ids, assistant_model=helper), generate(model, ids))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_embeddings_hidden_states_and_weights_come_as_asked(case):
    model, ids = loud_model(case), tokens()
    plain = model(ids)
    out = model(ids, output_hidden_states=True, output_attentions=True)
    assert_near(out.logits, plain.logits, "with everything asked for")
    assert len(out.hidden_states) == model.config.n_layer + 1
    assert len(out.attentions) == model.config.n_layer
    weights = out.attentions[-1]
    assert weights.shape == (2, 3, LENGTH, LENGTH)
    if CLASSES[case].overrides("sink"):
        assert (weights.sum(-1) < 1 + 1e-6).all()
    else:
        assert torch.allclose(weights.sum(-1), torch.ones(()))
    assert not weights.triu(1).any()
    assert torch.equal(model(inputs_embeds=model.transformer.wte(ids)).logits, plain.logits)
    assert_near(model(ids, logits_to_keep=3).logits, plain.logits[:, -3:], "the last three")
    assert_near(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, plain.logits[:, [2, 5]], "two")
    assert isinstance(model(ids, return_dict=False), tuple)
    assert generate(model, None, inputs_embeds=model.transformer.wte(ids[:, :9])).shape == (2, STEPS)
    looked = generate(model, ids[:, :9], output_attentions=True, return_dict_in_generate=True)
    assert looked.attentions[1][0].shape == (2, 3, 1, 10)


@pytest.mark.parametrize("name", ["lengthwise", "eager"])
@pytest.mark.parametrize("case", ["kerple", "cable", "dapev2-cable"])
@torch.no_grad()
def test_weights_under_a_static_cache_cover_all_of_it(case, name):
    model, ids = loud_model(case), tokens()
    model.set_attn_implementation(name)
    whole = model(ids, output_attentions=True).attentions[1]
    cache = make_cache("static", model)
    model(ids[:, :20], past_key_values=cache)
    weights = model(ids[:, 20:], past_key_values=cache, output_attentions=True).attentions[1]
    assert weights.shape == (2, 3, 9, LENGTH + 8)
    assert_near(weights[..., :LENGTH], whole[:, :, 20:], case)
    assert not weights[..., LENGTH:].any()


@pytest.mark.parametrize("case", ["kerple", "cable", "dapev2-cable", "learned"])
def test_generation_goes_on_from_its_own_cache_and_looks_its_guesses_up(case):
    model, ids = loud_model(case), tokens(1)[:, :9].repeat(1, 2)
    whole = generate(model, ids)
    half = generate(model, ids, max_new_tokens=3, return_dict_in_generate=True)
    more = generate(model, half.sequences, max_new_tokens=3, past_key_values=half.past_key_values)
    assert torch.equal(more, whole)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), whole)
    kept = generate(model, ids, num_beams=2, return_dict_in_generate=True).past_key_values
    length = ids.shape[1] + STEPS - 1
    assert [layer.keys.shape for layer in kept.layers] == [(2, 3, length, 8)] * model.config.n_layer


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_a_gradient_with_and_without_checkpointing(case):
    model, ids = loud_model(case).train(), tokens()
    model.loss(ids, ids).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not [name for name, gradient in gradients.items() if gradient is None], "DDP would wait for these"
    for reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(inputs_embeds=model.transformer.wte(ids), labels=ids).loss.backward()
        scale = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, parameter in model.named_parameters():
            assert (parameter.grad - gradients[name]).abs().max() <= RELATIVE * scale, name


@pytest.mark.parametrize("case", ["alibi", "kerple", "fire", "cable", "dapev2-cable", "rope-dynamic", "learned"])
@torch.no_grad()
def test_one_encoding_can_serve_all_layers_and_a_context_free_bias_is_built_once(case, monkeypatch):
    shared = loud_model(case, share_encoding=True)
    name = CASES[case][0]
    kind = find(name)
    assert len([part for part in shared.modules() if type(part) is kind]) == 1
    calls, bias = [], kind.bias
    monkeypatch.setattr(kind, "bias", lambda *a, **k: calls.append(1) or bias(*a, **k))
    whole = shared(tokens()).logits
    if name in ("alibi", "kerple", "fire"):
        assert len(calls) == 1
    cache = make_cache("dynamic", shared)
    chunks = torch.cat([shared(part, past_key_values=cache).logits for part in tokens().split(10, 1)], 1)
    if case != "rope-dynamic":
        assert_near(chunks, whole, case)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_saved_model_loads_to_the_same_bits_through_the_auto_classes(case, tmp_path):
    model, ids = loud_model(case), tokens()
    model.save_pretrained(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".json", ".safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LengthwiseForCausalLM
    assert loaded.config._attn_implementation == "lengthwise"
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is LengthwiseModel
    assert type(AutoModelForCausalLM.from_config(model.config)) is LengthwiseForCausalLM
    assert torch.equal(base(ids).last_hidden_state, model.transformer(ids).last_hidden_state)
    assert AutoConfig.from_pretrained(tmp_path).to_dict()["encoding"] == CASES[case][0]


OF_TOKENS = [case for case, (name, _) in CASES.items() if (cls := find(name)).overrides("bias") and not cls.uses_qk]


@pytest.mark.parametrize("case", OF_TOKENS)
@torch.no_grad()
def test_the_bias_of_a_model_loaded_in_half_precision_is_that_of_a_fresh_one_to_the_bit(case, tmp_path):
    model = loud_model(case)
    model.save_pretrained(tmp_path)
    half = LengthwiseForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    x, layout = torch.randn(2, LENGTH, 24).bfloat16(), lw.layout(LENGTH)
    q, k = torch.randn(2, 2, 3, LENGTH, 8).bfloat16()
    encodings = [m.transformer.h[0].attn.encoding for m in (model, half)]
    ours, theirs = (encoding.bias(x, layout, **encoding.own_qk("bias", q, k)).dense() for encoding in encodings)
    assert torch.equal(ours, theirs)
    assert half(tokens()).logits.isfinite().all()
    fresh = LengthwiseForCausalLM._from_config(make_config(case), dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in fresh.transformer.h[0].attn.encoding.parameters())


@torch.no_grad()
def test_a_model_can_be_made_of_a_state_dict_alone(monkeypatch):
    model, ids = loud_model("kerple"), tokens()
    monkeypatch.setattr("lengthwise.model.checkpoint_checks.PreTrainedConfig", None)
    loaded = LengthwiseForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_checkpoint_without_a_head_loads_into_a_model_with_one_and_back(tied, tmp_path):
    model, ids = loud_model("cable", tie_word_embeddings=tied), tokens()
    model.transformer.save_pretrained(tmp_path / "base")
    loaded = LengthwiseForCausalLM.from_pretrained(tmp_path / "base")
    expected = model.transformer(ids).last_hidden_state
    assert torch.equal(loaded.transformer(ids).last_hidden_state, expected)
    assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == tied
    model.save_pretrained(tmp_path / "whole")
    base = LengthwiseModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(base(ids).last_hidden_state, expected)


def test_who_asks_for_the_loading_info_gets_it_in_place_of_a_refusal(tmp_path):
    loud_model("kerple").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"encoding": "t5"}))
    _, info = LengthwiseForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert "transformer.h.0.attn.encoding.table" in info["missing_keys"]


def test_a_config_takes_the_names_that_others_have_for_its_fields():
    config = make_config("kerple", layer_norm_eps=0.5)
    assert config.layer_norm_epsilon == 0.5
    config.layer_norm_eps = 0.25
    assert LengthwiseConfig(**config.to_dict()).layer_norm_epsilon == 0.25
    assert make_config("kerple", norm_eps=1.0).norm_eps == 1.0


@pytest.mark.parametrize(
    ("case", "names"), [("cable", {"encoding"}), ("learned", {"wpe"}), ("rope", set()), ("dapev2-cable", {"encoding"})]
)
def test_what_an_encoding_learns_is_named_as_float32(case, names, tmp_path):
    model = loud_model(case)
    assert model._keep_in_fp32_modules_strict == model.transformer._keep_in_fp32_modules_strict == names
    model.save_pretrained(tmp_path)
    half = LengthwiseForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    for name, parameter in half.named_parameters():
        assert (parameter.dtype == torch.float32) == bool(names & set(name.split("."))), name


@torch.no_grad()
def test_a_fresh_model_starts_as_gpt2_and_its_encodings_as_they_say():
    torch.manual_seed(0)
    model = LengthwiseForCausalLM(LengthwiseConfig.preset("nano", encoding="fire", vocab_size=997))
    block = model.transformer.h[1]
    assert block.attn.c_attn.weight.std() == pytest.approx(0.02, rel=0.05)
    assert block.attn.c_proj.weight.std() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert block.mlp.c_proj.weight.std() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert not block.mlp.c_fc.bias.any()
    assert block.attn.encoding.c.item() == pytest.approx(0.1)
    assert model.lm_head.weight is model.transformer.wte.weight


@torch.no_grad()
def test_the_vocabulary_can_grow():
    model, ids = loud_model("cable"), tokens()
    before = model(ids).logits
    model.resize_token_embeddings(120)
    assert model.config.vocab_size == 120
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_near(model(ids).logits[..., :101], before, "the old words")


def test_weight_decay_reaches_matrices_only():
    spared = {"t5": "table", "t5-clamped": "table", "cope": "table", "kerple": "raw_p", "fire": "c"}
    for case in (*spared, "cable", "learned", "dapev2-cable"):
        model = LengthwiseForCausalLM(make_config(case))
        decayed, kept = model.parameter_groups(0.3)
        assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
        assert sum(len(group["params"]) for group in (decayed, kept)) == len(list(model.parameters()))
        names = {id(p): name for name, p in model.named_parameters()}
        calm = {names[id(p)] for p in kept["params"]}
        assert all("ln_" in n or n.endswith("bias") or "encoding" in n or "wpe" in n for n in calm)
        if case in spared:
            assert f"transformer.h.1.attn.encoding.{spared[case]}" in calm
        if case == "learned":
            assert "transformer.wpe.weight" in calm
        if case == "cable":
            assert "transformer.h.0.attn.encoding.to_step.weight" not in calm
        torch.optim.AdamW([decayed, kept])


@pytest.mark.parametrize("case", ["cable", "rope-dynamic", "kerple", "fire-short", "alibi"])
@torch.no_grad()
def test_a_static_cache_decodes_in_one_compiled_graph(case):
    model, ids = loud_model(case), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    torch.compiler.reset()
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    for stop in range(21, LENGTH + 1):
        whole = torch.nn.functional.pad(mask[:, :stop], (0, LENGTH + 3 - stop))
        positions = mask[:, :stop].sum(1, keepdim=True) - 1
        inputs = {"attention_mask": whole, "position_ids": positions} if stop % 2 else {"attention_mask": whole}
        found = step(ids[:, stop - 1 : stop], past_key_values=cache, **inputs).logits
        expected = model(ids[:, :stop], attention_mask=mask[:, :stop], use_cache=False).logits[:, -1:]
        assert_near(found, expected, f"{case}, token {stop}")


@pytest.mark.parametrize("case", CASES)
def test_every_encoding_compiles_into_one_graph_forward_and_backward(case):
    torch.compiler.reset()
    model, ids = loud_model(case, n_layer=1).train(), tokens()
    expected = model(ids, labels=ids)
    expected.loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids)
    found.loss.backward()
    assert_near(found.logits, expected.logits, case)
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - wanted[name]).abs().max() <= RELATIVE * scale, name


def test_the_loss_in_chunks_compiles_into_one_graph():
    torch.compiler.reset()
    model, ids = loud_model("cable").train(), tokens()
    expected = model.loss(ids, ids)
    found = torch.compile(model.loss, backend="aot_eager", fullgraph=True)(ids, ids)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    found.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_encoding_can_be_exported_as_a_graph_of_any_batch_and_length(case):
    model = loud_model(case, n_layer=1)
    sizes = {0: torch.export.Dim("batch", min=1, max=16), 1: torch.export.Dim("length", min=3, max=60)}
    inputs = {"input_ids": tokens(3, 17), "use_cache": False}
    shapes = {"input_ids": sizes, "use_cache": None}
    graph = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    ids = tokens()
    assert_near(graph(input_ids=ids, use_cache=False).logits, model(ids).logits, case)


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES)
def test_inductor_trains_every_encoding_as_eager_does(case):
    torch.compiler.reset()
    model, ids = loud_model(case).train(), tokens()
    expected = model.loss(ids, ids)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    found = torch.compile(model.loss, fullgraph=True)(ids, ids)
    gradients = torch.autograd.grad(found, list(model.parameters()))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    exact_model = loud_model(case).double().train()
    exact = torch.autograd.grad(exact_model.loss(ids, ids), list(exact_model.parameters()))
    scale = max(float(g.abs().max()) for g in exact)
    eager, compiled = (
        max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)) for found in (wanted, gradients)
    )
    # Loud weights make eager's own rounding large in some encodings: a graph may lose twice that.
    assert compiled <= max(RELATIVE * scale, 2 * eager)


def test_a_layout_takes_the_place_of_mask_and_positions_and_makes_no_cache():
    config = LengthwiseConfig(encoding="alibi", vocab_size=11, n_layer=1, n_head=2, n_embd=8, n_positions=8)
    model = LengthwiseForCausalLM(config).transformer.eval()
    ids = torch.arange(6)[None]
    out = model(ids, layout=lw.layout(6))
    assert torch.equal(out.last_hidden_state, model(ids, use_cache=False).last_hidden_state)
    assert out.past_key_values is None
    with pytest.raises(ValueError, match="a layout must be without attention_mask"):
        model(ids, layout=lw.layout(6), attention_mask=torch.ones_like(ids))
