"""A model fitted with its own encoding is itself, and with any other one it obeys the laws of decoding."""

import copy
import pickle
import sys

import pytest
import torch
import transformers as hf
from fit_kit import DECODERS, ENCODERS, LENGTH, OWN_CODE, assert_close, make_loud, make_model, padded, tokens
from inspect_kit import LLAMA, MODELS
from torch import Tensor

import lengthwise as lw
from lengthwise.evaluate.memory import length_dependent
from lengthwise.inspect import position_maps
from lengthwise.model.families.layers import attention_layers
from lengthwise.model.families.modules import attention_modules

EXACT = 1e-6
"""Models are in float64, and some encodings have slopes in float32; a wrong position of loud models is off by 1e-2."""
SHARP = (
    "alibi",
    "kerple",
    "fire",
    "t5",
    "shaw",
    "deberta",
    "rope",
    "carope",
    "pope",
    "cable",
    "dapev2",
    "cope",
    "path",
    "sink",
    "learned",
)
"""One of each mechanism, for make test; all of them in make prove."""
TWO_SIDED = [name for name, kind in lw.ENCODINGS.items() if kind.two_sided]


def selected(names, sharp=SHARP):
    return [name if name in sharp else pytest.param(name, marks=pytest.mark.prove) for name in names]


def facts_of(model) -> tuple:
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks), type(m), sorted(vars(m))) for m in model.modules()]
    learning = [(name, p.requires_grad) for name, p in model.named_parameters()]
    return hooks, learning, sorted(model.state_dict()), model.config.to_dict(), model.config._attn_implementation


@torch.no_grad()
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_a_model_fitted_with_its_own_encoding_gives_its_own_logits_and_text_and_comes_back_bit_for_bit(family):
    model = make_model(family, torch.float32)
    side = "right" if family in ENCODERS else "left"
    mask, ids, before = padded(side), tokens(), facts_of(model)
    own = [model(ids).logits, model(ids, attention_mask=mask).logits]
    text = None
    if family in DECODERS:
        text = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert lw.fit(model, "own") is model
    assert_close(model(ids).logits, own[0], 1e-5)
    assert_close(model(ids, attention_mask=mask).logits[mask.bool()], own[1][mask.bool()], 1e-5)
    if text is not None:
        assert (
            model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0) == text
        ).all()
    assert lw.unfit(model) is model
    assert facts_of(model) == before
    assert torch.equal(model(ids).logits, own[0])
    assert torch.equal(model(ids, attention_mask=mask).logits, own[1])


def by_steps(model, ids: Tensor, steps: list[int], cache, **inputs: Tensor) -> Tensor:
    found, first = [], 0
    for count in steps:
        stop = first + count
        now = {"attention_mask": inputs["attention_mask"][:, :stop]} if "attention_mask" in inputs else {}
        found.append(model(ids[:, first:stop], past_key_values=cache, use_cache=True, **now).logits)
        first = stop
    return torch.cat(found, 1)


@torch.no_grad()
@pytest.mark.parametrize("encoding", selected(lw.ENCODINGS))
def test_every_encoding_in_a_llama_with_grouped_heads_decodes_as_it_reads(encoding):
    model = lw.fit(make_model("llama"), encoding)
    make_loud(model)
    ids, mask = tokens(), padded("left")
    whole = model(ids).logits
    assert_close(by_steps(model, ids, [11, 1, 1, 16], hf.DynamicCache(config=model.config)), whole, EXACT)
    whole = model(ids, attention_mask=mask).logits[mask.bool()]
    static = hf.StaticCache(config=model.config, max_cache_len=LENGTH + 5)
    cached = by_steps(model, ids, [20, 9], static, attention_mask=mask)[mask.bool()]
    assert_close(cached, whole, EXACT)
    assert_close(model(ids[1:, 6:]).logits[0], model(ids, attention_mask=mask).logits[1, 6:], EXACT)


@pytest.mark.parametrize(
    ("family", "encoding"),
    [
        pytest.param(family, name, marks=() if name in SHARP else pytest.mark.prove)
        for family, names in (("llama", lw.ENCODINGS), ("bert", TWO_SIDED))
        for name in names
    ],
)
def test_gradients_reach_every_parameter_of_the_encoding(family, encoding):
    model = lw.fit(make_model(family), encoding)
    make_loud(model)
    model(tokens()).logits.square().mean().backward()
    learned = {name: p.grad for name, p in model.named_parameters() if ".lengthwise." in f".{name}"}
    without = [name for name, gradient in learned.items() if gradient is None or not gradient.any()]
    assert not without, without
    assert all(gradient.isfinite().all() for gradient in learned.values())


@torch.no_grad()
@pytest.mark.parametrize("encoding", selected(TWO_SIDED))
def test_padding_behind_a_text_changes_nothing_in_a_fitted_bert(encoding):
    model = lw.fit(make_model("bert"), encoding)
    make_loud(model)
    ids, mask = tokens(), padded("right")
    alone = model(ids[1:, : LENGTH - 6]).logits[0]
    assert_close(model(ids, attention_mask=mask).logits[1, : LENGTH - 6], alone, EXACT)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "gpt2", "opt", "gpt_neox"])
def test_windows_sinks_and_tables_decode_as_they_read(family):
    model = lw.fit(make_model(family), "cable")
    make_loud(model)
    ids, mask = tokens(), padded("left")
    for inputs in ({}, {"attention_mask": mask}):
        real = inputs.get("attention_mask", torch.ones_like(mask)).bool()
        whole = model(ids, **inputs).logits
        for cache in (hf.DynamicCache(config=model.config), hf.StaticCache(config=model.config, max_cache_len=40)):
            assert_close(by_steps(model, ids, [13, 1, 15], cache, **inputs)[real], whole[real], EXACT)


@torch.no_grad()
def test_generate_by_beams_with_an_assistant_and_with_a_static_cache_gives_what_it_gives_without_a_cache():
    model = lw.fit(make_model("llama"), "cable")
    make_loud(model)
    options = {"attention_mask": padded("left"), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    ids = tokens()
    for extra in ({}, {"num_beams": 3}):
        expected = model.generate(ids, **options, **extra, use_cache=False)
        assert (model.generate(ids, **options, **extra) == expected).all()
    expected = model.generate(ids, **options, use_cache=False)
    assert (model.generate(ids, **options, cache_implementation="static", disable_compile=True) == expected).all()
    one = {name: value[:1] if isinstance(value, Tensor) else value for name, value in options.items()}
    assistant = lw.fit(make_model("llama"), "kerple")
    drafted = model.generate(ids[:1], **one, assistant_model=assistant)
    assert (drafted == expected[:1, : drafted.shape[1]]).all()


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mpt"])
def test_packed_documents_do_not_meet(family):
    model = lw.fit(make_model(family), "cable")
    make_loud(model)
    ids = tokens(1)
    positions = torch.cat([torch.arange(12), torch.arange(LENGTH - 12)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(ids[:, :12]).logits, model(ids[:, 12:]).logits], 1)
    assert_close(packed, alone, EXACT)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "bloom", "mpt"])
def test_the_weights_of_attention_are_given_where_they_are_wanted(family):
    model = lw.fit(make_model(family), "alibi")
    weights = model(tokens(), output_attentions=True).attentions
    assert len(weights) == 2
    for each in weights:
        assert_close(each.sum(-1), torch.ones(2, 6, LENGTH, dtype=each.dtype), EXACT)


@torch.no_grad()
def test_positions_do_not_outlive_a_pass_that_was_given_them():
    model = lw.fit(make_model("bloom"), "cable")
    make_loud(model)
    ids = tokens(1)
    expected = model.transformer(ids).last_hidden_state
    model(ids, position_ids=torch.arange(LENGTH)[None] // 2, use_cache=False)
    assert torch.equal(model.transformer(ids).last_hidden_state, expected)


@torch.no_grad()
def test_positions_that_jump_are_refused_where_the_model_makes_a_cache_of_them():
    model, ids = lw.fit(make_model("llama"), "alibi"), tokens(1, 15)
    positions = torch.cat([torch.arange(11), torch.arange(30, 34)])[None]
    with pytest.raises(ValueError, match="position_ids must not jump where there is a cache"):
        model(ids, position_ids=positions)
    alone = model(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(model.train()(ids, position_ids=positions).logits, alone)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_an_explicit_mask_says_all_of_what_is_seen(family):
    model, ids = make_model(family), tokens(1)
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = model(ids, attention_mask=causal).logits
    assert (expected - model(ids).logits).abs().max() > 1e-3
    lw.fit(model, "own")
    assert_close(model(ids, attention_mask=causal).logits, expected, EXACT)
    with pytest.raises(NotImplementedError, match="one explicit mask for all layers, got one for each kind of them"):
        model(ids, attention_mask={"full_attention": causal, "sliding_attention": causal.triu(-4)})


def test_models_that_share_a_config_are_told_so():
    config = hf.LlamaConfig(**LLAMA)
    one, other = hf.LlamaForCausalLM(config), hf.LlamaForCausalLM(config)
    lw.fit(one, "cable")
    with pytest.raises(ValueError, match="its config says 'lengthwise_swapped': it is shared"):
        other(tokens())
    for change in (lambda: lw.fit(other, "cable"), lambda: lw.stretch(other, "rerope:7")):
        with pytest.raises(ValueError, match="give each model a config of its own"):
            change()
    lw.unfit(one)
    assert config._attn_implementation != "lengthwise_swapped"
    other(tokens())


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon-alibi"])
@pytest.mark.parametrize("mask", [None, torch.ones(2, LENGTH, dtype=torch.long)], ids=["plain", "masked"])
def test_a_config_that_is_shared_is_no_silent_loss_of_the_mask(family, mask):
    model = make_model(family, torch.float32)
    other = type(model)(model.config).eval()
    for change in (lambda: lw.fit(model, "alibi"), lambda: lw.accelerate(model)):
        change()
        with pytest.raises(ValueError, match="a model without attention of ours runs under a config with it"):
            other(tokens(), attention_mask=mask)
        lw.unfit(model)
    assert other(tokens(), attention_mask=mask).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_pass_that_was_interrupted_leaves_nothing_behind(family):
    model, ids = lw.fit(make_model(family), "cable"), tokens()
    options = {"attention_mask": padded("left"), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **options)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, :5])
    hook.remove()
    assert torch.equal(model.generate(ids, **options), expected)


SMALL_LLAMA = LLAMA | {"num_hidden_layers": 2, "pad_token_id": 0}
HYBRIDS = {
    "linear attention": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **SMALL_LLAMA,
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            num_experts=0,
            mlp_only_layers=[0, 1],
        )
    ),
    "convolutions": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SMALL_LLAMA, layer_types=["conv", "full_attention"])),
    "outputs that are viewed": lambda: hf.JetMoeForCausalLM(
        hf.JetMoeConfig(
            vocab_size=97,
            hidden_size=48,
            num_hidden_layers=2,
            num_key_value_heads=2,
            kv_channels=8,
            intermediate_size=64,
            max_position_embeddings=64,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_model_with_layers_of_other_kinds_decodes_as_it_reads(kind):
    torch.manual_seed(0)
    model, ids = lw.fit(HYBRIDS[kind]().eval(), "alibi"), tokens(1)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_a_module_that_all_layers_share_is_fitted_once():
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    config = hf.AlbertConfig(**sizes, embedding_size=16, intermediate_size=64, max_position_embeddings=64)
    model, ids = hf.AlbertForMaskedLM(config).eval(), tokens()
    expected = model(ids).logits
    assert len(attention_layers(model)) == 1
    assert_close(lw.fit(model, "own")(ids).logits, expected, 1e-5)


def test_two_passes_before_one_backward_and_checkpointing_change_no_gradient():
    ids, mask = tokens(), padded("left")
    gradients = []
    for checkpointing in (False, True):
        model = lw.fit(make_model("gemma3"), "cable", keep=True)
        make_loud(model)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        first = model(ids, attention_mask=mask).logits[mask.bool()].square().mean()
        second = model(ids[:, :9]).logits.square().mean()
        (first + second).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=float(1e-12 * gradient.abs().max()))


@torch.no_grad()
def test_keeping_its_own_positions_composes_and_layers_can_differ():
    model, ids = make_model("gemma3"), tokens()
    own = model(ids).logits
    rope = attention_layers(model)
    kept = lw.fit(copy.deepcopy(model), "alibi", keep=True)(ids).logits
    listed = [{"encoding": "rope+alibi", "encoding_options": {"rope": dict(layer.options)}} for layer in rope]
    assert_close(lw.fit(copy.deepcopy(model), listed)(ids).logits, kept, EXACT)
    assert (kept - own).abs().max() > 1e-3
    assert_close(
        lw.fit(copy.deepcopy(model), "own,alibi")(ids).logits, lw.fit(model, "alibi", layers=[-1])(ids).logits, EXACT
    )


@torch.no_grad()
def test_a_window_of_a_schedule_hides_what_lies_behind_it():
    model, ids = lw.fit(make_model("llama"), "kerple:3"), tokens(1)
    other = ids.clone()
    other[:, :10] += 1
    assert torch.equal(model(ids).logits[:, 16:], model(other).logits[:, 16:])
    assert not torch.equal(model(ids).logits[:, 13], model(other).logits[:, 13])


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "part"), [("phi", 1.0), ("phi", 0.5), ("gpt_oss", 0.5), ("gpt_oss", 1.0), ("gpt_neox", 0.5)]
)
def test_a_rope_turns_its_own_part_of_the_channels_whatever_part_the_module_turned(family, part):
    torch.manual_seed(0)
    model, ids = MODELS[family]().eval(), tokens()
    make_loud(model)
    lw.fit(model, "rope", part=part)
    by_module = model(ids).logits
    for layer in attention_modules(model).values():
        layer.lengthwise.by_module = None
    assert_close(by_module, model(ids).logits, 1e-5)


@torch.no_grad()
def test_a_table_that_is_replaced_has_no_end_any_more():
    model = lw.fit(make_model("gpt2"), "alibi")
    assert model(tokens(1, 100)).logits.isfinite().all()
    model = lw.fit(make_model("bert"), "alibi")
    ids = tokens(1, 100)
    assert model(ids, token_type_ids=torch.zeros_like(ids)).logits.isfinite().all()


@torch.no_grad()
def test_copies_and_pickles_of_a_fitted_model_are_models_of_their_own():
    model, ids = lw.fit(make_model("llama"), "cable"), tokens()
    make_loud(model)
    expected = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, expected)
        lw.unfit(other)
        assert torch.equal(model(ids).logits, expected)
    assert not torch.equal(other(ids).logits, expected)


def test_freezing_leaves_the_encoding_alone_to_learn():
    model = lw.fit(make_model("gpt2"), "cable", freeze=True)
    assert {".lengthwise." in name for name, p in model.named_parameters() if p.requires_grad} == {True}
    assert all(p.requires_grad for p in lw.unfit(model).parameters())


def test_attention_dropout_is_refused_by_name_unless_it_is_left_out():
    config = hf.BertConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=6, intermediate_size=8
    )
    model = lw.fit(hf.BertForMaskedLM(config).train(), "alibi")
    with pytest.raises(NotImplementedError, match=r"BertSelfAttention trains with attention dropout 0\.1"):
        model(tokens())
    lw.fit(lw.unfit(model), "alibi", attention_dropout="leave out")(tokens()).logits.mean().backward()


@torch.no_grad()
def test_a_fitted_model_can_be_looked_into():
    model = lw.fit(make_model("llama", torch.float32), "alibi")
    values = position_maps(model, tokens(1)).values
    alibi = lw.make("alibi", heads=6, width=48, train_length=64).bias(torch.zeros(1, LENGTH, 48), lw.layout(LENGTH))
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    torch.testing.assert_close(values[:, seen], alibi.dense()[0][:, seen])


def test_a_fitted_model_compiles_without_a_break():
    model, ids = lw.fit(make_model("llama", torch.float32), "cable"), tokens()
    make_loud(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 1e-5)


REFUSED = {
    "no such encoding": (lambda: (make_model("llama"), "cabel"), ValueError, "did you mean 'cable'"),
    "an option": (lambda: (make_model("llama"), "cable", {"bogus": 1}), ValueError, "unknown option 'bogus'"),
    "a limit": (
        lambda: (make_model("llama"), "learned", {"length": 8}),
        ValueError,
        "8 positions, and the model is for 64",
    ),
    "one-sided": (lambda: (make_model("bert"), "fox"), ValueError, "causal attention only"),
    "no window": (lambda: (make_model("mistral"), "path"), ValueError, "cannot have a window"),
    "uneven": (lambda: (make_model("llama"), "none,none,rope"), ValueError, "no multiple of the 3 listed"),
    "a table": (
        lambda: (make_model("gpt2"), "alibi", {"layers": [0]}),
        ValueError,
        "fit all layers, or pass keep=True",
    ),
    "a wide window": (lambda: (make_model("mistral"), "rope:20"), ValueError, "its cache has no others"),
    "layers": (lambda: (make_model("llama"), "rope", {"layers": [2]}), ValueError, "from -2 to 1, got 2"),
    "keep": (lambda: (make_model("llama"), "rope", {"keep": 1}), TypeError, "keep must be True or False, got 1"),
    "our own": (
        lambda: (hf.AutoModelForCausalLM.from_config(lengthwise_config()), "rope"),
        TypeError,
        "has encodings by its config",
    ),
    "no model": (lambda: (torch.nn.Linear(2, 2), "rope"), TypeError, "expected a model of transformers, got a Linear"),
    "own attention": (
        lambda: (hf.GPTJForCausalLM(hf.GPTJConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=2, rotary_dim=4)), "rope"),
        NotImplementedError,
        "GPTJForCausalLM has attention code of its own",
    ),
    "two stacks": (
        lambda: (hf.T5Model(hf.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1)), "rope"),
        NotImplementedError,
        "T5Model has several kinds of attention",
    ),
    "a mask that a module makes": (
        lambda: (hf.DogeForCausalLM(hf.DogeConfig(**SMALL_LLAMA)), "rope"),
        NotImplementedError,
        "DogeAttention makes a mask of its own",
    ),
    "two calls a module": (
        lambda: (hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**SMALL_LLAMA)), "rope"),
        NotImplementedError,
        "DiffLlamaAttention calls attention more than once for the same tokens",
    ),
    "angles that a module makes": (
        lambda: (
            hf.RecurrentGemmaForCausalLM(
                hf.RecurrentGemmaConfig(**SMALL_LLAMA | {"num_hidden_layers": 3}, lru_width=48)
            ),
            "alibi",
        ),
        NotImplementedError,
        "RecurrentGemmaAttention rotates queries and keys by angles that it makes itself",
    ),
    "angles that are no pair": (
        lambda: (hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SMALL_LLAMA, head_dim=8, moe_layers=[])), "alibi"),
        NotImplementedError,
        "Llama4TextAttention must be given its angles as cosine and sine, got one Tensor",
    ),
    "tokens of another name": (
        lambda: (
            hf.MobileBertModel(
                hf.MobileBertConfig(vocab_size=97, hidden_size=48, num_hidden_layers=1, intermediate_size=64)
            ),
            "alibi",
        ),
        NotImplementedError,
        "MobileBertSelfAttention must be given hidden_states, got query_tensor",
    ),
    "a schedule with options": (
        lambda: (make_model("llama"), "rope,none", {"base": 2.0}),
        ValueError,
        "stand in its layers",
    ),
}


def lengthwise_config():
    from lengthwise.model import LengthwiseConfig

    return LengthwiseConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=8)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fitted_is_refused_by_name_and_left_untouched(case):
    make, kind, message = REFUSED[case]
    model, encoding, *options = make()
    before = facts_of(model) if isinstance(model, hf.PreTrainedModel) else None
    with pytest.raises(kind, match=message):
        lw.fit(model, encoding, **(options[0] if options else {}))
    assert before is None or facts_of(model) == before


REMOTE_CODE = """
from transformers import LlamaForCausalLM

class StrangeForCausalLM(LlamaForCausalLM):
    pass
"""


def test_a_model_whose_code_comes_out_of_its_checkpoint_is_refused_and_left_untouched(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = hf.LlamaConfig(**LLAMA, auto_map={"AutoModelForCausalLM": "modeling_strange.StrangeForCausalLM"})
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "strange")
    (tmp_path / "strange/modeling_strange.py").write_text(REMOTE_CODE)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "strange", trust_remote_code=True)
    before = facts_of(model)
    with pytest.raises(NotImplementedError, match="StrangeForCausalLM is code out of a checkpoint"):
        lw.fit(model, "alibi")
    assert facts_of(model) == before


def test_a_stretched_model_is_refused_with_the_way_out():
    model = lw.stretch(make_model("llama"), "rerope:7")
    with pytest.raises(ValueError, match=r"is stretched; take that out first: lw\.unstretch\(model\)"):
        lw.fit(model, "cable")
    lw.fit(lw.unstretch(model), "cable")


def test_a_second_fit_another_implementation_and_a_quantised_cache_are_refused_by_name():
    model = lw.fit(make_model("llama", torch.float32), "cable")
    with pytest.raises(ValueError, match="fitted or accelerated already"):
        lw.fit(model, "alibi")
    cache = hf.DynamicCache(config=model.config)
    cache.layers[0] = type("QuantizedLayer", (type(cache.layers[0]),), {})()
    with pytest.raises(NotImplementedError, match="would round the state"):
        model(tokens(), past_key_values=cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"lw\.unfit\(model\) before"):
        model(tokens())
    model = make_model("llama", torch.float32)
    model.is_quantized = True
    with pytest.raises(NotImplementedError, match="quantised"):
        lw.fit(model, "cable")
    with pytest.raises(ValueError, match="without a fit"):
        lw.unfit(model)


@torch.no_grad()
@pytest.mark.parametrize("family", selected(OWN_CODE, ("bloom", "mpnet")))
def test_families_with_attention_code_of_their_own_decode_as_they_read_and_come_back(family):
    model, ids = make_model(family), tokens()
    sides = {"mpnet": "right"}
    mask, own, before = padded(sides.get(family, "left")), model(ids).logits, facts_of(model)
    lw.fit(model, "kerple" if family == "mpnet" else "cable")
    held = {name: p.clone() for name, p in model.named_parameters() if ".lengthwise." not in name}
    make_loud(model)
    whole = model(ids).logits
    assert (whole - own).abs().max() > 1e-3
    if family == "mpnet":
        assert_close(model(ids, attention_mask=mask).logits[1, :-6], model(ids[1:, :-6]).logits[0], EXACT)
    else:
        assert_close(by_steps(model, ids, [11, 1, 1, 16], hf.DynamicCache(config=model.config)), whole, EXACT)
        whole = model(ids, attention_mask=mask).logits[mask.bool()]
        steps = by_steps(model, ids, [20, 9], hf.DynamicCache(config=model.config), attention_mask=mask)
        assert_close(steps[mask.bool()], whole, EXACT)
        assert_close(model(ids[1:, 6:]).logits[0], model(ids, attention_mask=mask).logits[1, 6:], EXACT)
    lw.unfit(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(held[name])
    assert facts_of(model) == before
    assert torch.equal(model(ids).logits, own)


def test_a_bias_of_a_models_own_is_replaced_as_a_whole_or_not_at_all():
    model = make_model("bloom")
    before = facts_of(model)
    for encoding, options in (("own", {}), ("kerple", {"keep": True})):
        with pytest.raises(NotImplementedError, match="BloomAttention adds a bias of its own"):
            lw.fit(model, encoding, **options)
    with pytest.raises(ValueError, match="fit all layers, got 1 of 2"):
        lw.fit(model, "kerple", layers=[0])
    assert facts_of(model) == before
    with torch.no_grad():
        values = position_maps(lw.fit(make_model("bloom", torch.float32), "alibi"), tokens(1)).values
    alibi = lw.make("alibi", heads=6, width=48, train_length=64).bias(torch.zeros(1, LENGTH, 48), lw.layout(LENGTH))
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    torch.testing.assert_close(values[:, seen], alibi.dense()[0][:, seen])


@pytest.mark.prove
@pytest.mark.parametrize("encoding", ["own", "cable", "kerple"])
def test_a_fitted_model_compiles_to_one_graph_by_inductor(encoding):
    model, ids = lw.fit(make_model("llama", torch.float32), encoding), tokens()
    if encoding != "own":
        make_loud(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        logits = run(ids, use_cache=False).logits
        logits.square().mean().backward()
        gradients.append((logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    assert_close(gradients[1][0], gradients[0][0], 1e-5)
    largest = max(g.abs().max() for g in gradients[0][1].values())
    off = max((gradients[1][1][name] - g).abs().max() for name, g in gradients[0][1].items())
    assert off <= 1e-5 * largest


@torch.no_grad()
@pytest.mark.prove
@pytest.mark.parametrize("encoding", ["own", "cable", "kerple"])
def test_compiled_decoding_with_a_static_cache_is_one_graph_and_reads_as_it_does_without(encoding):
    model, ids = lw.fit(make_model("llama", torch.float32), encoding), tokens(1)
    if encoding != "own":
        make_loud(model)
    whole = model(ids, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = hf.StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    parts = [model(ids[:, :11], past_key_values=cache).logits]
    for place in range(11, LENGTH):
        position = torch.tensor([[place]])
        parts.append(compiled(ids[:, place : place + 1], past_key_values=cache, position_ids=position).logits)
    assert_close(torch.cat(parts, 1), whole, 1e-5)


def test_whether_angles_follow_the_length_is_what_was_fitted_says():
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, rope_parameters=dynamic))
    assert length_dependent(model)
    assert not length_dependent(lw.fit(model, "none"))
    assert length_dependent(lw.fit(lw.unfit(model), "none", layers=[0]))
    assert length_dependent(lw.fit(make_model("gpt2"), "rope", scaling={"type": "dynamic", "factor": 2.0}))
