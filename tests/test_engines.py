"""Engines of a study: the same folder and the same numbers wherever runs train; what is missing is found early."""

import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_encoder_study import encoders, retrieval_folder
from test_study import in_process, small  # noqa: F401, a fixture
from train_kit import finish, numbers

from lengthwise.cli import main
from lengthwise.data.storage import open_storage
from lengthwise.loading import LoadError
from lengthwise.runs import Run
from lengthwise.study.engine import (
    Engine,
    LocalPool,
    StudyProgress,
    TrainingJob,
    answer_probe,
    check_shared,
    train_runs,
    train_to_end,
)
from lengthwise.study.engines import make_engine
from lengthwise.study.evaluator import RunEvaluator
from lengthwise.study.execute import StudyClock, measuring_device, results, run_study
from lengthwise.study.record import TrainingOutcome, outcome_path, write_outcome
from lengthwise.study.runs import contrastive_runs, evaluation_of, study_runs
from lengthwise.study.upload import upload_run
from lengthwise.study.watch import status_table, watch_study
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
    assert answer_probe(str(other / "nothing")).machine, "a machine without the folder has a name too"


def test_a_machine_without_the_folder_that_the_study_was_started_in_is_found_before_training_starts(
    tmp_path, monkeypatch
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    check_shared(Elsewhere(), tmp_path / "out")
    away = tmp_path / "away"
    # Another machine, as far as it is seen: the folder is not there while it answers.
    engine = Elsewhere(lambda path: (here.rename(away), path)[1])
    monkeypatch.setattr(Path, "cwd", lambda: here)
    with pytest.raises(
        OSError, match=r"must be started in a folder that all machines have, got .*here, which .* has not"
    ):
        check_shared(engine, tmp_path / "out")


class Namesakes(Elsewhere):
    """Two machines of one name, of which the second has another disk."""

    def probe(self, function, argument):
        return [function(argument), function(self.sees(argument))]


def test_machines_of_one_name_do_not_vouch_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.files.DISK_SECONDS", 0.0)
    with pytest.raises(OSError, match="must be on a disk that all machines share"):
        check_shared(Namesakes(lambda path: path.replace("out", "other disk")), tmp_path / "out")


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_named_by_its_extra(tmp_path, monkeypatch, capsys, engine, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"lengthwise.study.{engine}_engine", raising=False)
    config = small(tmp_path)
    words = ["study", "--engine", engine, "--out", config.out, "--encodings", "alibi", "--data", config.training.data]
    with pytest.raises(SystemExit) as end:
        main([*words, "--tokenizer", "bytes", "--steps", "3", "--warmup", "1", "--lengths", "32"])
    assert end.value.code == 2
    words = f"the package '{package}' must be installed; in a clone of Lengthwise: pip install '.[{engine}]'"
    assert words in capsys.readouterr().err
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
        ({"engine": "ray", "gpus": 2}, "--gpus must be at most 1, since a run is one process, got 2"),
        ({"engine": "ray", "device": "cuda"}, "--device cuda with --engine ray must have --gpus, .*; give --gpus 1"),
        ({"engine": "slurm", "gpus": 0.5}, "--gpus must be a whole number with --engine slurm, got 0.5"),
    ],
)
def test_options_of_another_engine_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        small(tmp_path, **options)


def test_slurm_is_not_replaced_by_this_machine_unless_that_is_asked_for(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr("lengthwise.study.engines.check_shared", lambda engine, out: None)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = small(tmp_path, engine="slurm", device="cpu", seeds=[1, 2, 3])
    runs = study_runs(config)
    with pytest.raises(OSError, match="must be started where Slurm is, got a machine without srun"):
        make_engine(config, runs)
    assert make_engine(dataclasses.replace(config, slurm={"cluster": "local"}), runs).jobs == 2, "not all six at once"


def test_ray_without_an_address_joins_no_cluster_that_it_finds(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    engine_module, asked = importlib.import_module("lengthwise.study.ray_engine"), []
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options["address"]))
    for address in (None, "auto"):
        engine_module.RayEngine(small(tmp_path, engine="ray", address=address), jobs=1)
    assert asked == ["local", "auto"]


@pytest.mark.parametrize(("gpus", "visible"), [(None, ""), (1.0, "3")])
def test_a_run_of_ray_sees_no_gpu_that_was_not_reserved_for_it(tmp_path, monkeypatch, gpus, visible):
    ray = pytest.importorskip("ray")
    engine_module, environments = importlib.import_module("lengthwise.study.ray_engine"), []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray has it for the task
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: SimpleNamespace(remote=function))
    monkeypatch.setattr("lengthwise.study.engine.TrainingProcess.outcome", lambda self: TrainingOutcome(1.0, 1, 1))
    monkeypatch.setattr("subprocess.Popen", lambda *words, env, **options: environments.append(env))
    config = small(tmp_path, engine="ray", gpus=gpus)
    engine_module.RayEngine(config, jobs=1).start(study_runs(config)[0], tmp_path / "log")
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == [visible]


class AtOnce(TrainingJob):
    """A run that has ended as soon as it is started."""

    def __init__(self, run):
        self.run = run

    def outcome(self):
        finish(self.run)
        return TrainingOutcome(1.0, 1, 1)

    def stop(self):
        raise AssertionError("nothing is to be stopped")


class RefusesOne(Engine):
    """A queue that does not take the first run."""

    jobs = 1

    def start(self, run, log):
        if run.name == "alibi-1337":
            raise RuntimeError("sbatch: error: socket timed out")
        return AtOnce(run)


def test_a_run_that_cannot_be_started_and_a_report_that_cannot_be_written_end_no_other_run(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.0)
    runs, finished = study_runs(small(tmp_path, encodings=["alibi", "rope", "none"])), []

    def report(run):
        finished.append(run.name)
        raise OSError("no space left")

    with StudyProgress(runs) as progress:
        ended = train_runs(runs, out=tmp_path, engine=RefusesOne(), progress=progress, finished=report)
    assert ended["alibi-1337"].failure == "could not be started: sbatch: error: socket timed out"
    assert [ended[name].failure for name in ("rope-1337", "none-1337")] == [None, None]
    assert finished == ["rope-1337", "none-1337"]


class TwoAtATime(Engine):
    """Runs that end when they are asked a second time; what works at the same time is counted."""

    jobs = 2

    def __init__(self):
        self.working, self.most, self.events, self.lock = 0, 0, [], threading.Lock()

    def begin(self, event):
        with self.lock:
            self.events.append(event)
            self.working += 1
            self.most = max(self.most, self.working)

    def end(self):
        with self.lock:
            self.working -= 1

    def start(self, run, log):
        self.begin(f"train {run.encoding}")
        job, asked = AtOnce(run), []

        def outcome():
            asked.append(run)
            if len(asked) < 2:
                return None
            self.end()
            return AtOnce.outcome(job)

        job.outcome = outcome
        return job


def test_a_run_is_measured_when_it_has_ended_and_takes_the_place_of_one_that_would_train(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.001)
    encodings = ["alibi", "rope", "none", "fire", "kerple"]
    engine, runs = TwoAtATime(), study_runs(small(tmp_path, encodings=encodings))

    def measure(run):
        engine.begin(f"measure {run.encoding}")
        time.sleep(0.05)
        engine.end()
        if run.encoding == "rope":
            raise OSError("no space left")

    with StudyProgress(runs) as progress:
        ended = train_runs(runs, out=tmp_path, engine=engine, progress=progress, measure=measure)
    assert [outcome.failure for outcome in ended.values()] == [None] * 5
    assert engine.most == 2, "never more than jobs"
    assert [event.split()[1] for event in engine.events if event.startswith("measure")] == encodings
    assert engine.events.index("measure alibi") < engine.events.index("train fire"), "not after all of them"
    assert "rope-1337 could not be measured: no space left" in caplog.text


class OnAnotherDisk(Engine):
    """An engine whose machine finishes every run but the last where this machine does not see it."""

    jobs = 1

    def start(self, run, log):
        job = AtOnce(run)
        if run.name != "none-1337":
            job.outcome = lambda: TrainingOutcome(1.0, 1, 1)
        return job


def test_a_run_that_was_finished_on_another_disk_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.files.DISK_SECONDS", 0.0)
    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.0)
    runs, finished = study_runs(small(tmp_path, encodings=["alibi", "none"])), []
    with StudyProgress(runs) as progress:
        ended = train_runs(runs, out=tmp_path, engine=OnAnotherDisk(), progress=progress, finished=finished.append)
    assert f"{runs[0].config.out} has no final model here" in ended["alibi-1337"].failure
    assert ended["none-1337"].failure is None
    assert finished == [runs[1]]


def test_progress_counts_no_run_that_is_still_to_be_trained(tmp_path):
    config = small(tmp_path)
    runs = study_runs(config)
    train(runs[0].config)
    evaluator = RunEvaluator(evaluation_of(config, runs[0]), Path(config.out), "cpu")
    with StudyProgress(runs, measured_tokens=900) as progress:
        assert progress.measuring_steps == 4
        results(config, runs, [], evaluator, {}, StudyClock(Path(config.out)), progress)
    assert progress.done == {"alibi-1337": 3 + progress.measuring_steps, "learned-1337": 0}
    with StudyProgress(runs, measured_tokens=900) as again:
        again.recorded(runs[0])
    assert again.first == 3 + again.measuring_steps, "what was measured before is no pace"


def test_the_report_of_a_cluster_grows_while_runs_finish(tmp_path, monkeypatch):
    config = dataclasses.replace(small(tmp_path), engine="ray")
    seen = []

    def train_here(waiting, *, finished, **_):
        for run in waiting:
            train(run.config)
            finished(run)
            seen.append((Path(config.out) / "report.md").read_text())
        return {}

    monkeypatch.setattr("lengthwise.study.execute.make_engine", lambda *_: LocalPool(1))
    monkeypatch.setattr("lengthwise.study.execute.train_runs", train_here)
    run_study(config)
    early, late = seen
    assert "| alibi |" in early
    assert "learned-1337" in early.partition("not trained yet")[0]
    assert "not trained yet" not in late


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPUs is what it is about")
def test_gpus_of_a_cluster_need_not_be_on_the_machine_that_asks_for_them(tmp_path):
    assert measuring_device(small(tmp_path, engine="slurm", device="cuda")) == "cpu"
    assert measuring_device(small(tmp_path, engine="slurm")) == "auto"
    with pytest.raises(LoadError, match="device must be 'auto' or one that works here, got 'cuda'"):
        measuring_device(small(tmp_path, device="cuda"))


def test_an_error_of_a_task_of_ray_is_no_lost_worker(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    job = importlib.import_module("lengthwise.study.ray_engine").RayJob(None, "answer")
    own = FileNotFoundError("no such folder: /home/me")
    trace = f"Traceback (most recent call last):\n  somewhere\nFileNotFoundError: {own}\n"
    failed = ray.exceptions.RayTaskError("train_to_end", trace, own).as_instanceof_cause()
    errors = [failed, ray.exceptions.WorkerCrashedError()]

    def get(answer):
        raise errors.pop(0)

    monkeypatch.setattr(ray, "wait", lambda answers, timeout: (answers, []))
    monkeypatch.setattr(ray, "get", get)
    assert job.outcome().failure == "its task failed: FileNotFoundError: no such folder: /home/me"
    assert job.outcome().failure.startswith("its worker was lost: ")


class Lost:
    """A job of submitit whose machine was lost."""

    def done(self):
        return True

    def result(self):
        raise RuntimeError("node failure")


def test_a_lost_job_that_cannot_be_queued_again_uses_up_a_retry(tmp_path):
    pytest.importorskip("submitit")
    slurm_engine = importlib.import_module("lengthwise.study.slurm_engine")
    answers = [Lost(), RuntimeError("socket timed out"), Lost(), RuntimeError("socket timed out")]

    def submit(task):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    engine = SimpleNamespace(retries=3, executor=SimpleNamespace(submit=submit))
    (run,) = study_runs(small(tmp_path, encodings=["alibi"]))
    job = slurm_engine.SlurmJob(run, engine, None)
    assert [job.outcome() for _ in range(3)] == [None] * 3
    assert job.outcome().failure == "its job was lost: node failure"
    assert answers == []


def test_a_cancelled_job_has_its_run_make_a_checkpoint_first(tmp_path, monkeypatch):
    done = []

    class Training:
        """Its machine is taken away at the second look, and once more while the checkpoint is made."""

        def __init__(self, *arguments, **options):
            self.looks = 0

        def outcome(self):
            self.looks += 1
            if self.looks == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return TrainingOutcome(1.0, 1, 1) if self.looks == 3 else None

        def stop(self):
            done.append("stop")

        def wait(self):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("checkpoint")

    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.0)
    monkeypatch.setattr("lengthwise.study.engine.TrainingProcess", Training)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # as submitit has it
    try:
        with pytest.raises(SystemExit):
            train_to_end(None, tmp_path / "log", tmp_path, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == ["stop", "checkpoint"]


def test_a_study_is_watched_from_its_folder_alone(tmp_path, capsys):
    config = small(tmp_path)
    runs = study_runs(config)
    train(runs[0].config)
    first, second = status_table(runs, config.out, evaluation_of(config, runs[0])).splitlines()[1:3]
    assert first.split()[:5] == ["alibi-1337", "finished", "3", "of", "3"]
    assert second.split() == ["learned-1337", "waiting", "0", "of", "3"]
    assert status_table(runs, config.out, evaluation_of(config, runs[0])).endswith("1 of 2 runs are finished")
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


class Failing(RefusesOne):
    """A queue that does not take the first run, and a machine that loses the others."""

    def start(self, run, log):
        job = super().start(run, log)
        job.outcome = lambda: TrainingOutcome(1.0, 1, 1, "its worker was lost")
        return job


def test_a_study_is_watched_until_its_contrastive_and_failed_runs_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    config, looks = encoders(tmp_path, encodings=["alibi", "rope", "none"]), []
    alibi, rope, plain = runs = study_runs(config)
    later = contrastive_runs(config, runs)

    def next_look(seconds):
        """What happens between two looks: runs fail, one is finished, and then the one that starts from it."""
        looks.append(seconds)
        if len(looks) == 2:
            finish(later[2])
            return
        failing = [alibi, rope, *later[:2]]
        with StudyProgress(failing) as progress:
            train_runs(failing, out=Path(config.out), engine=Failing(), progress=progress)
        finish(plain)

    monkeypatch.setattr("lengthwise.study.watch.time.sleep", lambda s: next_look(s) if s else None)
    lines = watch_study(config).splitlines()
    assert len(looks) == 2
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["alibi-1337", "failed"],
        ["rope-1337", "failed"],
        ["none-1337", "finished"],
        ["alibi-1337-retrieval", "failed"],
        ["rope-1337-retrieval", "failed"],
        ["none-1337-retrieval", "finished"],
    ]
    assert lines[-1] == "2 of 6 runs are finished, 4 failed"


def test_a_run_that_is_tried_again_has_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.0)
    config = small(tmp_path, encodings=["rope"])
    runs = study_runs(config)
    write_outcome(outcome_path(config.out, runs[0]), TrainingOutcome(1.0, 1, 1, "out of memory"))
    assert "failed" in status_table(runs, config.out, evaluation_of(config, runs[0]))
    states = []

    class Waiting(RefusesOne):
        def start(self, run, log):
            states.append(status_table(runs, config.out, evaluation_of(config, runs[0])).splitlines()[1].split()[1])
            return super().start(run, log)

    with StudyProgress(runs) as progress:
        train_runs(runs, out=Path(config.out), engine=Waiting(), progress=progress)
    assert states == ["waiting"]


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


def test_a_copy_that_is_replaced_is_not_whole_until_its_last_file(tmp_path, monkeypatch):
    (plan,) = study_runs(small(tmp_path, encodings=["alibi"]))
    train(plan.config)
    target = f"file://{tmp_path}/bucket"
    copy = Run(upload_run(Run(plan.config.out), target))
    seal = copy.final / "seal.json"
    seal.write_bytes(seal.read_bytes() + b" ")  # as of an earlier training
    system, _ = open_storage(target, "--upload")

    def lose_connection(self, a, b, **options):
        raise OSError("connection lost")

    with monkeypatch.context() as broken:
        broken.setattr(type(system), "put_file", lose_connection)
        with pytest.raises(OSError, match="connection lost"):
            upload_run(Run(plan.config.out), target)
    assert not copy.is_finished
    upload_run(Run(plan.config.out), target)
    assert copy.is_finished


def test_a_storage_that_fails_costs_neither_the_report_nor_other_copies(tmp_path, in_process, monkeypatch):  # noqa: F811
    retrieval_folder(tmp_path / "set")

    def upload(run, target):
        copied.append(run.name)
        if run.name == "alibi-1337":
            raise ConnectionError("503 slow down")
        return f"{target}/{run.name}"

    copied = []
    monkeypatch.setattr("lengthwise.study.execute.upload_run", upload)
    text = run_study(encoders(tmp_path, encodings=["alibi"], upload=f"file://{tmp_path}/bucket"))
    assert copied == ["alibi-1337", "alibi-1337-retrieval"]
    assert "the copy of alibi-1337 is missing: 503 slow down" in text
    assert "the copy of alibi-1337 is missing: 503 slow down" in (tmp_path / "out/report.md").read_text()


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
