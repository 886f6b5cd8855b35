"""Training itself: what a run learns, what it writes, and that nothing but its config decides a number."""

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from train_kit import assert_same_run, in_processes, numbers, small_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from lengthwise.cli import main
from lengthwise.data.tokens import document_positions
from lengthwise.model import PRESETS, LengthwiseForCausalLM
from lengthwise.runs import Run, RunWriter
from lengthwise.train import RECIPES, TrainConfig, loop, train
from lengthwise.train.logging import ProgressLog
from lengthwise.train.setup import dry_run
from lengthwise.views import load_maps

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    return folder, train(
        small_config(folder, steps=36, learning_rate=0.01, maps_every=12, checkpoint_every=12, evaluate_every=12)
    )


def test_a_run_learns_and_says_so_line_by_line(finished):
    lines = finished[1].metrics
    assert [line["step"] for line in lines] == list(range(1, 37))
    assert all({"step", "loss", "tokens", "seconds"} <= line.keys() for line in lines)
    assert lines[-1]["tokens"] == 36 * 5 * 33
    assert lines[0]["loss"] == pytest.approx(torch.tensor(320.0).log().item(), abs=0.3), "a guess among 320 tokens"
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.5
    assert [line["step"] for line in lines if "held_out" in line] == [12, 24, 36]
    assert lines[-1]["held_out"].keys() == {"33", "66", "132"}


def test_the_final_folder_is_a_normal_checkpoint_with_its_tokenizer(finished):
    model = AutoModelForCausalLM.from_pretrained(finished[1].final)
    tokenizer = AutoTokenizer.from_pretrained(finished[1].final)
    ids = tokenizer("the reader of a long text", return_tensors="pt")["input_ids"]
    assert isinstance(model, LengthwiseForCausalLM)
    assert model.loss(ids, ids).item() < 3.5
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 256


def test_the_position_maps_are_snapped_as_they_move(finished):
    run = finished[1]
    assert [path.name for path in run.maps] == [f"step-{step:08d}.safetensors" for step in (0, 12, 24, 36)]
    first, last = (load_maps(run.maps[i]) for i in (0, -1))
    assert list(first.layers) == [0, 1]
    assert first.layer(1).values.shape == (12, 33, 33)
    assert not torch.equal(first.layer(1).values.nan_to_num(), last.layer(1).values.nan_to_num())


def test_the_kept_config_gives_the_same_numbers_again_with_snapshots_or_without(finished):
    folder, run = finished
    again = TrainConfig(**(run.config | {"maps_every": 0}), out=str(folder / "again"))
    assert_same_run(train(again), run)
    assert {field.name for field in dataclasses.fields(TrainConfig)} - run.config.keys() == {
        "out",
        "resume",
        "dry_run",
        "hardware",
        "token_store",
    }
    assert None not in [run.config[name] for name in dataclasses.asdict(RECIPES["nano"])]


def test_lines_after_the_last_checkpoint_are_cut_on_resume(tmp_path):
    config = small_config(tmp_path, maps_every=3)

    def die():
        log = RunWriter.log
        RunWriter.log = lambda self, line: (log(self, line), line["step"] == 7 and os.kill(os.getpid(), 9))
        train(config)

    in_processes(die)
    assert [line["step"] for line in Run(config.out).metrics] == list(range(1, 8))
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 1.')
    assert [line["step"] for line in Run(config.out).metrics] == list(range(1, 8)), "half a line is not read"
    train(dataclasses.replace(config, resume=True))
    assert_same_run(Run(config.out), train(small_config(tmp_path, "whole", maps_every=3)))
    assert len(Run(config.out).maps) == 5
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_documents_kept_apart_are_read_as_if_each_were_alone(tmp_path):
    ids = torch.tensor([[5, 6, 256, 7, 8, 9, 256, 4]])
    assert document_positions(ids, 256).tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    together, apart = (
        numbers(train(small_config(tmp_path, f"run-{flag}", steps=2, warmup=0, separate_documents=flag)))
        for flag in (False, True)
    )
    assert together[0]["loss"] != apart[0]["loss"]


@pytest.mark.parametrize("encoding", ["rope", "learned", "t5-clamped", "kerple+dapev2", "none"])
def test_any_encoding_trains_in_bfloat16_too(tmp_path, encoding):
    half = train(
        small_config(tmp_path, "half", encoding=encoding, steps=2, warmup=0, precision="bfloat16", maps_every=2)
    )
    full = train(small_config(tmp_path, "full", encoding=encoding, steps=2, warmup=0, recompute=True))
    assert half.metrics[-1]["loss"] == pytest.approx(full.metrics[-1]["loss"], abs=0.1)
    assert {p.dtype for p in LengthwiseForCausalLM.from_pretrained(half.final).parameters()} == {torch.float32}
    assert load_maps(half.maps[0]).quantity == ("scores" if encoding in ("rope", "learned", "none") else "bias")


def test_tensorboard_has_what_the_metrics_have(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(small_config(tmp_path, steps=3, warmup=1, tensorboard=True))
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in run.metrics])
    assert "held_out/66" in events.Tags()["scalars"]


@pytest.mark.prove
def test_a_compiled_model_gives_the_losses_of_one_that_is_not(tmp_path):
    plain, compiled = (
        train(small_config(tmp_path, f"run-{flag}", encoding="kerple", steps=3, warmup=0, compile=flag))
        for flag in (False, True)
    )
    for ours, theirs in zip(compiled.metrics, plain.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


def test_a_run_that_appears_while_data_is_prepared_is_not_taken_over(tmp_path, monkeypatch):
    prepare = loop.make_objective

    def prepare_while_another_trains(config):
        monkeypatch.undo()
        train(small_config(tmp_path, encoding="cable", steps=2, warmup=0))
        return prepare(config)

    monkeypatch.setattr(loop, "make_objective", prepare_while_another_trains)
    with pytest.raises(FileExistsError, match="a new run needs a folder of its own"):
        train(small_config(tmp_path, encoding="alibi", steps=2, warmup=0))
    assert Run(tmp_path / "run").config["encoding"] == "cable"


def test_a_task_can_be_trained_on(tmp_path):
    assert train(small_config(tmp_path, data="task:copy:33", steps=2, warmup=0)).is_finished


def test_a_checkpoint_has_no_pickles(finished):
    for checkpoint in finished[1].checkpoints:
        assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors", ".json"}


def test_a_terminal_has_a_bar_and_anything_else_a_line_now_and_then(monkeypatch, capsys, caplog):
    line = {"step": 5, "loss": 1.25, "held_out": {"64": 1.5}}
    with caplog.at_level("INFO"):
        progress = ProgressLog(start=4, steps=9, every=3, quiet=False)
        progress.add(line, tokens=1000)
        progress.add({"step": 6, "loss": 1.0}, tokens=1000)
        progress.add({"step": 7, "loss": 1.0}, tokens=1000)
    assert [record.message[:10] for record in caplog.records] == ["step 5 of ", "step 6 of "]
    assert "loss 1.250, held-out at 64 1.500" in caplog.text
    assert "tokens/s" in caplog.text
    assert "left" in caplog.text
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = ProgressLog(start=4, steps=9, every=3, quiet=False)
    bar.add(line, tokens=1000)
    bar.close()
    assert "5/9" in (said := capsys.readouterr().err)
    assert "loss 1.250" in said


def test_a_run_tells_whether_it_is_written_or_finished(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=r"a run must be a folder with config\.yaml"):
        Run(folder)
    with RunWriter(folder) as writer:
        writer.write_config({"a": 1})
        run = Run(folder)
        assert run.is_being_written
        assert not run.is_finished
        with pytest.raises(FileNotFoundError, match=r"must be finished .* is being trained"):
            _ = run.final
    assert not run.is_being_written
    assert run.config == {"a": 1}
    with pytest.raises(FileNotFoundError, match="resume it with lengthwise train --resume"):
        _ = run.final


def test_every_preset_has_a_recipe():
    assert RECIPES.keys() == PRESETS.keys()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_papers_runs_are_parsed_and_planned(path, capsys):
    main(["train", "--config", str(path), "--encoding", "none", "--dry-run"])
    said = capsys.readouterr().out
    size = path.stem.removesuffix("-512").split("-")[-1]
    parameters = {"tiny": "44,670,976", "small": "123,689,472", "medium": "353,822,720", "base": "123,689,472"}[size]
    assert f"model     {size} with none: {parameters} parameters, 0 of them the encoding's" in said
    steps = {"tiny": 9150, "small": 4575, "medium": 2745}[size] if "wikitext" in path.stem else 19_073
    assert f"in {steps:,} steps" in said


def test_the_commands_of_the_page_on_training_can_be_given(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs/rope/final").mkdir(parents=True)
    (tmp_path / "runs/rope/final/config.json").write_text('{"model_type": "lengthwise"}')
    page = (ROOT / "docs/train.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    commands = [shlex.split(line.split("train ", 1)[1]) for block in blocks for line in block.splitlines()]
    for command in commands:
        main(["train", *command, "--dry-run"])
    assert capsys.readouterr().out.count("model     ") == len(commands) == 14
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/train.md", "exec"), {})


def test_a_dry_run_counts_what_the_encoding_learns():
    assert "221,472 of them the encoding's" in dry_run(TrainConfig(preset="small", encoding="cable"))


def test_the_layers_of_the_docs_fit_the_default_preset():
    (layers,) = re.findall(
        r"^```yaml\n(layers:.*?)^```", (ROOT / "docs/train.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert "of the first 4+0..512" in dry_run(TrainConfig(**yaml.safe_load(layers)))


def test_options_of_the_command_line_go_before_the_file_and_print_config_shows_both(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("encoding: kerple\nsteps: 7\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(tmp_path / "a.yaml"), "--steps", "9", "--print-config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["encoding"], shown["steps"], shown["preset"]) == ("kerple", 9, "nano")
