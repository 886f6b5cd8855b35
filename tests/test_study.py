"""A study: planned, trained, measured, drawn and reported; gone on with, never repeated, and whole when runs fail."""

import base64
import dataclasses
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

import lengthwise
from lengthwise.cli import main, study_parser
from lengthwise.encodings import ENCODINGS
from lengthwise.evaluate import LengthTable, Score
from lengthwise.evaluate import run as evaluate_run
from lengthwise.evaluate import table as table_module
from lengthwise.evaluate.statistics import Interval, t_interval, wilson
from lengthwise.evaluate.tasks import TaskScore
from lengthwise.origin import command_line
from lengthwise.runs import Run
from lengthwise.study import engine, evaluator, execute
from lengthwise.study import record as record_module
from lengthwise.study import runs as runs_module
from lengthwise.study.beside import paper_rows, paper_tables
from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import LocalPool, parallel_jobs
from lengthwise.study.execute import (
    StudyProgress,
    run_study,
    train_runs,
)
from lengthwise.study.record import TrainingOutcome, is_recorded, read_outcome
from lengthwise.study.report import hypothesis_rows, hypothesis_words, summary
from lengthwise.study.results import JudgedHypothesis, StudyResults
from lengthwise.study.runs import contrastive_runs, evaluation_of, study_runs
from lengthwise.study.task_sections import task_sections
from lengthwise.study.watch import missing_commands, watch_study
from lengthwise.train import TrainConfig, train
from lengthwise.train.setup import model_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs/studies").glob("*.yaml"))


def small(tmp_path, **changes: object) -> StudyConfig:
    """Two runs of three steps on a text of our own."""
    corpus = tmp_path / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("".join(f"{n} crows & {n * n % 97} <ships> came by.\n" for n in range(1500)))
    sizes = {"data": str(corpus), "tokenizer": "bytes", "length": 32, "batch_tokens": 64, "micro_batch": 2, "steps": 3}
    sizes["sizes"] = {"n_layer": 1, "n_embd": 24, "n_head": 3}
    plain = {"out": str(tmp_path / "out"), "encodings": ["alibi", "learned"], "warmup": 1, "windows": 5}
    return StudyConfig.from_options(**(sizes | plain | {"lengths": [32, 64], "title": "Crows <b>"} | changes))


@pytest.fixture
def in_process(monkeypatch):
    """Runs trained in this process, which takes no second; those named in the list fail."""
    trained, fails = [], []

    def train_here(waiting, *, out, **_):
        ended = {}
        for run in waiting:
            trained.append(run.name)
            if run.encoding in fails:
                ended[run.name] = TrainingOutcome(1.0, 1, 1, "exit code 1: out of memory")
                continue
            train(run.config)
            ended[run.name] = TrainingOutcome(1.0, 2**20, 1)
        return ended

    monkeypatch.setattr(execute, "train_runs", train_here)
    return trained, fails


def test_results_are_stored_whole_and_of_this_version_alone(tmp_path, in_process, monkeypatch):
    _, fails = in_process
    path = Path(__file__).parents[1] / "docs/results.py"
    spec = importlib.util.spec_from_file_location("results", path)
    results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(results)
    monkeypatch.setattr(results, "STORED", tmp_path / "stored")
    fails.append("learned")
    run_study(small(tmp_path))
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="must be measured, got none of learned-1337"):
        results.store_results(out, "crows")
    fails.clear()
    run_study(small(tmp_path))
    folder = results.store_results(out, "crows")
    assert sorted(file.name for file in folder.iterdir()) == sorted(results.FILES)
    assert results.stored_results("crows")["of_another_version"] is None
    monkeypatch.setattr(results, "__version__", "99.0")
    assert results.stored_results("crows")["of_another_version"] == lengthwise.__version__
    with pytest.raises(ValueError, match=r"results must be of Lengthwise 99\.0, got"):
        results.store_results(out, "crows")
    (out / "rise.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"got no rise\.png"):
        results.store_results(out, "crows")
    assert results.stored_results("ravens") is None


@pytest.mark.parametrize("name", ["full-stdlib", "full-wikipedia", "full-tasks", "other-rates"])
def test_stored_records_are_of_the_runs_that_the_full_study_would_train_today(name):
    root = Path(__file__).parents[1]
    out = root / f"docs/results/full-{name.removeprefix('full-')}"
    stored = {path.stem for path in (out / "records").glob("*.json")}
    assert stored
    config = StudyConfig.from_options(**yaml.safe_load((root / f"configs/studies/{name}.yaml").read_text()))
    runs = study_runs(config)
    assert stored == {run.name for run in runs if is_recorded(out, run, evaluation_of(config, runs[0]))}


def test_pairs_of_a_stored_study_are_those_of_its_report(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs")
    pairs, results = importlib.import_module("pairs"), importlib.import_module("results")
    rows = {row["encoding"]: row for row in results.stored_results("full-wikipedia")["rows"]}
    (best,) = (name for name, row in rows.items() if row["is_best"])
    value, interval = pairs.stored_table("full-wikipedia").difference("cable", best, 128)
    above = rows["cable"]["above_best"]
    # Sums over a few hundred documents, which another processor may add in another order.
    assert [value, *interval] == pytest.approx([above["value"], *above["interval"]], rel=1e-9)


def test_the_page_on_which_encoding_to_use_says_only_what_the_intervals_of_all_texts_allow(monkeypatch):
    def row(encoding, gap, rise, under_trained=False, seeds=3):
        above = None if encoding == "cable" else {"value": sum(gap) / 2, "interval": gap}
        # cope replaces the scores, and is the best of all; cable is the best of the others.
        others = {"value": 1.0, "interval": [0.9, 1.1]}
        best = {"above_best": None if encoding == "cope" else others, "above_best_unchanged": above}
        far = {"length": 1024, "seeds": [] if rise is None else [sum(rise) / 2], "interval": rise}
        own = {"rise": far, "under_trained": under_trained, "rescores": encoding == "cope", "seeds_measured": seeds}
        return {
            "encoding": encoding,
            "is_best": encoding == "cope",
            "is_best_unchanged": encoding == "cable",
            **best,
            **own,
        }

    def study(*rows, is_test=False):
        rates = {"chosen_on": ["stdlib"], "is_test": is_test}
        return {"train_length": 128, "rows": list(rows), "rates": rates}

    best = row("cable", [0.0, 0.0], [0.0, 0.02])
    rescored = row("cope", [-0.3, -0.1], [0.0, 0.01])
    level, behind, broken = row("kerple", [-0.01, 0.02], [0.01, 0.029]), [0.01, 0.03], [0.3, 0.4]
    ends, starved = row("learned", behind, None), row("none", [0.5, 0.6], [0.0, 0.01], under_trained=True)
    studies = {
        name: study(rescored, best, level, row("alibi", *alibi), row("rope", behind, broken), ends, starved)
        for name, alibi in (("full-stdlib", (behind, [0, 0.01])), ("full-wikipedia", ([-0.1, 0.1], [0, 0.04])))
    }
    # Of tasks: who learns one, and how far those still have it.
    shares = {
        ("copy", "cable"): (0.95, 0.92, 0.5),
        ("copy", "rope"): (0.99, 0.3, 0.95),
        ("copy", "none"): (0.5, 0.95, 0.95),
        ("parity", "cable"): (0.5, 0.5, 0.5),
    }
    tasks = [
        {"task": task, "encoding": encoding, "length": length, "tokens": share, "share": share / 2}
        for (task, encoding), row in shares.items()
        for length, share in zip((64, 128, 256), row, strict=True)
    ]
    tasks.append({"task": "copy", "encoding": "learned", "length": 64, "refused": "too long"})
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs")
    write = importlib.import_module("which_encoding").page
    born = {"command": "measure", "commit": "abc", "date": "2026-01-01", "machine": "one"}
    ratios = {"cable": 1.204, "none": 1.0, "fox": 1.1}
    steps = [
        {"rival": name, "rounds": 20, "ratio": ratio, "quartiles": [ratio - 0.01, ratio + 0.02], "born": born}
        for name, ratio in ratios.items()
    ]
    page = " ".join(write(studies, {"tasks": tasks, "seeds": [1], "rows": [starved]}, steps).split())
    assert "| none | 1.00 | 0.99 to 1.02 | | fox | 1.10 | 1.09 to 1.12 | | cable | 1.20 | 1.19 to 1.22 |" in page
    both = "cable and kerple; with the scores replaced, cope."
    assert f"hold at 8 times the training length: {both} Of these, level with the best" in page
    assert f"level with the best at the training length: {both}" in page
    assert f"level with the best at 128 tokens: {both}" in page
    assert "**In between, or not decided**: alibi." in page
    assert "is one for RoPE): rope." in page
    assert "**No positions beyond the training length**: learned." in page
    assert "that leaves the scores as they are): none." in page
    gaps, rises = " -0.200 (-0.300 to -0.100) |" * 2, " +0.5% (+0.0% to +1.0%) |" * 2
    assert f"| cope |{gaps}{rises} holds |" in page
    assert "(Python's library: by Student's t over 3 seeds; Wikipedia: by Student's t over 3 seeds)" in page
    assert "The rates were chosen on Python's library; there is no text here that nothing was chosen on." in page
    # A text with other seeds, without two of the encodings, of another version, and on which nothing was chosen.
    other = study(row("rope", behind, broken, seeds=1), best, row("alibi", behind, [0, 0.01]), rescored, is_test=True)
    studies["full-wikipedia"] = other | {"of_another_version": "0.0.9"}
    of_tasks = {"tasks": tasks, "seeds": [1], "rows": [starved], "of_another_version": "0.0.8"}
    page = " ".join(write(studies, of_tasks, steps).split())
    assert "Wikipedia: by Student's t over 3 seeds, of one score over documents)" in page
    assert "chosen on Python's library; nothing was chosen on Wikipedia." in page
    assert "**Not measured on Wikipedia so far**, so judged without it" in page
    assert "and no best of it: kerple, learned and none." in page
    assert "| kerple | +0.005 (-0.010 to +0.020) | - | " in page
    assert "% (+1.0% to +2.9%) | - | holds |" in page
    assert "Wikipedia: measured with Lengthwise 0.0.9, which is not this version." in page
    assert "The tasks: measured with Lengthwise 0.0.8, which is not this version." in page
    assert "per token of each text's own tokenizer" in page
    assert "| cable | best | best |" in page
    assert "| task | learned at 64 | still at 128 | still at 256 | | --- | --- | --- | --- |" in page
    assert "| copy | cable, rope | cable | - |" in page, "one that lost it does not get it back"
    assert "No encoding learned parity." in page
    assert "one seed of cable, rope, none and learned." in page
    assert "(the whole answer is right) where a task is learned: copy 47.5% to 49.5% at 64 characters." in page
    assert "none and learned learned no task" in page
    assert "under-trained by the studies' rule: none." in page


def test_measuring_in_a_thread_leaves_the_threads_of_the_process_as_they_were():
    before = torch.get_num_threads()

    def measure() -> None:
        with execute._threads(before + 1):
            assert torch.get_num_threads() == before + 1

    with ThreadPoolExecutor(1) as pool:
        pool.submit(measure).result()
    assert torch.get_num_threads() == before


def test_an_encoding_that_replaces_the_scores_is_no_measure_of_what_the_others_learned(tmp_path, monkeypatch):
    values = {"kerple+dape": 7.0, "cable": 10.0, "rope": 12.0, "none": 12.6}
    config = small(tmp_path, encodings=list(values))
    monkeypatch.setattr(StudyResults, "_measured_names", lambda self: list(values))
    monkeypatch.setattr(StudyResults, "_value", lambda self, name: values[name])
    built, results = [], StudyResults(config, study_runs(config), None, [], {}, {}, {}, 0.0)
    monkeypatch.setattr(runs_module, "model_config", lambda *args, **kw: built.append(1) or model_config(*args, **kw))
    assert (results.best, results.best_unchanged) == ("kerple+dape", "cable")
    assert results.under_trained() == ["none"]
    assert results.behind() == ["rope", "none"]
    assert len(built) == len(values), "each encoding is built once: a report of many asks again and again"


def test_a_study_writes_one_report_that_opens_offline_and_never_repeats_what_is_done(tmp_path, in_process):
    trained, _ = in_process
    said = run_study(small(tmp_path))
    out = tmp_path / "out"
    page = (out / "report.html").read_text()
    assert said.splitlines()[-1] == f"the report is {out / 'report.html'}"
    assert page.count("data:image/png;base64,") == 5
    assert base64.b64decode(re.search(r"base64,([^\"]+)", page)[1]).startswith(b"\x89PNG")
    assert not re.search(r"<script|https?://|<link", page)
    assert "<h1>Crows &lt;b&gt;</h1>" in page
    assert re.search("learned at 64: .*ends at 32", page)
    for words in (
        "lengthwise train",
        "peak memory",
        "torch",
        "95 % intervals",
        "Rise on the same tokens",
        "Bits per byte",
    ):
        assert words in page
        assert words in (out / "report.md").read_text()
    found = json.loads((out / "study.json").read_text())
    assert [row["encoding"] for row in found["rows"]] == ["alibi", "learned"]
    assert found["rows"][1]["values"]["64"] is None
    assert [row[-1] for row in found["speed"]] == ["skipped", "0% at 64", "0% at 32"]

    files = [*out.glob("records/*"), *out.glob("maps/*"), *out.glob("runs/*/metrics.jsonl")]
    before = {path: path.stat().st_mtime_ns for path in files}
    run_study(small(tmp_path))
    assert trained == ["alibi-1337", "learned-1337"]
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_seeds_stand_beside_each_other_and_hypotheses_are_judged_by_their_interval(tmp_path, in_process, monkeypatch):
    hypotheses = {"alibi": {"at_most": 9.0}, "none": {"above": 9.0}, "fire": {"at_most": 0.1}}
    run_study(small(tmp_path, encodings=["alibi", "none"], seeds=[1, 2], lengths=[32, 256], hypotheses=hypotheses))
    content = json.loads((tmp_path / "out/study.json").read_text())
    assert [(h["encoding"], h["verdict"]) for h in content["hypotheses"]] == [
        ("alibi", "held"),
        ("none", "failed"),
        ("fire", "not measured"),
    ]
    rises = content["rows"][0]["rise"]["seeds"]
    assert len(rises) == 2
    mean, half = sum(rises) / 2, 12.706 * abs(rises[0] - rises[1]) / 2
    assert content["hypotheses"][0]["interval"] == pytest.approx([mean - half, mean + half], rel=1e-3)
    best, other = sorted(content["rows"], key=lambda row: row["values"]["32"])
    assert best["above_best"] is None
    mean = math.log(other["values"]["32"] / best["values"]["32"])
    assert other["above_best"]["value"] == pytest.approx(mean, abs=1e-9)
    assert other["above_best"]["interval"][0] < mean < other["above_best"]["interval"][1]
    titles = [section["title"] for section in content["sections"]]
    assert titles[:4] == ["Summary", "Rise on the same tokens", "Seeds", "Hypotheses"]
    assert "Above the best at 32 tokens" in titles
    undecided = JudgedHypothesis("alibi", "at_most", 0.5, [0.4, 0.6], Interval(0.3, 0.7))
    assert undecided.verdict == "not decided"
    config = small(tmp_path, hypotheses={"alibi": {"at_most": 0.5}})
    results = StudyResults(config, study_runs(config), None, [], {}, {}, {}, 0.0)
    monkeypatch.setattr(StudyResults, "hypotheses", lambda self: [undecided])
    monkeypatch.setattr(StudyResults, "under_trained", lambda self: ["alibi"])
    assert hypothesis_rows(results)[1][-1] == "not decided, under-trained"
    with pytest.raises(ValueError, match=r"must be one of 'at_most', .* and a number, got \['below'\]"):
        study_runs(small(tmp_path, hypotheses={"alibi": {"below": 1.0}}))
    with pytest.raises(ValueError, match="ndcg_below is a hypothesis on retrieval, got a study without --retrieval"):
        study_runs(small(tmp_path, hypotheses={"alibi": {"ndcg_below": 0.0}}))


def test_a_missing_seed_leaves_its_column_empty_and_everything_counts_the_seeds_that_were_measured(
    tmp_path, in_process
):
    changes = {"encodings": ["alibi", "none"], "hypotheses": {"alibi": {"at_most": 9.0}}}
    run_study(small(tmp_path, seeds=[1, 2, 3], **changes))
    out = tmp_path / "out"
    shutil.rmtree(out / "runs/alibi-1")
    (out / "records/alibi-1.json").unlink()
    run_study(small(tmp_path, seeds=[1, 2, 3], train=False, **changes))
    content = json.loads((out / "study.json").read_text())
    sections = {section["title"]: section for section in content["sections"]}
    rows = {row["encoding"]: row for row in content["rows"]}
    head, alibi, none = sections["Seeds"]["table"]
    rises = [f"{rise:+.1%}" for rise in rows["alibi"]["rise"]["seeds"]]
    assert head[1:4] == ["seed 1", "seed 2", "seed 3"]
    assert alibi[:4] == ["alibi", "-", *rises]
    assert "-" not in none[:4]
    assert rows["alibi"]["rise"]["seed_numbers"] == [2, 3]
    assert [rows[name]["seeds_measured"] for name in ("alibi", "none")] == [2, 3]
    assert "2 encodings, 2 to 3 seeds each" in sections["Summary"]["paragraphs"][0]
    for title in ("Rise on the same tokens", "95 % intervals"):
        assert "by Student's t over 2 to 3 seeds." in sections[title]["paragraphs"][0], title
    for title in ("Above the best at 32 tokens", "Paired differences on the same tokens"):
        assert "by Student's t over 2 seeds" in sections[title]["paragraphs"][0], title
    # The table, the sentence and the JSON have one rise: a mean over seeds of each one's.
    mean = sum(rows["alibi"]["rise"]["seeds"]) / 2
    assert sections["Rise on the same tokens"]["table"][1][1].startswith(f"{mean:+.1%} (")
    assert sections["Perplexity by length"]["table"][1][-1] == f"{mean:+.1%}"
    best, other = sorted(rows.values(), key=lambda row: row["values"]["32"])
    losses = {name: [loss(out, f"{name}-{seed}") for seed in (2, 3)] for name in rows}
    differences = [a - b for a, b in zip(losses[other["encoding"]], losses[best["encoding"]], strict=True)]
    assert other["above_best"]["interval"] == pytest.approx(t_interval(differences))
    assert (other["above_best"]["seeds_measured"], other["above_best"]["intervals_over"]) == (2, "seeds")
    assert (best["is_best"], best["above_best"]) == (True, None)


def loss(out, name, length=32):
    """Of a record."""
    scores = json.loads((out / f"records/{name}.json").read_text())["scores"]
    return next(Score.from_json(score).loss for score in scores if score["length"] == length)


def test_records_of_when_no_seconds_were_taken_are_read(tmp_path, in_process):
    config = small(tmp_path, encodings=["alibi"])
    run_study(config)
    path = tmp_path / "out/records/alibi-1337.json"
    assert "scoring took" in (tmp_path / "out/report.md").read_text()
    record = json.loads(path.read_text())
    assert record.pop("measuring_seconds") > 0
    path.write_text(json.dumps(record))
    run_study(config)
    assert json.loads(path.read_text()) == record, "it is not measured again"
    assert "scoring took" not in (tmp_path / "out/report.md").read_text()


def test_a_damaged_record_is_named_and_measured_again(tmp_path, in_process, caplog):
    trained, _ = in_process
    config = small(tmp_path, encodings=["alibi"])
    run_study(config)
    path = tmp_path / "out/records/alibi-1337.json"
    scores = json.loads(path.read_text())["scores"]
    for damaged in (path, tmp_path / "out/seconds.json"):
        damaged.write_text("")
    assert missing_commands(config) == []
    run_study(config)
    assert f"{path} is damaged, and is made again" in caplog.text
    again = json.loads(path.read_text())["scores"]
    assert [score["nats"] for score in again] == [score["nats"] for score in scores]
    assert len(trained) == 1


def test_work_that_cannot_be_told_costs_a_run_no_score(tmp_path, in_process, monkeypatch, caplog):
    def fails(model, ids):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(evaluator, "skipped_shares", fails)
    assert "missing" not in run_study(small(tmp_path))
    assert "how much learned-1337 skips at 32 tokens could not be told: out of memory" in caplog.text


def test_a_held_out_text_too_short_for_the_lengths_is_refused_before_anything_is_trained(tmp_path, in_process):
    trained, _ = in_process
    with pytest.raises(ValueError, match="one token more than the longest length, 65,537, got"):
        run_study(small(tmp_path, lengths=[32, 65536]))
    assert trained == []


def test_an_interrupted_study_has_a_record_of_every_run_that_ended(tmp_path, monkeypatch):
    start, recorded = LocalPool.start, []

    def interrupted(self, run, log):
        if run.encoding == "learned":
            recorded.extend(path.stem for path in (tmp_path / "out/records").glob("*.json"))
            raise KeyboardInterrupt
        return start(self, run, log)

    monkeypatch.setattr(LocalPool, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(small(tmp_path, jobs=1))
    assert recorded == ["alibi-1337"], "before the next one was started"
    assert json.loads((tmp_path / "out/seconds.json").read_text())["seconds"] > 0
    record = json.loads((tmp_path / "out/records/alibi-1337.json").read_text())
    assert record["born"]["command"] == command_line()
    (training,) = record["training_born"]
    assert training["command"].startswith("lengthwise train --out"), "the training's own, which is another process"
    assert (training["first_step"], training["processes"]) == (1, 1)


def test_tasks_are_pooled_over_depths_and_seeds(tmp_path):
    config = small(tmp_path, encodings=["alibi", "none"], seeds=[1, 2])
    scores = [
        TaskScore(f"alibi-{seed}", "passkey", 32, depth, 10, exact, 0.5 + depth / 5)
        for seed, counts in ((1, (2, 4)), (2, (6, 8)))
        for depth, exact in zip((0.0, 1.0), counts, strict=True)
    ]
    scores += [TaskScore("none-1", "passkey", 32, depth, 10, 5, 0.5) for depth in (0.0, 1.0)]
    scores.append(TaskScore("none-1", "passkey", 64, 0.0, 0, 0, math.nan, "too long"))
    results = StudyResults(config, study_runs(config), None, scores, {}, {}, {}, 0.0)
    alibi, none, refused = (share.as_json() for share in results.task_shares())
    assert (alibi["share"], alibi["seeds"], alibi["examples"]) == (0.5, [0.3, 0.7], 40)
    assert alibi["intervals_over"] == "seeds"
    assert alibi["interval"] == [0.0, 1.0], "Student's t over two seeds, cut"
    assert (none["share"], none["interval"], none["intervals_over"]) == (0.5, list(wilson(10, 20)), "examples")
    assert refused["refused"] == "too long"
    whole, by_token = task_sections(results)
    assert whole.table == [
        ["task", "encoding", "32", "64"],
        ["passkey", "alibi", "50% (0% to 100%)", "-"],
        ["passkey", "none", "50% (30% to 70%)", "-"],
    ]
    assert by_token.table == [whole.table[0], ["passkey", "alibi", "60%", "-"], ["passkey", "none", "50%", "-"]]
    assert [picture.name for picture in by_token.pictures] == ["tasks"]


@pytest.mark.parametrize(
    ("changes", "is_test"), [({}, False), ({"data": "corpus.txt"}, True), ({"data": "corpus.txt", "seeds": [7]}, False)]
)
def test_hypotheses_are_tested_on_text_and_seeds_that_no_rate_was_chosen_on(tmp_path, changes, is_test):
    config = StudyConfig.from_options(out=str(tmp_path), encodings=["cable", "rope"], **changes)
    results = StudyResults(config, study_runs(config), None, [], {}, {}, {}, 0.0)
    assert results.rates_chosen_on == ["stdlib"]
    assert results.is_test == is_test
    (words,) = hypothesis_words(results)
    assert words.startswith("This is a test of them" if is_test else "This is no test of them")
    assert "chosen on the training text of stdlib, with seed 7" in words
    tries = {name: len(choice.tries) for name, choice in results.rate_choices().items()}
    assert tries == {"cable": 4, "rope": 4}
    given = dataclasses.replace(config, rates={"rope": {"learning_rate": 0.1}})
    assert StudyResults(given, study_runs(given), None, [], {}, {}, {}, 0.0).rate_choices().keys() == {"cable"}


def test_what_is_well_behind_the_best_is_named_with_the_rates_that_were_tried(tmp_path):
    config = StudyConfig.from_options(out=str(tmp_path), encodings=["t5", "rope", "fope"], seeds=[1])
    values = {"t5-1": 2.0, "rope-1": 2.2, "fope-1": 2.3, "t5-1+window:32": 2.9}
    same = {"targets": "x", "documents": [0, 1], "tokens": [5, 5], "bytes": [9, 9]}
    scores = [Score(name, 128, "fair", "x", "y", nats=[5 * v, 5 * v], **same) for name, v in values.items()]
    table = LengthTable(scores, rows={name: (name.replace("-1", ""), 1) for name in values})
    results = StudyResults(config, study_runs(config), table, [], {}, {}, {}, 0.0)
    _, named, late = summary(results)
    assert "window" not in named + late, "a stretched model has the weights of another"
    assert named == (
        "More than 15% above t5, at 128 tokens: rope (22%; 4 tries, learning rates 0.012, 0.024, 0.048 and 0.096, "
        "of which 0.024 was best), fope (35%; no rates were tried for it)."
    )
    assert "fope (35%)" in late
    assert "rope" not in late


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rates": {"alibi": {"learning_rate": 0.1}}}, "--tune chooses all rates, got --rates for 'alibi'"),
        ({"encoding_learning_rate": 0.1}, "--tune chooses the rates, got --encoding-learning-rate 0.1; leave one out"),
        ({"final_learning_rate": 0.1}, "--tune chooses the rates, got --final-learning-rate 0.1; leave one out"),
    ],
)
def test_rates_that_are_given_are_not_chosen_anew_in_silence(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        run_study(small(tmp_path, tune=True, **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["--plan", "--watch"])
def test_a_plan_of_rates_that_are_still_to_be_chosen_is_refused(tmp_path, capsys, word):
    with pytest.raises(SystemExit) as end:
        main(["study", "--tune", word, "--out", str(tmp_path)])
    assert end.value.code == 2
    assert "a study whose learning rates are known, got --tune" in capsys.readouterr().err


def test_the_docs_name_every_encoding_that_the_full_study_does_not_have():
    root = Path(__file__).parents[1]
    text = (root / "docs/measure.md").read_text()
    named = set(re.findall(r"`([\w-]+)`", text[text.index("Not in it, for want of time") :].partition("\n\n")[0]))
    config = yaml.safe_load((root / "configs/studies/full-stdlib.yaml").read_text())
    studied = {part for encoding in config["encodings"] for part in re.split("[+,]", encoding)}
    assert named == set(ENCODINGS) - studied


def test_a_run_that_fails_is_reported_and_the_rest_goes_on_and_later_it_is_tried_again(tmp_path, in_process):
    trained, fails = in_process
    fails.append("alibi")
    said = run_study(small(tmp_path))
    assert "alibi-1337 is missing: exit code 1: out of memory" in said
    assert "learned" in json.loads((tmp_path / "out/study.json").read_text())["rows"][0]["encoding"]
    assert "out of memory" in (tmp_path / "out/report.html").read_text()
    fails.clear()
    assert "missing" not in run_study(small(tmp_path))
    assert trained == ["alibi-1337", "learned-1337", "alibi-1337"]


def test_without_training_a_study_gathers_what_is_there(tmp_path, in_process):
    config = small(tmp_path, train=False)
    with pytest.raises(FileNotFoundError, match=r"got '.*/out', which has neither runs nor records; check the name"):
        run_study(config)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out/runs").mkdir(parents=True)
    assert "nothing to compare" in (Path(run_study(config).split()[-1])).read_text()
    train(study_runs(config)[0].config)
    said = run_study(config)
    assert "learned-1337 is missing: not trained yet" in said
    assert "alibi" in said


def test_a_finished_run_of_other_options_does_not_pass_for_one_of_these(tmp_path, in_process):
    trained, _ = in_process
    run_study(small(tmp_path))
    record = (tmp_path / "out/records/alibi-1337.json").read_bytes()
    for changes in ({}, {"train": False}):
        with pytest.raises(ValueError, match=r"alibi-1337 is finished: a run must be .* steps: 3 then, 4 now"):
            run_study(small(tmp_path, steps=4, **changes))
    with pytest.raises(ValueError, match="steps: 3 then, 4 now"):
        missing_commands(small(tmp_path, steps=4))
    assert len(trained) == 2
    assert (tmp_path / "out/records/alibi-1337.json").read_bytes() == record


def test_other_lengths_are_measured_anew_without_training(tmp_path, in_process):
    trained, _ = in_process
    run_study(small(tmp_path))
    run_study(small(tmp_path, lengths=[16, 32]))
    assert len(trained) == 2
    assert set(json.loads((tmp_path / "out/study.json").read_text())["rows"][0]["values"]) == {"16", "32"}


def test_another_text_or_another_version_is_measured_anew_and_nothing_else_is(tmp_path, in_process, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} ravens and {n * n % 89} boats went home.\n" for n in range(1500)))
    config = small(tmp_path, text=str(text), encodings=["alibi"])
    scores, table = tmp_path / "out/records/alibi-1337.json", tmp_path / "out/study.json"

    def measured() -> tuple[int, float]:
        run_study(config)
        return scores.stat().st_mtime_ns, json.loads(table.read_text())["rows"][0]["values"]["64"]

    first = measured()
    os.utime(text)
    assert measured() == first
    text.write_text(text.read_text().replace("ravens", "herons"))
    second = measured()
    assert second[1] != first[1]
    monkeypatch.setattr(record_module, "__version__", "0.0.1")
    runs = shutil.move(tmp_path / "out/runs", tmp_path / "elsewhere")
    assert len(missing_commands(config)) == 1
    missing = run_study(dataclasses.replace(config, train=False))
    version = re.escape(lengthwise.__version__)
    assert re.search(rf"is missing: not trained yet; its record differs in version \({version}\)", missing)
    shutil.move(runs, tmp_path / "out/runs")
    third = measured()
    assert third[0] > second[0]
    assert third[1] == second[1]


def test_a_run_with_a_record_needs_no_folder_and_is_trained_again_only_for_another_measurement(
    tmp_path, in_process, caplog
):
    trained, _ = in_process
    config = small(tmp_path, seeds=[1, 2])
    run_study(config)
    out = tmp_path / "out"
    before = json.loads((out / "study.json").read_text())
    shutil.rmtree(out / "runs")
    for path in (out / "records").glob("alibi-*.json"):  # as they were before the training had its own certificate
        record = json.loads(path.read_text())
        assert record.pop("training_born")
        record["born"] |= {"command": "lengthwise train", "measured_by": "lengthwise study"}
        path.write_text(json.dumps(record))
        old = record_module.RunRecord.read(path, record["key"])
        assert (old.born["command"], old.training_born) == ("lengthwise study", [])
    trained.clear()
    said = run_study(config)
    after = json.loads((out / "study.json").read_text())
    assert not trained
    assert "missing" not in said
    for name in ("rows", "speed", "notes", "settings", "missing"):
        assert after[name] == before[name], name
    assert len(list((out / "maps").iterdir())) == 2, "one picture an encoding, of the first seed"
    assert missing_commands(config) == []
    assert re.search("alibi-1 +measured +3 of 3", watch_study(config))
    assert len(missing_commands(small(tmp_path, seeds=[1, 2], steps=4))) == 4
    measured_otherwise = small(tmp_path, seeds=[1, 2], lengths=[16, 32], encodings=["alibi"])
    with caplog.at_level("INFO"):
        assert len(missing_commands(measured_otherwise)) == 2
    assert "alibi-1 is to be trained again: its record differs in measure" in caplog.text
    said = run_study(dataclasses.replace(measured_otherwise, train=False))
    assert "alibi-1 is missing: not trained yet; its record differs in measure" in said
    with caplog.at_level("INFO"):
        run_study(measured_otherwise)
    assert trained == ["alibi-1", "alibi-2"]
    assert "alibi-1 is trained again: its record differs in measure" in caplog.text


def test_a_picture_that_fails_is_named_and_drops_no_score(tmp_path, in_process, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no room for a map")

    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "position_maps", fail)
        said = run_study(small(tmp_path))
    assert "the heads of alibi-1337 could not be drawn: no room for a map" in said
    assert "no room for a map" in (tmp_path / "out/report.html").read_text()
    assert [row["encoding"] for row in json.loads((tmp_path / "out/study.json").read_text())["rows"]] == [
        "alibi",
        "learned",
    ]
    assert "could not be drawn" not in run_study(small(tmp_path)), "the next call draws them"
    assert len(list((tmp_path / "out/maps").glob("*.png"))) == 2


def test_a_study_reads_its_text_once_and_computes_each_interval_once(tmp_path, in_process, monkeypatch):
    calls = {"read_corpus": 0, "bootstrap": 0}

    def counted(name, function):
        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(evaluate_run, "read_corpus", counted("read_corpus", evaluate_run.read_corpus))
    monkeypatch.setattr(table_module, "bootstrap", counted("bootstrap", table_module.bootstrap))
    run_study(small(tmp_path, encodings=["alibi", "none", "learned"]))
    # learned has no cell at 64.
    assert calls == {"read_corpus": 1, "bootstrap": 5}


def test_the_sections_of_the_report_are_in_its_json(tmp_path, in_process):
    run_study(small(tmp_path, encodings=["alibi"], seeds=[1]))
    study = json.loads((tmp_path / "out/study.json").read_text())
    page = (tmp_path / "out/report.html").read_text()
    titles = [section["title"] for section in study["sections"]]
    assert titles[:3] == ["Summary", "Rise on the same tokens", "Perplexity by length"]
    assert re.findall(r"<h2>(.*?)</h2>", page) == titles
    table = study["sections"][2]["table"]
    assert table[0] == ["model", "32", "64", "rise at 64"]
    assert "| " + " | ".join(table[1]) + " |" in (tmp_path / "out/report.md").read_text()
    assert {"metric", "notes", "train_length", "rows", "speed", "missing", "settings", "seeds", "seconds", "born"} < {
        *study
    }


def test_every_option_of_training_and_evaluation_is_one_of_a_study():
    words = ["--learning-rate", "0.5", "--precision", "bfloat16", "--lengths", "12", "34", "--windows", "7"]
    options = dict(study_parser().parse_args([*words, "--seeds", "[1, 2]", "--no_train"]))
    config = StudyConfig.from_options(**{k: v for k, v in options.items() if k not in ("config", "plan", "watch")})
    assert config.training == TrainConfig(learning_rate=0.5, precision="bfloat16")
    assert (config.evaluation.lengths, config.evaluation.windows) == ([12, 34], 7)
    assert (config.seeds, config.train) == ([1, 2], False)


def test_seeds_share_a_row_and_tasks_and_stretched_models_have_theirs(tmp_path, in_process):
    config = small(tmp_path, encodings=["rope"], seeds=[1, 2], stretch=["yarn:2"], tasks=["copy"])
    run_study(config)
    found = json.loads((tmp_path / "out/study.json").read_text())
    assert [row["encoding"] for row in found["rows"]] == ["rope", "rope+window:32", "rope+yarn:2"]
    assert "| copy | rope | " in (tmp_path / "out/report.md").read_text()
    assert [(task["length"], len(task["seeds"])) for task in found["tasks"]] == [(32, 2), (64, 2)]


def test_the_plan_has_one_command_per_missing_run_and_each_parses_to_its_run(tmp_path, capsys):
    config = small(tmp_path, encoding_options={"alibi": {"slopes": "interleaved"}}, seeds=[1, 2])
    planned = missing_commands(config)
    assert len(planned) == 4
    words = shlex.split(planned[0])
    assert words[:2] == ["lengthwise", "train"]
    main([*words[1:], "--dry-run"])
    assert "alibi" in capsys.readouterr().out
    train(study_runs(config)[0].config)
    assert missing_commands(config) == planned[1:]


def test_schedules_and_compositions_are_runs_beside_encodings(tmp_path, in_process, capsys):
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 3}
    config = small(tmp_path, encodings=["rope:8,none", "rope+fox"], seeds=[1], sizes=sizes)
    assert [run.name for run in study_runs(config)] == ["rope8-none-1", "rope+fox-1"]
    main([*shlex.split(missing_commands(config)[0])[1:], "--dry-run"])
    assert "nano with rope:8,none" in capsys.readouterr().out
    run_study(config)
    found = json.loads((tmp_path / "out/study.json").read_text())
    assert {row["encoding"] for row in found["rows"]} == {"rope:8,none", "rope+fox"}
    assert len(list((tmp_path / "out/maps").glob("*.png"))) == 2


def test_a_run_that_another_study_trains_or_has_finished_has_not_failed(tmp_path, monkeypatch):
    (run,) = study_runs(small(tmp_path, encodings=["alibi"]))
    log = tmp_path / "alibi-1337.log"
    log.write_text("step 3\n")
    # The command ends with an error, as where another process has the lock of the run's folder.
    monkeypatch.setattr(type(run), "arguments", lambda self: ["train", "--steps", "none"])
    for state, failure in (("is_being_trained", "another process is training it"), ("is_finished", None)):
        with monkeypatch.context() as patch:
            patch.setattr(type(run), state, True)
            process = engine.TrainingProcess(run, log, 1)
            process.wait()
            assert process.outcome().failure == failure
    assert log.read_text().startswith("step 3\n")


def test_a_planned_command_trains_the_run_that_the_study_then_finds(tmp_path):
    (run,) = study_runs(small(tmp_path, encodings=["alibi"]))
    main(shlex.split(run.command)[1:])
    assert run.is_finished
    assert Run(run.config.out).config["encoding"] == "alibi"


def test_runs_in_their_own_processes_tell_their_memory_and_a_failing_one_its_last_words_while_others_go_on(tmp_path):
    failing, alibi = study_runs(small(tmp_path, encodings=["kerple", "alibi"]))
    failing = dataclasses.replace(failing, config=dataclasses.replace(failing.config, data=str(tmp_path / "nothing")))
    own = torch.ones(2**29)  # 2 GiB of this process, which are not a run's
    with StudyProgress([failing, alibi]) as progress:
        ended = train_runs([failing, alibi], out=tmp_path, engine=LocalPool(1), progress=progress)
    assert progress.done == {"kerple-1337": 3, "alibi-1337": 3}
    assert "exit code 2: lengthwise train: " in ended["kerple-1337"].failure
    assert "nothing" in ended["kerple-1337"].failure
    assert ended["alibi-1337"].failure is None
    assert 2**26 < ended["alibi-1337"].peak_bytes < own.nbytes
    assert read_outcome(tmp_path, alibi) == ended["alibi-1337"]
    assert (failing.is_finished, alibi.is_finished) == (False, True)
    # The number of jobs changes how many train at a time, and no number.
    (beside,) = study_runs(small(tmp_path, encodings=["alibi"], out=str(tmp_path / "beside")))
    with StudyProgress([beside]) as progress:
        train_runs([beside], out=tmp_path / "beside", engine=LocalPool(2), progress=progress)
    losses = [[line["loss"] for line in run.run.metrics] for run in (alibi, beside)]
    assert len(losses[0]) == 3
    # Threads add in another order; three steps of a small model keep that at rounding.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_as_many_runs_train_at_a_time_as_there_are_cores_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(execute.torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(execute.torch.cuda, "is_available", lambda: True)
    seven = study_runs(small(tmp_path, seeds=list(range(7))))[:7]
    assert parallel_jobs(small(tmp_path, device="cpu"), seven) == 5
    assert parallel_jobs(small(tmp_path, device="cpu"), seven[:3]) == 3
    assert parallel_jobs(small(tmp_path, device="cpu"), []) == 1
    assert parallel_jobs(small(tmp_path), seven) == 1
    assert parallel_jobs(small(tmp_path, jobs=6), seven) == 6


ENDING = [
    pytest.param(signal.SIGINT, ["alibi"], id="SIGINT"),
    pytest.param(signal.SIGTERM, ["alibi", "learned"], id="SIGTERM"),
    pytest.param(signal.SIGINT, ["alibi", "learned"], id="SIGINT to two", marks=pytest.mark.prove),
    pytest.param(signal.SIGHUP, ["alibi", "learned"], id="SIGHUP", marks=pytest.mark.prove),
]
"""SIGTERM and SIGHUP share a handler, which is tried on both below."""


@pytest.mark.parametrize(("number", "encodings"), ENDING)
def test_a_signal_ends_all_runs_with_the_study_each_with_its_checkpoint(tmp_path, number, encodings):
    config = small(tmp_path, encodings=encodings, steps=100_000, jobs=2)
    # What a shell starts in the background is told to ignore Ctrl-C, and by nohup the rest; these tests may be such.
    heard = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL)"
    imports = "from lengthwise.study.config import *; from lengthwise.study import run_study"
    study = subprocess.Popen([sys.executable, "-c", f"{heard}; {imports}; run_study({config!r})"], process_group=0)
    runs = [Path(run.config.out) for run in study_runs(config)]
    try:
        wait_until(lambda: all(Run.is_run(run) and len(Run(run).metrics) > 2 for run in runs))
        # To the whole group, as a terminal does.
        os.killpg(study.pid, number)
        study.wait(240)
    finally:
        study.terminate()  # whatever went wrong, nothing must go on training behind the tests
    assert study.wait(240) in ((1, -number) if number == signal.SIGINT else (128 + number,))
    for run in runs:
        assert not Run(run).is_being_written
        assert Run(run).checkpoints


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_study_exits_on_a_signal_unless_it_is_ignored(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as end, engine._exit_on_signals():
            signal.raise_signal(number)
        assert end.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as nohup does
        with engine._exit_on_signals():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


def wait_until(true, seconds: float = 240) -> None:
    """Slow machines are waited for; nothing here depends on how long it takes."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_papers_studies_parse_and_plan(path):
    chosen = study_parser().parse_args(["--config", str(path)])
    options = {name: value for name, value in dict(chosen).items() if name not in ("config", "plan", "watch")}
    config = StudyConfig.from_options(**options)
    planned = study_runs(config)
    assert len(planned) == len(config.encodings) * len(config.seeds)
    if config.paper in paper_tables()["tables"]:
        assert planned[0].resolved.length == 1024
        assert config.evaluation.lengths == paper_tables()["lengths"]
    elif config.paper is not None:
        assert planned[0].resolved.length == 512
        assert config.evaluation.lengths == paper_tables()["retrieval"]["lengths"]
        assert len(contrastive_runs(config, planned)) == len(planned)
    for name, value in yaml.safe_load(path.read_text()).items():
        assert value in [getattr(part, name, None) for part in (config, config.training, config.evaluation)]


def test_every_table_of_the_paper_has_a_study():
    tables = paper_tables()["tables"]
    assert {path.stem for path in CONFIGS} == {
        *tables,
        *("full-stdlib", "full-wikipedia", "full-tasks", "one-rate", "one-rate-adamw", "other-rates"),
        *("figures", "figures-dapev2", "encoders", "mldr-en"),
    }
    assert {yaml.safe_load(path.read_text()).get("paper") for path in CONFIGS} == {*tables, "mldr-en", None}
    assert tables["fineweb-edu-medium"]["cable"] == [17.00, 16.52, 15.97, 15.34, 15.41, 15.41]
    assert tables["wikitext-103-tiny"]["rope"] == [23.66, 22.26, 41.40, 114.77, 220.56, 375.62]


def test_the_papers_figures_stand_beside_ours(tmp_path, in_process):
    run_study(small(tmp_path, encodings=["alibi"], paper="wikitext-103-tiny"))
    assert "24.09 / -" in (tmp_path / "out/report.html").read_text()
    assert paper_rows(None, None) == []


def test_another_study_stands_beside_with_values_ranks_and_rises(tmp_path, in_process):
    other = {"title": "One rate", "rows": [{"encoding": "none", "values": {"32": 9.0, "64": 18.0}}]}
    other["rows"] += [{"encoding": name, "values": {"32": 7.0, "64": None}} for name in ("alibi", "rope")]
    settings = {"data": str(tmp_path / "corpus.txt"), "tokenizer": "bytes", "objective": "causal"}
    protocol = "perplexity; fair: the same 160 tokens at every length, each after at least three quarters of it"
    born = {"versions": {"lengthwise": lengthwise.__version__}}
    other |= {"metric": "perplexity", "train_length": 32, "settings": settings, "notes": [protocol], "born": born}

    def beside(**changes):
        (tmp_path / "study.json").write_text(json.dumps(other | changes))
        run_study(small(tmp_path, encodings=["none", "alibi"], beside=str(tmp_path)))
        study = json.loads((tmp_path / "out/study.json").read_text())
        (section,) = (section for section in study["sections"] if section["title"] == "Beside another study")
        return section

    section = beside()
    assert "There: One rate." in section["paragraphs"][0]
    head, none, alibi = section["table"]
    assert head == ["here / there", "perplexity at 32", "rank", "rise at 64"]
    assert [none[1].split(" / ")[1], none[2][-1], none[3].split(" / ")[1]] == ["9.00", "2", "+100.0%"]
    assert [alibi[1].split(" / ")[1], alibi[2][-1], alibi[3].split(" / ")[1]] == ["7.00", "1", "-"]
    rises = {"rise": {"length": 64, "seeds": [0.1, 0.3]}}
    section = beside(settings=settings | {"tokenizer": "gpt2"}, rows=[other["rows"][0] | rises])
    assert section["table"][0] == ["here / there", "rank", "rise at 64"]
    assert section["table"][1][2].endswith(" / +20.0%"), "a mean over seeds"
    assert section["paragraphs"][1].startswith("Ranks and rises only, since values of other tokens are not compared")
    assert section["paragraphs"][1].endswith(": tokenizer bytes / gpt2.")
    section = beside(born={"versions": {"lengthwise": "0.0.9"}})
    assert section["paragraphs"][1] == "There was measured with Lengthwise 0.0.9, which is not this version."
    section = beside(notes=["perplexity; paper"], rows=[{"encoding": "none", "values": {"32": 9.0, "128": 18.0}}])
    assert section["table"][0] == ["here / there", "rank", "rise at 64"]
    assert section["paragraphs"][1].endswith(f"lengths 32 to 64 / 32 to 128; protocol {protocol} / perplexity; paper.")
    for change, words in (
        ({"train_length": 128}, "of the same training length, 32, got 128"),
        ({"settings": settings | {"objective": "mlm"}}, "of the same objective, causal, got mlm"),
        ({"metric": "bits_per_byte"}, "of the same metric, perplexity, got bits_per_byte"),
    ):
        with pytest.raises(ValueError, match=f"--beside must be a study {words} in"):
            beside(**change)
    with pytest.raises(FileNotFoundError, match=r"--beside must be the folder of a finished study, got .*nowhere"):
        run_study(small(tmp_path, beside=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encodings": []}, "encodings of a study must have at least one"),
        ({"encodings": ["alibi", "alibi"]}, "encodings of a study must differ"),
        ({"seeds": [1, 1]}, "seeds of a study must differ"),
        ({"encodings": ["alibo"]}, "unknown encoding 'alibo'"),
        ({"encoding_options": {"ropey": {}}}, "unknown encoding 'ropey'"),
        ({"paper": "table 9"}, "unknown table of the paper 'table 9'"),
        ({"jobs": 0}, "jobs must be a positive int"),
        ({"preset": "giant"}, "unknown preset 'giant'"),
        ({"tasks": ["sing"]}, "unknown task 'sing'"),
        ({"stretch": ["yarn"]}, "TYPE:FACTOR"),
        ({"lengths": [0]}, "length must be a positive int"),
        ({"windows": 0}, "windows must be a positive int"),
        ({"stride": -1}, "stride must be a positive int"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(tmp_path, in_process, change, words):
    with pytest.raises(ValueError, match=words):
        run_study(small(tmp_path, **change))
    assert in_process[0] == []
