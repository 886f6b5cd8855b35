"""GPT-2's own weights: the same logits with learned positions, and a start for every other encoding."""

import json

import pytest
import torch
from model_kit import CASES, LENGTH, VOCABULARY, loud_model, make_loud, tokens
from transformers import GPT2Config, GPT2LMHeadModel

from lengthwise.model import LengthwiseForCausalLM, convert_gpt2
from lengthwise.testing import assert_near


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    make_loud(model)
    return model


@torch.no_grad()
def test_learned_positions_with_gpt2_weights_give_gpt2_logits(gpt2, tmp_path):
    ids = tokens()
    gpt2.save_pretrained(tmp_path)
    for source in (gpt2, tmp_path, str(tmp_path)):
        model = convert_gpt2(source)
        assert_near(model(ids).logits, gpt2(ids).logits, "logits")
        assert torch.equal(model.transformer.wpe.weight, gpt2.transformer.wpe.weight)
    assert model.state_dict().keys() == gpt2.state_dict().keys()
    new = model.generate(ids[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(new, gpt2.generate(ids[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_any_encoding_can_start_from_gpt2_and_keeps_all_other_weights(gpt2, case):
    name, options = CASES[case]
    if case == "learned-long":
        pytest.skip("GPT-2's own table has another length")
    model = convert_gpt2(gpt2, encoding=name, encoding_options=options)
    assert model.config.encoding == name
    ours, theirs = model.state_dict(), gpt2.state_dict()
    kept = {weight: value for weight, value in theirs.items() if "wpe" not in weight}
    assert all(torch.equal(ours[weight], value) for weight, value in kept.items())
    assert all(".encoding." in weight or ".wpe." in weight for weight in ours.keys() - kept.keys())
    assert model(tokens()).logits.shape == (2, LENGTH, VOCABULARY)
    again = convert_gpt2(model, encoding="alibi")
    assert all(torch.equal(again.state_dict()[weight], value) for weight, value in kept.items())


@torch.no_grad()
def test_a_converted_model_keeps_its_dtype_and_its_encoding_float32(gpt2):
    model = convert_gpt2(gpt2.bfloat16(), encoding="kerple")
    assert model.dtype == torch.bfloat16
    assert model.transformer.h[0].attn.encoding.raw_p.dtype == torch.float32


def test_norms_after_a_rotation_do_not_go_to_an_encoding_without_one():
    model = loud_model("rope", qk_norm="rms", qk_norm_place="after")
    with pytest.raises(ValueError, match=r"a norm after the rotation needs an encoding that rotates .* got 'alibi'"):
        convert_gpt2(model, encoding="alibi")


def test_what_is_no_gpt2_is_not_converted(gpt2, tmp_path):
    with pytest.raises(TypeError, match="GPT2Model"):
        convert_gpt2(gpt2.transformer)
    gpt2.config.activation_function = "relu"
    with pytest.raises(ValueError, match="relu"):
        convert_gpt2(gpt2)
    gpt2.config.activation_function = "gelu_new"
    gpt2.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gpt2.*convert_gpt2"):
        LengthwiseForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(gpt2.state_dict(), tmp_path / "pytorch_model.bin")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
    with pytest.raises(ValueError, match="pickle"):
        convert_gpt2(tmp_path)
