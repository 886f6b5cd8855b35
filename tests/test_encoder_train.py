"""Masked and contrastive training: what is drawn, that a resumed run is the run that was not, and what is refused."""

import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from train_kit import assert_same_run, in_processes, small_config
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from lengthwise.cli import main
from lengthwise.data.retrieval import Document, Pair, RetrievalError, pairs_hash, training_pairs
from lengthwise.data.tokenizers import load_tokenizer, surrounding_tokens, with_mask_token, with_start_token
from lengthwise.evaluate.retrieval import text_vectors
from lengthwise.model import LengthwiseEncoder, LengthwiseForMaskedLM
from lengthwise.runs import Run, RunWriter
from lengthwise.testing import assert_near
from lengthwise.train import TrainConfig, train
from lengthwise.train.contrastive import ContrastiveObjective
from lengthwise.train.distributed import join_processes
from lengthwise.train.loop import SummedLoss, make_objective, micro_batches
from lengthwise.train.objectives import MaskedTokens
from lengthwise.train.setup import dry_run

RULE = MaskedTokens(mask=257, vocabulary=258, special=(256, 257))


def test_a_share_of_every_sequence_is_chosen_and_80_10_10_of_it_masked_replaced_and_left():
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (400, 100)))
    ids[:, ::10] = 256
    read, labels = RULE.draw(ids, 0, seed=3)
    chosen = labels != -100
    assert (chosen.sum(1) == 15).all()
    assert RULE.targets(100) == 15
    assert dataclasses.replace(RULE, rate=0.3).targets(100) == 30
    assert not (chosen & (ids == 256)).any(), "ends of documents are not predicted"
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(read[~chosen], ids[~chosen])
    masked, same = (read == 257)[chosen].double().mean(), (read == ids)[chosen].double().mean()
    # Of 6,000 draws; four standard deviations.
    assert masked.item() == pytest.approx(0.8 + 0.1 / 258, abs=4 * (0.8 * 0.2 / 6000) ** 0.5)
    assert same.item() == pytest.approx(0.1 + 0.1 / 258, abs=4 * (0.1 * 0.9 / 6000) ** 0.5)


def test_what_is_drawn_depends_on_a_sequence_s_number_and_on_nothing_else():
    ids = torch.arange(60).view(3, 20)
    whole = RULE.draw(ids, 7, seed=1)
    later = RULE.draw(ids[2:], 9, seed=1)
    for a, b in zip(whole, later, strict=True):
        assert torch.equal(a[2:], b)
    assert not torch.equal(RULE.draw(ids, 8, seed=1)[1], whole[1])
    few = torch.full((1, 20), 256)
    few[0, 4] = 3
    assert (RULE.draw(few, 0, seed=0)[1] != -100).sum() == 3, "special tokens where there are too few others"


def test_a_masked_run_that_was_killed_is_the_run_that_was_not(tmp_path):
    options = {"objective": "mlm", "encoding": "cable", "separate_documents": True}
    whole = train(small_config(tmp_path, "whole", **options))

    def die():
        log = RunWriter.log
        RunWriter.log = lambda self, line: (log(self, line), line["step"] == 7 and os.kill(os.getpid(), 9))
        train(small_config(tmp_path, "killed", **options))

    in_processes(die)
    assert not Run(tmp_path / "killed").is_finished
    again = train(small_config(tmp_path, "killed", **options, resume=True))
    assert_same_run(again, whole)
    assert whole.config["objective"] == "mlm"
    model, tokenizer = (cls.from_pretrained(whole.final) for cls in (AutoModelForMaskedLM, AutoTokenizer))
    assert isinstance(model, LengthwiseForMaskedLM)
    assert tokenizer.mask_token == "<|mask|>"
    assert tokenizer.decode(tokenizer("the <|mask|> of")["input_ids"]) == "the <|mask|> of"


def test_a_masked_run_learns_and_two_processes_learn_the_same(tmp_path):
    options = {"objective": "mlm", "encoding": "alibi", "steps": 40, "learning_rate": 0.02, "batch_tokens": 6 * 33}
    options |= {"evaluate_every": 40, "evaluate_lengths": [33, 66]}
    run = train(small_config(tmp_path, "one", **options))
    losses = [line["loss"] for line in run.metrics]
    assert losses[0] == pytest.approx(torch.tensor(320.0).log().item(), abs=0.3), "a guess among 320 tokens"
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    assert run.metrics[-1]["held_out"].keys() == {"33", "66"}
    both = small_config(tmp_path, "two", **(options | {"steps": 4, "evaluate_every": 4}))
    assert in_processes(lambda: train(both), 2) == [0, 0]
    assert [line["loss"] for line in Run(tmp_path / "two").metrics][:1] == pytest.approx(losses[:1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mlm", "encoding": "fox"}, "'fox', which is causal only"),
        ({"objective": "mlm", "preset": "small"}, "unknown preset 'small'; known: 'nano', 'tiny', 'base'"),
        ({"objective": "mlm", "mask_rate": 0.0}, "mask_rate must be a number above 0 and at most 1, got 0.0"),
        ({"objective": "masked"}, "unknown objective 'masked'; known: 'causal', 'mlm', 'contrastive'"),
        ({"objective": "contrastive"}, "must start from a trained encoder, got none; give --start-from RUN"),
        (
            {"objective": "contrastive", "start_from": "x", "encoding": "cable"},
            "--start-from decides the model .* --enc",
        ),
        (
            {"objective": "contrastive", "start_from": "x", "batch_tokens": 128, "hard_negatives": 0},
            "needs negatives, got one pair a step and --hard-negatives 0",
        ),
        (
            {"objective": "contrastive", "start_from": "x", "micro_batch": 4},
            "micro_batch must be at least 32, got 4",
        ),
    ],
)
def test_options_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        dry_run(TrainConfig(**options))


def test_a_run_that_is_older_than_an_option_can_be_resumed(tmp_path):
    config = small_config(tmp_path).resolved()
    older = {name: value for name, value in config.stored().items() if name not in ("objective", "mask_rate")}
    config.check_resumes(older)
    with pytest.raises(ValueError, match="objective: 'causal' then, 'mlm' now"):
        dataclasses.replace(config, objective="mlm").check_resumes(older)


def test_a_tokenizer_of_somebody_else_must_bring_its_mask_token(tmp_path):
    load_tokenizer("bytes").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"needs a tokenizer with a mask token, got that of .*plain"):
        train(small_config(tmp_path, objective="mlm", tokenizer=str(tmp_path / "plain")))
    with_mask_token(load_tokenizer("bytes"), "bytes").save_pretrained(tmp_path / "masked")
    run = train(small_config(tmp_path, objective="mlm", tokenizer=str(tmp_path / "masked"), steps=1, warmup=0))
    assert run.is_finished


def write_pairs(path, rows: int = 100) -> str:
    words = [f"{a}{b}" for a in "bdfgklmn" for b in ("ab", "ir", "on", "um", "et")]

    def text(i: int, size: int) -> str:
        return " ".join(words[(i * 7 + j * (1 + i % 3)) % len(words)] for j in range(size))

    lines = [
        {"query": text(i, 3), "positive": text(i, 12), "negatives": [text(i + 1, 12), text(i + 2, 12)]}
        for i in range(rows)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def contrastive_config(tmp_path, name: str = "pairs", **changes: object) -> TrainConfig:
    start = tmp_path / "start"
    if not Run.is_run(start):
        train(small_config(tmp_path, "start", objective="mlm", encoding="cable", steps=2, warmup=0))
    options = {"data": write_pairs(tmp_path / "pairs.jsonl"), "start_from": str(start), "objective": "contrastive"}
    options |= {"length": 24, "batch_tokens": 8 * 24, "micro_batch": 8, "steps": 10, "warmup": 2, "keep": 2}
    options |= {"optimizer": "adamw", "learning_rate": 5e-4, "final_learning_rate": 5e-5, "out": str(tmp_path / name)}
    options |= {"checkpoint_every": 4, "evaluate_every": 5}
    return TrainConfig(**(options | changes))


@pytest.mark.parametrize(("pooling", "processes"), [("mean", 2), ("first", 1)])
def test_contrastive_training_brings_queries_to_their_documents_and_resumes(tmp_path, pooling, processes):
    config = contrastive_config(tmp_path, pooling=pooling)
    assert in_processes(lambda: train(config), processes) == [0] * processes
    whole = Run(config.out)
    losses = [line["loss"] for line in whole.metrics]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), "every step has other pairs"
    assert whole.metrics[-1]["held_out"].keys() == {"24"}
    stopped = contrastive_config(tmp_path, "stopped", pooling=pooling)

    def die():
        log = RunWriter.log
        RunWriter.log = lambda self, line: (log(self, line), line["step"] == 6 and os.kill(os.getpid(), 9))
        train(stopped)

    in_processes(die, processes)
    assert not Run(stopped.out).is_finished
    assert in_processes(lambda: train(dataclasses.replace(stopped, resume=True)), processes) == [0] * processes
    assert_same_run(Run(stopped.out), whole)
    model = AutoModel.from_pretrained(whole.final)
    assert isinstance(model, LengthwiseEncoder)
    assert model.config.pooling == pooling
    assert json.loads((whole.final / "modules.json").read_text())[0]["path"] == ""
    assert json.loads((whole.final / "1_Pooling/config.json").read_text())["pooling_mode_cls_token"] == (
        pooling == "first"
    )
    tokenizer = AutoTokenizer.from_pretrained(whole.final)
    assert surrounding_tokens(tokenizer) == (([256], []) if pooling == "first" else ([], []))


def test_two_processes_have_the_loss_and_gradients_of_one_with_all_pairs(tmp_path):
    config = contrastive_config(tmp_path, batch_tokens=7 * 24, hard_negatives=2)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["negatives"] = row["negatives"][: number % 3]  # parts of other sizes, in queries and in negatives
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    resolved = config.resolved()

    def gradients(name: str) -> None:
        with join_processes(resolved) as world:
            objective = make_objective(resolved)
            model = objective.make_model().double()  # a sum that nearly cancels has no digits left in float32
            summed = world.wrap(SummedLoss(model, objective, world), model.h, torch.float32).train()
            ((inputs, _),) = micro_batches(resolved, objective, 1, world)
            loss = summed(*inputs)
            (loss * world.size).backward()
            total = world.sum(loss.detach().clone())
            held_out = objective.held_out(model).losses(summed, world, torch.float32)
            values = {"loss": total, "held out": torch.tensor(held_out["24"])}
            if world.is_first:
                torch.save(values | {name: p.grad for name, p in model.named_parameters()}, tmp_path / name)

    assert in_processes(lambda: gradients("one")) == [0]
    assert in_processes(lambda: gradients("two"), 2) == [0, 0]
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert_near(two[name], value, name)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_final_folder_loads_in_sentence_transformers_as_it_is(tmp_path, pooling):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed: retrieval")
    run = train(contrastive_config(tmp_path, pooling=pooling, steps=3, warmup=0))
    theirs = library.SentenceTransformer(str(run.final), device="cpu")
    texts = ["bab dir fon", "a longer text " * 9, "x"]
    model, tokenizer = AutoModel.from_pretrained(run.final), AutoTokenizer.from_pretrained(run.final)
    ours = text_vectors(model.eval(), [tokenizer(text)["input_ids"] for text in texts], pooling=pooling)
    assert np.abs(theirs.encode(texts) - ours.numpy()).max() < 1e-5


def test_pairs_of_a_file_are_split_by_queries_and_bad_ones_are_named(tmp_path):
    name = write_pairs(tmp_path / "pairs.jsonl", rows=100)
    (tmp_path / "pairs.jsonl").write_text((tmp_path / "pairs.jsonl").read_text() * 3)
    train_part, held_out = (training_pairs(name, split) for split in ("train", "held-out"))
    assert len(train_part) + len(held_out) == 300
    assert 0 < len(held_out) < 60
    assert not {pair.query for pair in train_part} & {pair.query for pair in held_out}
    assert pairs_hash(train_part) != pairs_hash(held_out)
    assert all(isinstance(pair, Pair) and len(pair.negatives) == 2 for pair in train_part)
    (tmp_path / "bad.jsonl").write_text('{"query": "a", "positive": ""}\n')
    with pytest.raises(RetrievalError, match=r"query and positive, and a list of negatives if any, .* line 1"):
        training_pairs(str(tmp_path / "bad.jsonl"))
    with pytest.raises(RetrievalError, match=r"must be 'stdlib' or a .jsonl file"):
        training_pairs("fineweb-edu")


def test_a_query_that_is_longer_than_the_encoder_is_cut_to_its_end(tmp_path):
    start = {"objective": "mlm", "encoding": "learned", "steps": 1, "warmup": 0}
    train(small_config(tmp_path, "start", **start))
    config = contrastive_config(tmp_path, steps=1, warmup=0, checkpoint_every=1, evaluate_every=1)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row | {"query": row["query"] * 9}) for row in rows))
    assert train(config).is_finished


def test_no_training_query_of_the_standard_library_stands_in_its_document():
    pairs = training_pairs("stdlib")
    assert len(pairs) > 1000
    assert not [pair.query for pair in pairs if pair.query in " ".join(pair.positive.text.split())]


class FixedVectors(torch.nn.Module):
    """A vector a token, whatever stands around it."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))

    def forward(self, ids, attention_mask):
        return SimpleNamespace(last_hidden_state=self.vectors[ids])


ALONE = SimpleNamespace(gather_rows=lambda rows: (rows, 0))


def batch_loss(objective, pairs) -> float:
    return ContrastiveObjective.loss(objective, FixedVectors(), *objective.batch(pairs), world=ALONE).item()


def test_a_query_s_own_document_is_not_its_negative(tmp_path):
    objective = make_objective(contrastive_config(tmp_path).resolved())
    a, b, c = (Document(name, f"{name} text") for name in "abc")
    pairs = [Pair("first", a, (c,)), Pair("second", b, (Document("other", a.text),))]
    scores = cosines(objective, ["first", "second"], [a, b, c, a])
    # The last document is the first query's own, and a negative of the second.
    wanted = torch.logsumexp(scores[0, :3], 0) - scores[0, 0] + torch.logsumexp(scores[1], 0) - scores[1, 1]
    assert batch_loss(objective, pairs) == pytest.approx(wanted.item(), rel=1e-5)


def cosines(objective, queries, documents) -> torch.Tensor:
    """Divided by the temperature."""
    vectors, encoder, length = FixedVectors().vectors, objective.encoder, objective.config.length
    texts = [encoder.query(query) for query in queries], [encoder.document(d, length).tolist() for d in documents]
    means = [torch.stack([vectors[ids].mean(0) for ids in part]) for part in texts]
    return torch.nn.functional.cosine_similarity(means[0][:, None], means[1], dim=-1) / objective.config.temperature


def test_cosines_are_in_full_precision_under_autocast(tmp_path):
    objective = make_objective(contrastive_config(tmp_path).resolved())
    pairs = objective.pairs[:8]
    whole = batch_loss(objective, pairs)
    with torch.autocast("cpu", torch.bfloat16):
        assert batch_loss(objective, pairs) == pytest.approx(whole, rel=1e-6)


def test_held_out_batches_are_as_large_as_those_of_training(tmp_path):
    objective = make_objective(contrastive_config(tmp_path).resolved())
    objective.held_out_pairs = objective.pairs[:21]
    assert [len(batch) for batch in objective.held_out(None).batches] == [8, 8]
    objective.held_out_pairs = objective.pairs[:5]
    assert [len(batch) for batch in objective.held_out(None).batches] == [5], "the only one"


def test_first_pooling_puts_a_token_before_every_text():
    tokenizer = with_start_token(load_tokenizer("bytes"))
    assert tokenizer("ab")["input_ids"] == [256, 97, 98]
    assert with_start_token(tokenizer)("a")["input_ids"] == [256, 97]


def test_the_command_trains_masked_tokens_from_a_config(tmp_path, capsys, monkeypatch):
    config = dataclasses.asdict(small_config(tmp_path, steps=2, warmup=0))
    words = ["train", "--objective", "mlm", "--mask-rate", "0.3", "--encoding", "kerple", "--dry-run"]
    words += ["--data", config["data"], "--tokenizer", "bytes", "--out", config["out"]]
    main(words)
    assert "nano with kerple" in capsys.readouterr().out
