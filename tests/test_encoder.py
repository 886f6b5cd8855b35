"""Two-sided models: what every encoding must keep there, and what a user of transformers does with them."""

import subprocess
import sys

import pytest
import torch
import transformers
from encoder_kit import CAUSAL_ONLY, MASK, ONE_OF_EACH_KIND, TWO_SIDED, encoder_config, loud_encoder, mask_tokenizer
from model_kit import VOCABULARY, tokens
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

from lengthwise.model import (
    LengthwiseConfig,
    LengthwiseEncoder,
    LengthwiseEncoderConfig,
    LengthwiseForCausalLM,
    LengthwiseForMaskedLM,
    LengthwiseForSequenceClassification,
)
from lengthwise.model.encoder import pool_tokens
from lengthwise.model.export import export
from lengthwise.model.layout import packed_layout
from lengthwise.testing import assert_near


def padded_batch() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Texts of 17, 9 and 13 tokens, padded on either side, and each alone."""
    ids, mask = tokens(3, 17), torch.ones(3, 17, dtype=torch.long)
    mask[1, 9:] = mask[2, :4] = 0
    return ids, mask, [ids[row, mask[row].bool()][None] for row in range(3)]


@pytest.mark.parametrize("encoding", TWO_SIDED)
@torch.no_grad()
def test_padding_packing_and_unpadding_change_nothing(encoding, monkeypatch):
    model = loud_encoder(encoding)
    ids, mask, rows = padded_batch()
    alone = torch.cat([model(row).logits[0] for row in rows])
    calls = []
    monkeypatch.setattr("lengthwise.model.encoder.packed_layout", lambda m: calls.append(1) or packed_layout(m))
    assert_near(model(ids, attention_mask=mask).logits[mask.bool()], alone, "unpadded")
    assert calls, "the padding must be left out"
    looked_at = model(ids, attention_mask=mask, output_hidden_states=True)
    assert_near(looked_at.logits[mask.bool()], alone, "padded")
    assert len(calls) == 1
    packed = torch.cat(rows, 1)
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    assert_near(model(packed, position_ids=positions).logits[0], alone, "packed")


@pytest.mark.parametrize("encoding", ONE_OF_EACH_KIND)
@torch.no_grad()
def test_a_token_sees_both_sides_and_stock_attention_gives_what_ours_gives(encoding):
    model = loud_encoder(encoding)
    ids, mask, _ = padded_batch()
    ours = model(ids, attention_mask=mask).logits[mask.bool()]
    changed = ids.clone()
    changed[:, -1] = 5 + changed[:, -1] % 7
    assert not torch.allclose(model(changed).logits[0, 0], model(ids).logits[0, 0])
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert_near(model(ids, attention_mask=mask).logits[mask.bool()], ours, implementation)


@pytest.mark.parametrize("encoding", CAUSAL_ONLY)
def test_encodings_that_are_causal_only_are_refused_by_name(encoding):
    with pytest.raises(ValueError, match=f"two-sided form, got '{encoding}', which is causal only; known: .*'alibi'"):
        encoder_config(encoding)
    with pytest.raises(ValueError, match=f"got '{encoding}'"):
        encoder_config(None, layers=f"alibi,{encoding}")


@torch.no_grad()
def test_a_window_reaches_as_far_to_either_side():
    model = loud_encoder(None, layers="alibi:5", n_layer=1)
    ids = tokens(1, 17)
    before = model(ids).logits
    for place in range(17):
        changed = ids.clone()
        changed[0, place] = 3 + (changed[0, place] % 90)
        moved = (model(changed).logits != before).any(-1)[0]
        near = (torch.arange(17) - place).abs() < 5
        assert not moved[~near].any()
        assert moved[near].all() or torch.equal(changed, ids)


@pytest.mark.parametrize("encoding", ["cable", "learned"])
def test_the_auto_classes_load_what_was_saved(encoding, tmp_path):
    model, ids = loud_encoder(encoding), tokens()
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(again) is LengthwiseForMaskedLM
    assert torch.equal(again(ids).logits, model(ids).logits)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is LengthwiseEncoder
    assert torch.equal(body(ids).last_hidden_state, model.transformer(ids).last_hidden_state)
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is LengthwiseForSequenceClassification
    with pytest.raises(ValueError, match="type 'lengthwise'; its config says 'lengthwise_encoder'"):
        LengthwiseForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_presets_are_bert_s_sizes():
    with torch.device("meta"):
        base = LengthwiseForMaskedLM(LengthwiseEncoderConfig.preset("base", encoding="learned"))
        bert = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
    blocks = [sum(p.numel() for p in part.parameters()) for part in (base.transformer.h, bert.encoder)]
    assert blocks[0] == blocks[1]
    assert base.lm_head.weight is base.transformer.wte.weight
    with pytest.raises(ValueError, match="unknown preset 'small'; there are 'nano', 'tiny', 'base'"):
        LengthwiseEncoderConfig.preset("small")


def test_the_loss_has_logits_for_labelled_tokens_alone_and_is_that_of_forward():
    model = loud_encoder("cable").double().train()
    ids, mask, _ = padded_batch()
    labels = torch.where((torch.arange(17) % 5 == 1) & mask.bool(), ids, -100)
    wanted = model(ids, attention_mask=mask, labels=labels).loss
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    found = model.loss(ids, labels, attention_mask=mask)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(found, list(model.parameters())), gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))
    with torch.no_grad():
        single = model.loss(ids, labels, attention_mask=mask, reduction="none")
    assert ((single != 0) == (labels != -100)).all()
    with pytest.raises(ValueError, match=r"labels must have the input's shape, \(3, 17\), got \(3, 16\)"):
        model.loss(ids, labels[:, 1:])


@pytest.mark.parametrize("pooling", ["mean", "first"])
@torch.no_grad()
def test_a_class_is_told_from_the_tokens_that_are_not_padding(pooling):
    torch.manual_seed(0)
    model = LengthwiseForSequenceClassification(encoder_config("kerple", pooling=pooling, num_labels=3)).eval()
    ids, mask, rows = padded_batch()
    out = model(ids, attention_mask=mask, labels=torch.tensor([0, 2, 1]))
    assert out.loss.isfinite()
    for row, alone in enumerate(rows):
        assert_near(out.logits[row], model(alone).logits[0], f"text {row}")
    with pytest.raises(ValueError, match="pooling must be 'mean' or 'first', got 'last'"):
        encoder_config("kerple", pooling="last")
    with pytest.raises(ValueError, match="pooling must be"):
        pool_tokens(torch.zeros(1, 2, 3), None, "max")


def test_learned_with_bert_s_attention_weights_gives_bert_s_attention():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=32, vocab_size=VOCABULARY
    )
    bert = transformers.BertModel(config).eval().encoder.layer[0].attention
    ours = loud_encoder("learned", n_layer=1).transformer.h[0].attn
    own = bert.self
    with torch.no_grad():
        for part in bert.parameters():
            part.add_(torch.randn_like(part), alpha=0.4)
        ours.c_attn.weight.copy_(torch.cat([own.query.weight, own.key.weight, own.value.weight]).T)
        ours.c_attn.bias.copy_(torch.cat([own.query.bias, own.key.bias, own.value.bias]))
        ours.c_proj.weight.copy_(bert.output.dense.weight.T)
        ours.c_proj.bias.copy_(bert.output.dense.bias)
        x, mask = torch.randn(3, 17, 24), padded_batch()[1].bool()
        theirs = bert.output.dense(own(x, attention_mask=mask[:, None, None].expand(-1, 1, 17, -1))[0])
        packed = ours(x[mask][None], packed_layout(mask))[0][0]
    assert_near(packed, theirs[mask], "BERT's attention")


@torch.no_grad()
def test_the_fill_mask_pipeline_fills_a_mask_and_names_a_text_without_one():
    model, tokenizer = loud_encoder("cable"), mask_tokenizer()
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")
    best = fill("w5 [MASK] w9 w14", top_k=1)[0]
    ids = torch.tensor([[5, MASK, 9, 14]])
    assert best["token"] == int(model(ids).logits[0, 1].argmax())
    with pytest.raises(Exception, match=r"No mask_token \(\[MASK\]\) found"):
        fill("w5 w9")


def test_trainer_lowers_the_masked_loss(tmp_path):
    torch.manual_seed(0)
    model = LengthwiseForMaskedLM(encoder_config("cable"))
    collator = DataCollatorForLanguageModeling(mask_tokenizer(), mlm_probability=0.3, seed=0)
    data = [{"input_ids": [3 + (7 * i + j) % 11 for j in range(20 - i % 3)]} for i in range(16)]
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=2e-2,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data, data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 1


def test_lora_trains_a_few_weights_and_merges():
    peft = pytest.importorskip("peft")
    model, ids = loud_encoder("kerple"), tokens()
    settings = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, settings)
    adapted(input_ids=ids, labels=ids).loss.backward()
    learning = [p for p in adapted.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in learning:
            parameter.add_(0.1)
        changed = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()
        assert (merged(ids).logits - changed).abs().max() <= 1e-4 * changed.abs().max()


@pytest.mark.parametrize("encoding", ["cable"])
def test_an_encoder_compiles_into_one_graph_and_exports_as_one(encoding):
    torch.compiler.reset()
    model, ids = loud_encoder(encoding, n_layer=1).train(), tokens()
    labels = torch.where(torch.arange(ids.shape[1]) % 5 == 1, ids, -100)
    expected = model.loss(ids, labels)
    found = torch.compile(model.loss, backend="aot_eager", fullgraph=True)(ids, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        sizes = {0: torch.export.Dim("batch", min=1, max=16), 1: torch.export.Dim("length", min=3, max=60)}
        shapes = {"input_ids": sizes}
        model.eval()
        graph = torch.export.export(
            model, (), {"input_ids": tokens(3, 17)}, dynamic_shapes=shapes, strict=False
        ).module()
        assert_near(graph(input_ids=ids).logits, model(ids).logits, encoding)


ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lengthwise", "jaxtyping", "jsonargparse"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModel, AutoModelForMaskedLM
saved = torch.load(sys.argv[1] + "/expected.pt")
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
body = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    found = model(saved["ids"], attention_mask=saved["mask"]).logits[saved["mask"].bool()]
    assert (found - saved["logits"]).abs().max() < 1e-5 * saved["logits"].abs().max()
    assert body(saved["ids"]).last_hidden_state.shape == (3, 17, 24)
print("same")
"""


def test_an_exported_encoder_loads_where_lengthwise_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    model = loud_encoder("cable")
    ids, mask, _ = padded_batch()
    model.save_pretrained(tmp_path / "run")
    out = export(tmp_path / "run", tmp_path / "exported")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.save({"ids": ids, "mask": mask, "logits": logits}, out / "expected.pt")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(out)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same" in done.stdout


def test_a_causal_config_makes_no_encoder():
    assert LengthwiseConfig.causal
    assert not LengthwiseEncoderConfig.causal
    assert LengthwiseEncoderConfig().encoding == "cable"
