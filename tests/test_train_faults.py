"""What can go wrong in a run, what is left of it then, and what its user reads."""

import dataclasses
import errno
import os
import re
import resource
import shutil
import signal
import threading

import pytest
import yaml
from train_kit import assert_same_run, in_processes, numbers, small_config

from lengthwise.cli import main
from lengthwise.runs import Run, RunWriter
from lengthwise.train import loop, train
from lengthwise.train.distributed import World


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to."""
    return train(small_config(tmp_path_factory.mktemp("whole")))


def at_step(step, do, monkeypatch):
    """Do something as a step's line is written."""
    log = RunWriter.log

    def logged(self, line):
        log(self, line)
        if line["step"] == step:
            do()

    monkeypatch.setattr(RunWriter, "log", logged)


def stop_after(step, config, monkeypatch):
    """A run that a signal ended early."""
    with monkeypatch.context() as patch:
        at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        with pytest.raises(loop.Stopped):
            train(config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_ends_a_run_with_a_checkpoint_and_the_shells_exit_code(whole, tmp_path, monkeypatch, capsys, number):
    config = small_config(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in dataclasses.asdict(config).items() if v is not None}))
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(6, lambda: os.kill(os.getpid(), number), patch)
        with pytest.raises(SystemExit) as ended:
            main(["train", "--config", str(path)])
    assert ended.value.code == 128 + number
    said = capsys.readouterr().err
    assert (
        f"stopped after step 7 of 11, with a checkpoint; continue with: lengthwise train --resume --out {config.out}"
        in said
    )
    assert signal.getsignal(number) == handler
    assert Run(config.out).checkpoints[-1].name == "step-00000007"
    main(["train", "--resume", "--out", config.out])
    assert_same_run(Run(config.out), whole)
    assert [call["first_step"] for call in Run(config.out).born] == [1, 8]


def test_a_run_may_be_trained_outside_the_main_thread(tmp_path):
    thread = threading.Thread(target=train, args=(small_config(tmp_path, steps=2, warmup=0),))
    thread.start()
    thread.join()
    assert Run(tmp_path / "run").is_finished


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "seal"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(whole, tmp_path, monkeypatch, caplog, damage):
    config = small_config(tmp_path)
    stop_after(8, config, monkeypatch)
    before, newest = Run(config.out).checkpoints[-2:]
    weights = next(newest.glob("*.safetensors"))
    content = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(content[:-99] + bytes([content[-99] ^ 1]) + content[-98:])
    elif damage == "truncate":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        weights.unlink()
    else:
        (newest / "seal.json").write_text('{"sha256": {"../../config.yaml": "0"}}')
    train(dataclasses.replace(config, resume=True))
    assert f"checkpoint {newest} is damaged: " in caplog.text
    assert "falling back to the one before it" in caplog.text
    assert before.name == "step-00000008"
    assert_same_run(Run(config.out), whole)


def test_resuming_where_there_is_no_run_begins_one_and_says_so_and_what_is_not_used(tmp_path, caplog):
    config = small_config(tmp_path, "mistyped", resume=True, hardware={"devices": 2}, mask_rate=0.3)
    with caplog.at_level("INFO"):
        assert train(config).is_finished
    assert f"there is no run in {config.out} to resume: a new one begins at the first step" in caplog.text
    for words in ("--hardware is for --dry-run", "--mask-rate is for --objective mlm"):
        assert caplog.text.count(f"{words}: it changes nothing of this training") == 1
    caplog.clear()
    train(config)
    assert "no run" not in caplog.text


def test_without_one_whole_checkpoint_nothing_is_resumed(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    stop_after(2, config, monkeypatch)
    for checkpoint in Run(config.out).checkpoints:
        (checkpoint / "seal.json").write_text("{")
    with pytest.raises(ValueError, match=r"must have an intact checkpoint, .* all are damaged, .* its seal cannot be"):
        train(dataclasses.replace(config, resume=True))


def test_a_finished_run_whose_checkpoints_were_removed_stays_as_it_is(tmp_path):
    config = small_config(tmp_path, steps=3, warmup=1, maps_every=1)
    run = train(config)
    shutil.rmtree(run.folder / "checkpoints")
    before = [run.metrics, run.maps]
    assert len(before[0]) == 3
    train(dataclasses.replace(config, resume=True))
    assert [run.metrics, run.maps] == before


def test_a_disk_that_is_full_leaves_the_checkpoints_before_it_and_says_so(whole, tmp_path, capfd):
    config = small_config(tmp_path)

    def fill():
        log = RunWriter.log

        def logged(self, line):
            log(self, line)
            if line["step"] == 8:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        RunWriter.log = logged
        train(config)

    assert in_processes(fill) == [1]
    said = capfd.readouterr().err
    assert f"OSError: the checkpoint of step 8 could not be written to {config.out}" in said
    assert "Checkpoints before it are whole. Make room, then: lengthwise train --resume" in said
    assert [path.name for path in Run(config.out).checkpoints] == ["step-00000004"]
    train(dataclasses.replace(config, resume=True))
    assert_same_run(Run(config.out), whole)


def test_a_loss_that_is_not_a_number_ends_the_run_and_is_not_kept(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    forward = loop.SummedLoss.forward

    def broken(self, *arguments):
        loss = forward(self, *arguments)
        return loss * float("nan") if len(Run(config.out).metrics) == 6 and self.training else loss

    monkeypatch.setattr(loop.SummedLoss, "forward", broken)
    with pytest.raises(
        FloatingPointError, match=r"got loss nan .* at step 7.* last good checkpoint is .*step-00000004"
    ):
        train(config)
    assert len(Run(config.out).metrics) == 6
    assert [path.name for path in Run(config.out).checkpoints] == ["step-00000004"]


def test_a_run_whose_losses_are_read_now_and_then_is_the_same_run(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(World, "reads_for_free", False)
    assert_same_run(train(small_config(tmp_path, log_every=3)), whole)
    # A loss that is not a number is seen later, and the lines before it are there.
    forward, calls = loop.SummedLoss.forward, []

    def broken(self, *arguments):
        calls.append(self.training)
        return forward(self, *arguments) * (float("nan") if sum(calls) == 10 else 1)

    monkeypatch.setattr(loop.SummedLoss, "forward", broken)
    config = small_config(tmp_path, "broken", log_every=3)
    with pytest.raises(FloatingPointError, match=r"loss nan .* at step 10.* checkpoint is .*step-00000008"):
        train(config)
    assert numbers(Run(config.out)) == numbers(whole)[:9]


def test_two_runs_in_one_folder_are_refused_while_and_after(tmp_path):
    config = small_config(tmp_path, steps=2, warmup=0)
    with RunWriter(config.out), pytest.raises(BlockingIOError, match="which another process is writing to"):
        train(config)
    train(config)
    with pytest.raises(FileExistsError, match=r"which has a run; choose another --out, or add --resume"):
        train(config)
    before = (Run(config.out).final / "model.safetensors").stat().st_mtime_ns
    assert train(dataclasses.replace(config, resume=True)).is_finished
    assert (Run(config.out).final / "model.safetensors").stat().st_mtime_ns == before


def test_a_run_is_resumed_as_it_was_started_or_not_at_all(tmp_path, monkeypatch):
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("the crow sat in a tree, and the fox under it " * 5)
    config = small_config(tmp_path, held_out=str(held_out), evaluate_lengths=[33])
    stop_after(2, config, monkeypatch)
    again = dataclasses.replace(config, resume=True)
    with pytest.raises(ValueError, match=r"another seed: 1337 then, 7 now, steps: 11 then, 12 now; leave these out"):
        train(dataclasses.replace(again, steps=12, seed=7))
    before = held_out.read_text()
    held_out.write_text("the fox sat in a tree, and the crow under it " * 5)
    with pytest.raises(ValueError, match=r"with the held-out data it was started with; '.*held-out.txt' has changed"):
        train(again)
    assert len(Run(config.out).metrics) == 3, "nothing was removed"
    held_out.write_text(before)
    (tmp_path / "corpus/new.txt").write_text("one more")
    with pytest.raises(ValueError, match=r"resumed with the data it was started with; .* has changed since"):
        train(again)


def test_a_config_of_another_version_is_refused(tmp_path, monkeypatch, capsys):
    config = small_config(tmp_path)
    with pytest.raises(ValueError, match="the config must be of version 2, got 3"):
        train(dataclasses.replace(config, version=3))
    stop_after(2, config, monkeypatch)
    path = tmp_path / "run/config.yaml"
    path.write_text(path.read_text().replace("version: 2", "version: 3\nnovelty: 3"))
    with pytest.raises(SystemExit, match="the run's config must be of version 2, got 3"):
        main(["train", "--resume", "--out", config.out])


def test_a_config_cannot_bring_objects(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("out: !!python/object/apply:os.system ['touch /tmp/owned']\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(path)])
    assert ended.value.code == 2
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(path.read_text())
    with pytest.raises(ValueError, match="YAML"):
        _ = Run(run).config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": ""}, "--out must be the run's folder, got ''"),
        ({"preset": "huge"}, "unknown preset 'huge'; known: 'nano', 'tiny'"),
        ({"encoding": "cabel"}, "did you mean 'cable'"),
        ({"length": 1}, "length must be an int, 2 or more, got 1"),
        ({"batch_tokens": 100}, "whole sequences of 33, got 100; use 99"),
        ({"steps": 0}, "steps must be a positive int, got 0"),
        ({"warmup": 11}, "warmup must end before the last step, 11, got 11"),
        ({"learning_rate": -1.0}, "learning_rate must be a number above 0, got -1.0"),
        ({"beta2": 1.0}, "beta2 must be a number from 0 to below 1, got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be a number, 0 or more, got -0.1"),
        ({"evaluate_lengths": [33, 9999]}, "measured at 9999 tokens: the held-out split has"),
        ({"encoding": "learned", "evaluate_lengths": [34]}, "the encoding 'learned' ends at 33"),
        ({"length": 20_011, "batch_tokens": 20_011}, "at least one sequence of 20011 tokens, got"),
        ({"held_out": "no/where/at/all"}, "which is none of them here"),
        ({"sizes": {"n_head": 5}}, "n_head must divide n_embd"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_trained_is_said(tmp_path, changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        train(small_config(tmp_path, **changes))
    assert not (tmp_path / "run").exists()


def test_held_out_text_shorter_than_a_sequence_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"measured at 33 tokens: the held-out split has 6 tokens; give --held-out"):
        train(small_config(tmp_path, held_out=str(tmp_path / "short.txt")))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        train(small_config(tmp_path, out=str(tmp_path / "file/run")))


def test_a_disk_without_locks_is_named_and_no_run_there_is_taken_as_being_written(tmp_path, monkeypatch):
    with RunWriter(tmp_path) as writer:
        writer.write_config({})
        assert Run(tmp_path).is_being_written

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    for use in (lambda: RunWriter(tmp_path), lambda: Run(tmp_path).is_being_written):
        with pytest.raises(OSError, match="must be on a disk that can lock files, got No locks available") as caught:
            use()
        assert caught.value.errno == errno.ENOLCK
