"""Optimizers of a run: what each steps, at which rate, and that a run that was stopped goes on as if it was not."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Muon
from train_kit import assert_same_run, in_processes, small_config

from lengthwise.data import documents
from lengthwise.distributed import joined
from lengthwise.encodings import Encoding
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.runs import Run
from lengthwise.study import StudyConfig
from lengthwise.study.record import TrainingOutcome
from lengthwise.study.tune import SEED, rate_ladder, with_tuned_rates
from lengthwise.train import TrainConfig, train
from lengthwise.train.config import _tuned_table
from lengthwise.train.distributed import World
from lengthwise.train.loop import SummedLoss
from lengthwise.train.optimizers import Optimizers


def small_model(encoding="t5-clamped", **sizes):
    return LengthwiseForCausalLM(
        LengthwiseConfig.preset("nano", encoding=encoding, vocab_size=64, **({"n_layer": 2} | sizes))
    )


def with_gradients(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_muon_steps_the_three_matrices_of_a_projection_apart_and_the_rest_is_adamw_s():
    model = with_gradients(small_model())
    config = TrainConfig(optimizer="muon", learning_rate=0.01, encoding_learning_rate=0.5).resolved()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    Optimizers(config, model).step(0.004)
    name, width = "transformer.h.0.attn.c_attn.weight", model.config.n_embd
    parts = [torch.nn.Parameter(before[name][:, i * width : (i + 1) * width].clone()) for i in range(3)]
    for i, part in enumerate(parts):
        part.grad = gradients[name][:, i * width : (i + 1) * width].clone()
    Muon(parts, lr=0.004, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    now = dict(model.named_parameters())
    assert torch.equal(now[name], torch.cat([part.detach() for part in parts], 1))
    # AdamW's first step moves every number by the rate: a norm's by the model's, the table's by its own.
    norm = "transformer.h.1.ln_1.weight"
    assert (now[norm] - before[norm]).abs().mean().item() == pytest.approx(0.004, rel=1e-3)
    tables = [n for n, p in now.items() if "encoding" in n]
    assert tables
    for table in tables:
        assert (now[table] - before[table]).abs().max().item() == pytest.approx(0.004 * 0.5 / 0.01, rel=1e-3)


def muon_step(weight, gradient, *, rate):
    """Muon's first step in float64: Newton-Schulz's iteration, of which torch computes the products in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (0.05 + 0.95 * 0.05) * gradient.double()  # Nesterov's momentum of 0.95, after one gradient
    x = x.T if len(x) > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x if x.shape == weight.shape else x.T
    return weight.double() * (1 - 0.1 * rate) - 0.2 * max(weight.shape) ** 0.5 * rate * x


def test_a_sharded_step_of_muon_is_that_of_torch_s_muon_in_one_process():
    """Where shards are summed the sums are rounded to bfloat16 once more: twice the error that one process makes."""

    def compare():
        with joined(torch.device("cpu"), again=""):
            torch.manual_seed(0)
            model = with_gradients(small_model(n_layer=1, n_embd=48, n_head=3))
            config = TrainConfig(optimizer="muon", learning_rate=0.01, encoding_learning_rate=0.5).resolved()
            matrices = model.block_matrices()
            wide = {name: matrices[p] for name, p in model.named_parameters() if p in matrices}
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            world = World(dist.get_rank(), 2, torch.device("cpu"), sharded=True)
            world.wrap(SummedLoss(model, None, world), model.transformer.h, torch.float32)
            sharded = dict(model.named_parameters())
            for name, p in sharded.items():
                if isinstance(p, DTensor):
                    p.grad = distribute_tensor(gradients[name], p.device_mesh, p.placements)
            Optimizers(config, model).step(0.004)
            assert len(wide) == 4
            for name, widths in wide.items():
                shape = before[name].shape
                pieces = [x.split(widths or [shape[1]], 1) for x in (before[name], gradients[name])]
                now = sharded[name].full_tensor().split(widths or [shape[1]], 1)
                assert sharded[name].to_local().shape == (shape[0] // 2, shape[1]), "a shard of it"
                for weight, gradient, found in zip(*pieces, now, strict=True):
                    plain, halves = torch.nn.Parameter(weight.clone()), list(map(torch.nn.Parameter, weight.chunk(2)))
                    plain.grad = gradient.clone()
                    for half, own in zip(halves, gradient.chunk(2), strict=True):
                        half.data, half.grad = half.data.clone(), own.clone()
                    Muon([plain, *halves], lr=0.004, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
                    exact = muon_step(weight, gradient, rate=0.004)
                    allowed = 2 * (plain - exact).norm() + 2**-23 * exact.norm()
                    assert (found - exact).norm() <= allowed, name
                    assert (torch.cat(halves) - exact).norm() > 4 * allowed, "each shard as a matrix of its own"

    assert in_processes(compare, 2) == [0, 0]


def test_muon_has_all_matrices_of_the_blocks_and_nothing_of_an_encoding():
    model = small_model("dapev2")
    matrices = model.block_matrices()
    own = {p for part in model.modules() if isinstance(part, Encoding) for p in part.parameters()}
    assert own
    assert not own & matrices.keys()
    assert len(matrices) == 4 * model.config.n_layer
    assert sum(widths is not None for widths in matrices.values()) == model.config.n_layer
    model.block_matrices = dict
    with pytest.raises(ValueError, match="needs matrices in the model's blocks, got none"):
        Optimizers(TrainConfig(optimizer="muon").resolved(), model)


@pytest.mark.parametrize(
    ("world", "sharded"), [(1, False), (2, False), (2, True)], ids=["one process", "two, DDP", "two, sharded"]
)
def test_a_run_with_muon_that_was_stopped_is_the_run_that_was_not(tmp_path, world, sharded):
    options = {"optimizer": "muon", "encoding": "t5-clamped", "batch_tokens": 4 * 33, "sharded": sharded}
    options |= {"learning_rate": 0.01, "encoding_learning_rate": 0.05}
    options |= {"steps": 6, "checkpoint_every": 3, "evaluate_every": 3}
    whole = small_config(tmp_path, "whole", **options)
    assert in_processes(lambda: train(whole), world) == [0] * world

    def stopped():
        config = small_config(tmp_path, "stopped", **options)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lengthwise.train.loop.micro_batches", failing_after(4))
                train(config)
        except InterruptedError:
            return

    assert in_processes(stopped, world) == [0] * world
    assert not Run(tmp_path / "stopped").is_finished
    again = small_config(tmp_path, "stopped", **options, resume=True)
    assert in_processes(lambda: train(again), world) == [0] * world
    assert_same_run(Run(tmp_path / "stopped"), Run(tmp_path / "whole"))


def rows_of_text(folder):
    """Enough documents that a part of the training text has some."""
    path = folder / "rows.jsonl"
    rows = [{"text": f"{row} by {row * row % 97} is {row + row * row % 97} " * 6} for row in range(300)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def failing_after(steps):
    from lengthwise.train.loop import micro_batches

    def batches(config, data, step, world):
        if step > steps:
            raise InterruptedError
        return micro_batches(config, data, step, world)

    return batches


def test_an_encoding_s_rate_is_tuned_or_keeps_its_ratio_to_the_model_s(monkeypatch):
    nano = TrainConfig(encoding="sinusoidal").resolved()
    double = TrainConfig(encoding="sinusoidal", learning_rate=2 * nano.learning_rate).resolved()
    assert double.encoding_learning_rate == pytest.approx(2 * nano.encoding_learning_rate)
    assert double.final_learning_rate == pytest.approx(2 * nano.final_learning_rate), "a low rate must not rise"
    paper = TrainConfig(preset="tiny").resolved()
    assert (paper.optimizer, paper.encoding_learning_rate) == ("adamw", paper.learning_rate)
    other = TrainConfig(optimizer="adamw", encoding="t5-clamped").resolved()
    # 1.2e-2 was chosen with Muon in view; AdamW has what nano had when it knew nothing else.
    assert (other.learning_rate, other.final_learning_rate, other.encoding_learning_rate) == (3e-3, 3e-4, 3e-3)
    assert TrainConfig(optimizer="adamw", objective="mlm").resolved().learning_rate == 3e-3
    assert TrainConfig(optimizer="adamw", learning_rate=1e-3).resolved().encoding_learning_rate == 1e-3
    monkeypatch.setattr(
        "lengthwise.train.config._tuned_table", lambda: {"nano": {"chosen": {"fire": {"encoding_learning_rate": 0.7}}}}
    )
    assert TrainConfig(encoding="fire").resolved().encoding_learning_rate == 0.7
    with pytest.raises(ValueError, match="optimizer must be 'adamw' or 'muon', got 'sgd'"):
        TrainConfig(optimizer="sgd").resolved()


def test_what_options_are_chosen_on_is_neither_trained_on_nor_reported(tmp_path):
    corpus = rows_of_text(tmp_path)
    parts = {split: list(documents(corpus, split)) for split in ("train", "fitting", "validation", "held-out")}
    assert sorted(parts["fitting"] + parts["validation"]) == sorted(parts["train"])
    assert parts["validation"]
    assert not set(parts["validation"]) & set(parts["fitting"])
    with pytest.raises(ValueError, match="leave one of them out"):
        TrainConfig(tuning=True, held_out=corpus).resolved()


def test_every_encoding_has_as_many_tries_and_the_best_is_chosen(tmp_path, monkeypatch):
    def train_here(waiting, *, out, **options):
        assert out == tmp_path / "study" / "tuning", "the logs of tries must not be taken for those of runs"
        return {run.name: TrainingOutcome(1.0, 1, 1, failure_of(run)) for run in waiting}

    def failure_of(run):
        if run.name.endswith("-4"):
            return "exit code 2: loss and gradient must be finite"
        train(run.config)
        return None

    monkeypatch.setattr("lengthwise.study.tune.train_runs", train_here)
    training = small_config(tmp_path, optimizer="muon", data=rows_of_text(tmp_path), final_learning_rate=None)
    config = StudyConfig(
        out=str(tmp_path / "study"), encodings=["t5-clamped", "none"], tune_steps=4, training=training, jobs=1
    )
    ladders = {name: [run.resolved for run in rate_ladder(config, name)] for name in config.encodings}
    assert len({run.learning_rate for run in ladders["t5-clamped"]}) == 1
    assert len({run.encoding_learning_rate for run in ladders["t5-clamped"]}) == 6
    assert len({run.learning_rate for run in ladders["none"]}) == 6
    tuned = with_tuned_rates(config)
    content = json.loads((tmp_path / "study" / "tuning.json").read_text(), parse_constant=pytest.fail)
    assert (content["data"], content["seed"]) == (training.data, SEED), "what a report says of a test"
    for name in config.encodings:
        # The fourth rung diverges, so that the two below the third are tried.
        third, diverged, *below = content["tries"][name]
        assert (diverged["loss"], diverged["failure"]) == (None, "exit code 2: loss and gradient must be finite")
        lowest = [run.encoding_learning_rate for run in ladders[name][:3]]
        assert [result["encoding_learning_rate"] for result in (*below, third)] == lowest
        best = min([third, *below], key=lambda result: result["loss"])
        assert tuned.rates[name]["encoding_learning_rate"] == best["encoding_learning_rate"]
        assert tuned.rates[name]["learning_rate"] == best["learning_rate"]
    monkeypatch.setattr("lengthwise.study.tune.origin", lambda: {"command": "a later one"})
    assert with_tuned_rates(config) == tuned
    again = json.loads((tmp_path / "study" / "tuning.json").read_text())
    assert again == content, "with the certificate of the tries, which were not repeated"
    assert [len(result["born"]) for result in content["tries"]["none"] if result["loss"]] == [1, 1, 1]
    with pytest.raises(ValueError, match=r"is finished: .* steps: 4 then, 5 now"):
        with_tuned_rates(dataclasses.replace(config, tune_steps=5))


def test_the_rates_of_the_package_are_the_best_of_all_their_tries():
    for table in _tuned_table().values():
        for name, tries in table["tries"].items():
            assert len(tries) == 4, f"an equal budget: {name}"
            earlier = [one for sweep in table["earlier_tries"] for one in sweep["tries"].get(name, [])]
            best, chosen = min(tries + earlier, key=lambda one: one["loss"]), table["chosen"][name]
            for rate in ("learning_rate", "encoding_learning_rate"):
                assert chosen[rate] == best[rate], name
