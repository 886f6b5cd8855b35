"""Accelerated models give the numbers and the gradients of the models that they were, and the same text."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from fit_kit import assert_close, make_loud, padded, tokens
from inspect_kit import MODELS, SMALL, T5, VOCABULARY

import lengthwise as lw
from lengthwise.inspect import position_maps
from lengthwise.model.families import max_length

GATED = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
CASES = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, **GATED)),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**T5, **GATED)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**T5, **GATED)),
    "t5-encoder": lambda: hf.T5EncoderModel(hf.T5Config(**T5, **GATED)),
    "mpnet": lambda: hf.MPNetForMaskedLM(
        hf.MPNetConfig(
            **SMALL,
            intermediate_size=64,
            max_position_embeddings=66,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    **{name: MODELS[name] for name in ("bloom", "mpt", "falcon-alibi")},
    "falcon-grouped": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**SMALL, alibi=True, multi_query=True, new_decoder_architecture=False)
    ),
    **{name: MODELS[name] for name in ("deberta-v2", "deberta-v2-c2p", "deberta-v2-p2c")},
}
DECODERS = ["bloom", "mpt", "falcon-alibi", "falcon-grouped"]
SEQUENCE_TO_SEQUENCE = ["t5", "mt5", "umt5"]
MORE = ("mpt", "falcon-alibi", "mpnet", "umt5")


def make(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = CASES[name]().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # T5 does not scale its scores.
    make_loud(model, 0.1 if "t5" in name else 0.2)
    return model


def inputs_of(name: str) -> tuple[dict, torch.Tensor]:
    """Padded inputs, and which rows of the output count: neither padding nor, where it is left, what it predicts."""
    ids = tokens()
    mask = padded("left" if name in DECODERS else "right")
    given = {"input_ids": ids, "attention_mask": mask}
    if name in SEQUENCE_TO_SEQUENCE:
        given["decoder_input_ids"] = ids[:, :17]
        return given, torch.ones(2, 17, dtype=torch.bool)
    return given, mask.bool()


def largest_gradient_difference(model, other) -> float:
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, other)]
    assert set(gradients[0]) == set(gradients[1])
    largest = max(g.abs().max() for g in gradients[0].values())
    return float(max((gradients[1][n] - g).abs().max() for n, g in gradients[0].items()) / largest)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_the_same(name):
    model = make(name)
    other = lw.accelerate(copy.deepcopy(model))
    given, counted = inputs_of(name)
    for arguments, rows in (({k: v for k, v in given.items() if k != "attention_mask"}, ...), (given, counted)):
        own, accelerated = (
            m(**arguments, use_cache=False) if name in DECODERS else m(**arguments) for m in (model, other)
        )
        assert_close(accelerated[0][rows], own[0][rows], 1e-5)
    # A loss that a gradient of the real rows alone goes through.
    weight = torch.randn(own[0].shape, generator=torch.Generator().manual_seed(0)) * counted[..., None]
    for output in (own, accelerated):
        (output[0] * weight).sum().backward()
    assert largest_gradient_difference(model, other) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", [*DECODERS, *SEQUENCE_TO_SEQUENCE])
def test_the_same_text_is_generated(name):
    model = make(name)
    other = lw.accelerate(copy.deepcopy(model))
    given, _ = inputs_of(name)
    given.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if name in SEQUENCE_TO_SEQUENCE:
        options["decoder_start_token_id"] = 0
    for extra in ({}, {"num_beams": 2}):
        texts = [m.generate(**given, **options, **extra) for m in (model, other)]
        assert (texts[0] == texts[1]).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_the_same_text_is_generated_with_a_static_cache(name):
    model = lw.accelerate(make(name))
    given, _ = inputs_of(name)
    given.pop("decoder_input_ids")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["decoder_start_token_id"] = 0
    static = model.generate(**given, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, model.generate(**given, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CASES if "falcon" not in name])
def test_the_weights_of_attention_are_those_of_the_model_as_it_was(name):
    # Falcon gives those of its eager attention, which adds the bias twice.
    model, (given, _) = make(name), inputs_of(name)
    given.pop("attention_mask")
    other = lw.accelerate(copy.deepcopy(model))
    if name in ("t5", "mt5", "umt5", "t5-encoder"):
        model.set_attn_implementation("eager")
    own, accelerated = (m(**given, output_attentions=True) for m in (model, other))
    kinds = [kind for kind in own if kind.endswith("attentions") and own[kind]]
    assert kinds
    for kind in kinds:
        for weights, expected in zip(accelerated[kind], own[kind], strict=True):
            assert_close(weights, expected, 1e-5)


@torch.no_grad()
def test_what_it_was_comes_back_bit_for_bit_and_copies_are_their_own(tmp_path):
    for name in CASES:
        model = make(name)
        given, _ = inputs_of(name)
        own, classes = model(**given)[0], [type(module) for module in model.modules()]
        state = {id(module): sorted(vars(module)) for module in model.modules()}
        other = pickle.loads(pickle.dumps(copy.deepcopy(lw.accelerate(model))))
        accelerated = model(**given)[0]
        assert torch.equal(other(**given)[0], accelerated)
        assert torch.equal(lw.unfit(model)(**given)[0], own)
        assert [type(module) for module in model.modules()] == classes
        assert {id(module): sorted(vars(module)) for module in model.modules()} == state
        assert torch.equal(other(**given)[0], accelerated)


@torch.no_grad()
def test_an_accelerated_mpt_goes_on_beyond_its_configured_length():
    model = make("mpt")
    ids = tokens(1, 100)
    longer = copy.deepcopy(model)
    longer.config.max_seq_len = 128
    expected = longer(ids).logits
    assert max_length(model) == 64
    lw.accelerate(model)
    assert max_length(model) is None
    assert_close(model(ids).logits, expected, 1e-5)


def test_checkpointed_layers_have_the_same_gradients():
    for reentrant in (True, False):
        models = [make("t5"), lw.accelerate(make("t5"))]
        given, _ = inputs_of("t5")
        for model in models:
            model.train()
        models[1].gradient_checkpointing_enable({"use_reentrant": reentrant})
        models[1].enable_input_require_grads()
        for model in models:
            model(**given).logits.square().mean().backward()
        assert largest_gradient_difference(*models) <= 1e-5


def test_what_has_no_bias_to_describe_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM has no bias that could be described"):
        lw.accelerate(MODELS["llama"]())
    with pytest.raises(NotImplementedError, match="it has RoPE"):
        lw.accelerate(MODELS["falcon-rope"]())
    model = lw.accelerate(make("bloom"))
    with pytest.raises(ValueError, match="accelerated already"):
        lw.accelerate(model)
    with pytest.raises(TypeError, match="expected a model of transformers"):
        lw.accelerate(torch.nn.Linear(2, 2))


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["bloom", "deberta-v2", "t5", *(pytest.param(n, marks=pytest.mark.prove) for n in MORE)]
)
def test_an_accelerated_model_is_looked_into_as_it_was(name):
    model, given = make(name), {"input_ids": tokens(1)}
    if name in SEQUENCE_TO_SEQUENCE:
        given["decoder_input_ids"] = tokens(1)
    own = position_maps(model, **given, layer="all")
    accelerated = position_maps(lw.accelerate(model), **given, layer="all")
    torch.testing.assert_close(accelerated.values, own.values, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_attention_dropout_is_refused_by_name_unless_it_is_left_out():
    config = hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=1, n_head=6, attention_dropout=0.1)
    model = lw.accelerate(hf.BloomForCausalLM(config).train())
    with pytest.raises(NotImplementedError, match=r"BloomAttention trains with attention dropout 0\.1"):
        model(tokens())
    lw.accelerate(lw.unfit(model), attention_dropout="leave out")(tokens()).logits.mean().backward()
