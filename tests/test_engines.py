"""Engines of a study: the same folder and the same numbers wherever runs train; what is missing is found early."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from test_study import small
from train_kit import numbers

from lengthwise.cli import main
from lengthwise.data.storage import open_storage
from lengthwise.runs import Run
from lengthwise.study.engine import Engine, LocalPool, StudyProgress, answer_probe, check_shared, train_runs
from lengthwise.study.engines import make_engine
from lengthwise.study.execute import run_study
from lengthwise.study.runs import study_runs
from lengthwise.study.upload import upload_run
from lengthwise.study.watch import status_table
from lengthwise.train import train


class Elsewhere(Engine):
    """An engine whose machine has another disk, or the same."""

    jobs = 1

    def __init__(self, sees=lambda path: path):
        self.sees = sees

    def start(self, run, log):
        raise AssertionError("nothing may be trained before the folder is seen to be shared")

    def probe(self, function, argument):
        return [function(self.sees(argument))]


def test_a_folder_that_is_not_shared_is_found_before_training_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.files.DISK_SECONDS", 0.0)
    out, other = tmp_path / "out", tmp_path / "other disk"
    check_shared(Elsewhere(), out)
    with pytest.raises(OSError, match=r"must be on a disk that all machines share, got .*out, where .* does not read"):
        check_shared(Elsewhere(lambda path: path.replace(str(out), str(other))), out)
    assert list(out.iterdir()) == [], "no probe is left behind"
    assert answer_probe(str(other / "nothing")), "a machine without the folder has a name too"


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_named_by_its_extra(tmp_path, monkeypatch, capsys, engine, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"lengthwise.study.{engine}_engine", raising=False)
    config = small(tmp_path)
    words = ["study", "--engine", engine, "--out", config.out, "--encodings", "alibi", "--data", config.training.data]
    with pytest.raises(SystemExit) as end:
        main([*words, "--tokenizer", "bytes", "--steps", "3", "--warmup", "1", "--lengths", "32"])
    assert end.value.code == 2
    assert f"the package '{package}' must be installed: pip install 'lengthwise[{engine}]'" in capsys.readouterr().err
    assert not (Path(config.out) / "runs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "dask"}, "engine must be 'local' or 'ray' or 'slurm', got 'dask'"),
        ({"gpus": 1.0}, "--gpus and --cpus are for --engine ray and slurm, got --engine local"),
        ({"address": "auto"}, "--address is for --engine ray, got --engine local"),
        ({"engine": "ray", "slurm": {"timeout_min": 5}}, "--slurm is for --engine slurm, got --engine ray"),
        ({"engine": "ray", "retries": -1}, "retries must be an int, 0 or more, got -1"),
        ({"engine": "ray", "cpus": 0}, "cpus must be a positive int, got 0"),
    ],
)
def test_options_of_another_engine_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        small(tmp_path, **options)


def test_a_study_is_watched_from_its_folder_alone(tmp_path, capsys):
    config = small(tmp_path)
    runs = study_runs(config)
    train(runs[0].config)
    first, second = status_table(runs, config.out).splitlines()[1:3]
    assert first.split()[:5] == ["alibi-1337", "finished", "3", "of", "3"]
    assert second.split() == ["learned-1337", "waiting", "0", "of", "3"]
    assert status_table(runs, config.out).endswith("1 of 2 runs are finished")
    words = ["--out", config.out, "--encodings", "alibi", "learned", "--data", config.training.data]
    main(["study", "--watch", *words, "--steps", "3", "--warmup", "1"])
    assert "1 of 2 runs are finished" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["study", "--watch", "--plan", *words])
    assert "do one thing each" in capsys.readouterr().err
    for option, value in (("--jobs", "0"), ("--gpus", "-1")):
        with pytest.raises(SystemExit):
            main(["study", "--plan", *words, option, value])
        assert f"{option[2:]} must be a" in capsys.readouterr().err


def test_a_finished_run_is_uploaded_whole_with_its_seal_last_and_once(tmp_path, monkeypatch):
    (plan,) = study_runs(small(tmp_path, encodings=["alibi"]))
    train(plan.config)
    target, copied = f"file://{tmp_path}/bucket", []
    system, _ = open_storage(target, "--upload")
    put = type(system).put_file
    monkeypatch.setattr(
        type(system), "put_file", lambda self, a, b, **k: (copied.append(Path(a).name), put(self, a, b, **k))
    )
    address = upload_run(Run(plan.config.out), target)
    assert copied[-1] == "seal.json"
    copy = Run(address)
    assert copy.is_finished
    assert copy.checkpoints == []
    assert numbers(copy) == numbers(Run(plan.config.out))
    copied.clear()
    upload_run(Run(plan.config.out), target)
    assert copied == []
    with pytest.raises(ValueError, match=r"--upload must be an address that fsspec knows, got 'moon://x'"):
        open_storage("moon://x", "--upload")


def tiny_study(tmp_path, name, **changes):
    """Eight runs of a few seconds, each with checkpoints on its way."""
    plain = {"out": str(tmp_path / name), "encodings": ["alibi", "none"], "seeds": [1, 2, 3, 4], "steps": 40}
    return small(tmp_path, **(plain | {"checkpoint_every": 5, "device": "cpu", "jobs": 2} | changes))


def kill_a_worker(out: Path, killed: list[int]) -> None:
    """SIGKILL to the parent of the first run that is some steps old: the worker of an engine."""
    while not killed:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            folder = words[words.index(b"--out") + 1].decode() if b"--out" in words else ""
            if (
                folder.startswith(str(out))
                and Run.is_run(folder)
                and len(Run(folder).metrics) > 7
                and parent != os.getpid()
            ):
                killed.append(parent)
                os.kill(parent, signal.SIGKILL)
                return
        time.sleep(0.05)


@pytest.mark.prove
@pytest.mark.parametrize("engine", ["ray", "slurm"])
def test_a_worker_killed_in_the_middle_of_eight_runs_changes_no_number(tmp_path, monkeypatch, engine):
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[engine])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    local = tiny_study(tmp_path, "local")
    runs = study_runs(local)
    with StudyProgress(runs) as progress:
        train_runs(runs, out=Path(local.out), engine=LocalPool(2), progress=progress)
    own = {"slurm": {"slurm": {"cluster": "local"}}, "ray": {}}[engine]
    config = tiny_study(tmp_path, engine, engine=engine, **own)
    killed: list[int] = []
    threading.Thread(target=kill_a_worker, args=(Path(config.out), killed), daemon=True).start()
    text = run_study(config)
    assert killed
    assert "is missing" not in text
    for mine, theirs in zip(study_runs(config), runs, strict=True):
        assert numbers(Run(mine.config.out)) == numbers(Run(theirs.config.out)), mine.name
    content = json.loads((Path(config.out) / "study.json").read_text())
    assert [row["encoding"] for row in content["rows"]] == ["alibi", "none"]


def test_nothing_that_is_finished_needs_an_engine(tmp_path):
    config = dataclasses.replace(small(tmp_path), engine="ray")
    assert isinstance(make_engine(config, []), LocalPool)
