"""A fitted model in files: whole, as an adapter, through Trainer and PEFT, and never silently the model it was."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from fit_kit import assert_close, make_loud, make_model, tokens
from safetensors.torch import load_file

import lengthwise as lw
from lengthwise.data import load_tokenizer
from lengthwise.model import fit_files
from lengthwise.model.fit_files import mark_config

SCHEDULE = [{"encoding": "learned+cable"}, {"encoding": "learned+rope", "encoding_options": {"rope": {"base": 500.0}}}]

FRESH = """
import sys, torch, lengthwise as lw
from safetensors.torch import save_file
torch.set_num_threads(1)
out = {}
for folder in sys.argv[2:]:
    model = lw.load(folder).eval()
    with torch.no_grad():
        out[folder] = model(torch.load(sys.argv[1] + ".ids", weights_only=True)).logits
save_file(out, sys.argv[1])
"""


def fitted(family: str = "llama", encoding: object = "cable"):
    model = lw.fit(make_model(family, torch.float32), encoding)
    make_loud(model)
    return model


def in_a_fresh_process(tmp_path, folders) -> dict[str, torch.Tensor]:
    out = str(tmp_path / "logits")
    torch.save(tokens(), out + ".ids")
    subprocess.run([sys.executable, "-c", FRESH, out, *map(str, folders)], check=True)
    return load_file(out)


CASES = [("llama", SCHEDULE), ("bert", "alibi+sink")]
EVERY = [("llama", name) for name in lw.ENCODINGS]
EVERY += [("bert", name) for name, kind in lw.ENCODINGS.items() if kind.two_sided]


@torch.no_grad()
@pytest.mark.parametrize("cases", [CASES, pytest.param(EVERY, marks=pytest.mark.prove)], ids=["two", "all"])
def test_a_fresh_process_gives_the_same_logits(tmp_path, cases):
    expected = {}
    for number, (family, encoding) in enumerate(cases):
        model = fitted(family, encoding)
        model.save_pretrained(tmp_path / str(number))
        expected[str(tmp_path / str(number))] = model(tokens()).logits
    found = in_a_fresh_process(tmp_path, expected)
    for folder, logits in expected.items():
        assert torch.equal(found[folder], logits), folder


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_plain_reload_fails_and_says_what_to_do(tmp_path, family):
    model = fitted(family)
    model.save_pretrained(tmp_path)
    automatic = hf.AutoModelForCausalLM if family == "llama" else hf.AutoModelForMaskedLM
    for kind in (type(model), automatic, hf.AutoModel):
        with pytest.raises(Exception, match=r"lengthwise\.load"):
            kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_the_tokenizer_of_a_fitted_folder_is_loaded_with_the_config_of_the_model(tmp_path, family):
    fitted(family, "alibi").save_pretrained(tmp_path)
    load_tokenizer("bytes").save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"lengthwise\.load"):
        hf.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path, config=lw.load(tmp_path).config)
    assert tokenizer("abc").input_ids == [97, 98, 99]


def test_a_config_without_a_width_that_is_known_is_named_before_anything_is_written(tmp_path, monkeypatch):
    model = fitted()
    monkeypatch.setattr(fit_files, "WIDTHS", ("d_model", "dim"))
    with pytest.raises(NotImplementedError, match=r"one of d_model, dim, got LlamaConfig with none.*lw\.save_adapter"):
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_once_unfitted_a_model_is_saved_as_it_always_was(tmp_path):
    model = lw.unfit(fitted())
    model.save_pretrained(tmp_path)
    hf.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected the folder of a fitted model"):
        lw.load(tmp_path)


@torch.no_grad()
def test_an_adapter_goes_into_the_model_it_was_made_for_and_into_no_other(tmp_path):
    model = fitted("llama", SCHEDULE)
    lw.save_adapter(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"lengthwise.json", "lengthwise.safetensors"}
    expected = model(tokens()).logits
    base = lw.unfit(model)
    assert torch.equal(lw.load(tmp_path, base)(tokens()).logits, expected)
    with pytest.raises(ValueError, match="fitted or accelerated already"):
        lw.load(tmp_path, base)
    other = make_model("qwen3", torch.float32)
    with pytest.raises(ValueError, match="model_type llama, got one with qwen3"):
        lw.load(tmp_path, other)
    with pytest.raises(ValueError, match=r"an adapter needs its model"):
        lw.load(tmp_path)
    stored = json.loads((tmp_path / "lengthwise.json").read_text())
    stored["fit"]["encoding"] = [{"encoding": "kerple"}]
    (tmp_path / "lengthwise.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="must be those of its entry"):
        lw.load(tmp_path, lw.unfit(base))
    assert not any("lengthwise" in name for name in base.state_dict())


def test_a_torn_adapter_is_refused_in_words_and_leaves_the_model_plain(tmp_path):
    model = fitted()
    lw.save_adapter(model, tmp_path)
    weights = tmp_path / "lengthwise.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match="expected a whole safetensors file, got"):
        lw.load(tmp_path, lw.unfit(model))
    assert not any("lengthwise" in name for name in model.state_dict())


def test_an_accelerated_model_has_no_adapter(tmp_path):
    with pytest.raises(ValueError, match="got BloomForCausalLM that is accelerated"):
        lw.save_adapter(lw.accelerate(make_model("bloom")), tmp_path)


@torch.no_grad()
def test_a_second_process_that_saves_too_leaves_the_mark_as_it_is(tmp_path):
    model = fitted()
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    for first in (False, True):
        model.save_pretrained(tmp_path, is_main_process=first)
        assert torch.equal(lw.load(tmp_path)(tokens()).logits, expected)
    before = (tmp_path / "config.json").read_text()
    mark_config(tmp_path, {}, "hidden_size")
    assert (tmp_path / "config.json").read_text() == before


@torch.no_grad()
def test_the_body_of_a_fitted_model_is_saved_as_a_fitted_model(tmp_path):
    model = fitted()
    model.model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"lengthwise\.load"):
        hf.AutoModel.from_pretrained(tmp_path)
    body = lw.load(tmp_path)
    assert torch.equal(body(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
    with pytest.raises(NotImplementedError, match=r"call model\.push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)


def test_the_blocks_of_the_page_run_in_order():
    scope: dict[str, object] = {}
    page = (Path(__file__).parents[1] / "docs/any_model.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "any_model.md", "exec"), scope)


def test_a_folder_that_is_none_is_refused(tmp_path):
    for arguments in ((tmp_path / "none",), (tmp_path, make_model("llama"))):
        with pytest.raises(ValueError, match="expected"):
            lw.load(*arguments)


def test_the_trainer_trains_saves_and_goes_on(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 12)]

    def trainer(steps: int) -> hf.Trainer:
        torch.manual_seed(0)
        options = hf.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=1, report_to=[], use_cpu=True, learning_rate=1e-2, disable_tqdm=True
        )
        return hf.Trainer(fitted(), options, train_dataset=rows)

    whole = trainer(2)
    before = whole.model.model.layers[0].self_attn.lengthwise.encoding.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    whole.train()
    after = whole.model.model.layers[0].self_attn.lengthwise.encoding.state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert_close(lw.load(tmp_path / "checkpoint-2")(tokens()).logits, whole.model.eval()(tokens()).logits, 1e-6)
    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, tensor in resumed.model.state_dict().items():
        torch.testing.assert_close(tensor, whole.model.state_dict()[name])


def test_lora_beside_it_trains_saves_and_merges(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lengthwise"], init_lora_weights=False)
    adapted = peft.get_peft_model(lw.fit(make_model("llama", torch.float32), "cable"), config)
    learning = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("lengthwise" in name for name in learning)
    assert all("lora" in name or "lengthwise" in name for name in learning)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    before = adapted(tokens()).logits
    adapted(tokens()).logits.square().mean().backward()
    optimizer.step()
    trained = adapted(tokens()).logits
    assert not torch.equal(trained, before)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(lw.fit(make_model("llama", torch.float32), "cable"), tmp_path)
    assert_close(again(tokens()).logits, trained, 1e-6)
    assert_close(again.merge_and_unload()(tokens()).logits, trained, 1e-5)


@torch.no_grad()
def test_the_adapter_of_a_model_that_peft_trains_has_the_trained_weights(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lengthwise"])
    adapted = peft.get_peft_model(lw.fit(make_model("llama", torch.float32), SCHEDULE), config)
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    lw.save_adapter(adapted, tmp_path)
    again = lw.load(tmp_path, make_model("llama", torch.float32))
    assert_close(again(tokens()).logits, adapted(tokens()).logits, 1e-6)
