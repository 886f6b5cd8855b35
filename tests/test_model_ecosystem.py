"""Trainer, pipeline, PEFT and DDP take the model as they take any other."""

import gc

import pytest
import torch
import torch.distributed as dist
from model_kit import CASES, VOCABULARY, loud_model, make_config, tokens
from torch.nn.parallel import DistributedDataParallel
from train_kit import in_processes
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

from lengthwise.model import LengthwiseForCausalLM

TRAINED = ["kerple", "cable", "dapev2-cable", "learned", "chunks"]


@pytest.mark.parametrize("case", TRAINED)
def test_trainer_lowers_the_loss_and_its_checkpoint_resumes(case, tmp_path):
    torch.manual_seed(0)
    model = LengthwiseForCausalLM(make_config(case))
    data = [{"input_ids": row, "labels": row} for row in tokens(8, 17)]
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=3e-2,
        logging_steps=1,
        save_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    again = Trainer(model=LengthwiseForCausalLM(make_config(case)), args=settings, train_dataset=data)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.state.global_step == 12


def word_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{n}": n for n in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", padding_side="left"
    )


@pytest.mark.parametrize("case", ["cable", "kerple", "rope", "learned", "cope"])
def test_the_text_generation_pipeline_writes_the_same_alone_and_in_a_batch(case):
    model = loud_model(case)
    write = pipeline("text-generation", model=model, tokenizer=word_tokenizer(), device="cpu")
    prompts = ["w3 w14 w15 w9", "w26 w5", "w35 w8 w97 w93 w23 w84"]
    settings = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    alone = [write(prompt, **settings)[0]["generated_text"] for prompt in prompts]
    batch = [found[0]["generated_text"] for found in write(prompts, batch_size=3, **settings)]
    assert alone == batch
    assert all(alone)


@pytest.mark.parametrize("case", CASES)
def test_lora_trains_a_few_weights_and_merges(case, tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = loud_model(case), tokens()
    settings = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, settings)
    adapted(ids, labels=ids).loss.backward()
    learning = [p for p in adapted.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learning)
    with torch.no_grad():
        for parameter in learning:
            parameter.add_(0.1)
        changed = adapted(ids).logits
        merged = adapted.merge_and_unload()
        assert (merged(ids).logits - changed).abs().max() <= 1e-4 * changed.abs().max()


def assert_trains_on_two_processes(cases):
    def step():
        dist.init_process_group("gloo")
        for case in cases:
            model = DistributedDataParallel(loud_model(case).train())
            ids = tokens(2, 17, seed=dist.get_rank())
            for _ in range(2):
                model.zero_grad()
                model(ids, labels=ids).loss.backward()
            total = torch.stack([p.grad.double().sum() for p in model.parameters()])
            both = [torch.empty_like(total) for _ in range(2)]
            dist.all_gather(both, total)
            assert torch.equal(*both), case
        # The wrapped model goes before the group, and the group before the process: else its threads may outlive them.
        del model
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()

    assert in_processes(step, 2, patience=600) == [0, 0]


def test_ddp_waits_for_no_unused_parameter():
    assert_trains_on_two_processes(["cable", "fire", "dapev2-cable"])


@pytest.mark.prove
def test_ddp_waits_for_no_unused_parameter_of_any_encoding():
    assert_trains_on_two_processes(CASES)
