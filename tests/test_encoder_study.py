"""A study of encoders: masked loss and retrieval by length in one report, beside the paper's table."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_encoder_train import write_pairs
from test_study import in_process, small  # noqa: F401
from train_kit import finish

from lengthwise.evaluate.retrieval_table import RetrievalScore
from lengthwise.evaluate.statistics import t_interval
from lengthwise.study.beside import paper_retrieval_rows
from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import Engine, StudyProgress, TrainingJob, parallel_jobs, train_runs
from lengthwise.study.execute import run_study
from lengthwise.study.record import TrainingOutcome
from lengthwise.study.results import StudyResults
from lengthwise.study.runs import contrastive_runs, study_runs
from lengthwise.study.watch import missing_commands
from lengthwise.train import TrainConfig
from lengthwise.train.config import Recipe


def retrieval_folder(folder) -> str:
    """Six documents and four queries, as BEIR has them."""
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": str(i), "text": " ".join(f"{(i * 7 + j) % 23} crows" for j in range(20))} for i in range(6)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    queries = [{"_id": f"q{i}", "text": rows[i]["text"][:30]} for i in range(4)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels/test.tsv").write_text("q\td\ts\n" + "".join(f"q{i}\t{i}\t1\n" for i in range(4)))
    return str(folder)


def encoders(tmp_path, **changes: object):
    contrastive = {"data": write_pairs(tmp_path / "pairs.jsonl"), "steps": 2, "batch_tokens": 8 * 32, "warmup": 0}
    options = {
        "objective": "mlm",
        "retrieval": True,
        "retrieval_set": str(tmp_path / "set"),
        "contrastive": contrastive,
    }
    return small(tmp_path, **(options | changes))


def test_one_report_has_masked_loss_and_retrieval_by_length(tmp_path, in_process):  # noqa: F811
    trained, _ = in_process
    retrieval_folder(tmp_path / "set")
    hypotheses = {"alibi": {"ndcg_at_least": -1.0}, "learned": {"length_at_most": 32, "ndcg_below": 0.0}}
    config = encoders(tmp_path, paper="mldr-en", lengths=[32, 256], hypotheses=hypotheses)
    said = run_study(config)
    assert trained == ["alibi-1337", "learned-1337", "alibi-1337-retrieval", "learned-1337-retrieval"]
    assert "nDCG@10" in said
    page = (tmp_path / "out/report.html").read_text()
    for words in ("Pseudo-perplexity by length", "Retrieval by length", "Change of retrieval with length", "BM25"):
        assert words in page, words
    for words in ("nDCG@10 of documents of 256 tokens differs", "refused by: learned", "nDCG@10 above alibi"):
        assert words in (tmp_path / "out/report.md").read_text(), words
    for name in ("losses", "contrastive", "retrieval"):
        assert (tmp_path / f"out/{name}.png").is_file(), name
    assert "14.96 / -" in page, "the paper's Table 3"
    assert (tmp_path / "out/maps/alibi-1337.png").is_file()
    content = json.loads((tmp_path / "out/study.json").read_text())
    assert [(h["encoding"], h["verdict"]) for h in content["hypotheses"]] == [
        ("alibi", "held"),
        ("learned", "held"),
        ("learned", "not measured"),
    ]
    assert "--objective contrastive" in (tmp_path / "out/report.md").read_text()
    assert {score["name"] for score in content["retrieval"]} == {"BM25", *trained[2:]}
    refused = [score for score in content["retrieval"] if score["refused"]]
    assert [(score["name"], score["length"]) for score in refused] == [("learned-1337-retrieval", 256)]
    run_study(config)
    assert len(trained) == 4, "nothing is trained twice"
    answers = tmp_path / "set/qrels/test.tsv"
    answers.write_text(answers.read_text().replace("q0\t0", "q0\t5"))
    run_study(config)
    scores = json.loads((tmp_path / "out/study.json").read_text())["retrieval"]
    assert [score["ndcg"] for score in scores] != [score["ndcg"] for score in content["retrieval"]], "another set"
    assert missing_commands(config) == []


def test_a_hypothesis_on_retrieval_with_several_seeds_is_judged_by_student_s_t():
    later = [SimpleNamespace(name=f"rope-{seed}-retrieval", encoding="rope", seed=seed) for seed in range(3)]
    by_seed = zip(later, [(0.5, 0.2), (0.6, 0.5), (0.7, 0.5)], strict=True)
    retrieval = [
        RetrievalScore(run.name, length, "set", 9, ["a", "b"], [value] * 2, [value] * 2, [value] * 2)
        for run, values in by_seed
        for length, value in zip((16, 128), values, strict=True)
    ]
    results = StudyResults(
        config=SimpleNamespace(hypotheses={"rope": {"ndcg_below": -0.05}}),
        runs=[SimpleNamespace(resolved=SimpleNamespace(length=16))],
        table=SimpleNamespace(lengths=[16, 128]),
        tasks=[],
        outcomes={},
        missing={},
        undrawn={},
        seconds=0.0,
        later=later,
        retrieval=retrieval,
    )
    (judged,) = results.hypotheses()
    assert judged.values == pytest.approx([-0.3, -0.1, -0.2])
    assert judged.interval == pytest.approx(t_interval([-0.3, -0.1, -0.2]))
    assert judged.verdict == "not decided", "three seeds that were resampled would all be below"


def test_commands_of_contrastive_runs_come_after_those_that_they_start_from(tmp_path):
    commands = missing_commands(encoders(tmp_path))
    assert len(commands) == 4
    assert "--objective mlm" in commands[0]
    assert f"--start-from {tmp_path}/out/runs/alibi-1337" in commands[2]


class InTurn(Engine):
    """Ends the run that was started first, at every poll; those named fail."""

    jobs = 2

    def __init__(self, fails: str) -> None:
        self.fails, self.started, self.running = fails, [], []

    def start(self, run, log):
        self.started.append(run.name)
        self.running.append(run)
        return OneRun(self, run)


class OneRun(TrainingJob):
    def __init__(self, engine: InTurn, run) -> None:
        self.engine, self.run = engine, run

    def outcome(self):
        if self.engine.running[0] is not self.run:
            return None
        self.engine.running.pop(0)
        if self.run.name == self.engine.fails:
            return TrainingOutcome(1.0, 1, 1, "out of memory")
        finish(self.run)
        return TrainingOutcome(1.0, 1, 1)

    def stop(self):
        raise AssertionError("nothing is to be stopped")


def test_contrastive_runs_begin_when_their_masked_run_has_ended_and_not_if_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.study.engine.POLL_SECONDS", 0.0)
    config = encoders(tmp_path, encodings=["alibi", "rope", "cable"])
    runs = study_runs(config)
    every, engine = [*runs, *contrastive_runs(config, runs)], InTurn("rope-1337")
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert parallel_jobs(small(tmp_path, device="cpu"), every) == 3, "one that starts from another waits for it"
    with StudyProgress(every) as progress:
        ended = train_runs(every, out=tmp_path, engine=engine, progress=progress)
    names = [f"{run}-1337" for run in ("alibi", "rope", "cable")]
    assert engine.started == [*names, f"{names[0]}-retrieval", f"{names[2]}-retrieval"]
    assert ended["rope-1337-retrieval"].failure == "it starts from rope-1337, which failed"
    assert [outcome.failure for name, outcome in ended.items() if "rope" not in name] == [None] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "causal"}, "a study measures retrieval with --objective mlm"),
        ({"contrastive": {"encoding": "alibi"}}, "contrastive must have options of training, got 'encoding'"),
        ({"encodings": ["fox"]}, "'fox', which is causal only"),
    ],
)
def test_studies_that_cannot_be_are_named(tmp_path, changes, message):
    config = encoders(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        contrastive_runs(config, study_runs(config))


def test_options_of_causal_measurement_are_refused_before_encoders_are_trained(tmp_path, in_process):  # noqa: F811
    with pytest.raises(ValueError, match="--stride: for models that predict the next token, got --objective mlm"):
        run_study(encoders(tmp_path, stride=4))
    assert in_process[0] == []


def test_the_paper_s_retrieval_stands_beside_its_own_config_alone():
    assert paper_retrieval_rows(None, None) == []
    assert paper_retrieval_rows("fineweb-edu-medium", None) == []


def test_the_study_of_the_paper_s_table_has_the_runs_of_its_two_configs():
    configs = Path(__file__).parents[1] / "configs"
    options = yaml.safe_load((configs / "studies/mldr-en.yaml").read_text())
    config = StudyConfig.from_options(**options)
    runs = study_runs(config)
    stages = {"fineweb-edu-base-512": runs[0], "retrieval/msmarco-base-512": contrastive_runs(config, runs)[0]}
    for name, run in stages.items():
        own = TrainConfig(**yaml.safe_load((configs / f"{name}.yaml").read_text()))
        if own.objective == "mlm":
            own = dataclasses.replace(own, encoding="cable")
        else:
            own = dataclasses.replace(own, start_from=runs[0].config.out)
        recipe = {field.name for field in dataclasses.fields(Recipe)}
        recipe |= {"data", "objective", "preset", "mask_rate", "pooling", "temperature", "hard_negatives", "encoding"}
        assert {n: own.resolved().stored()[n] for n in recipe} == {n: run.resolved.stored()[n] for n in recipe}
