"""What a study says of its results: only what was measured, where it was expected, on the same tokens."""

import math

import pytest

from lengthwise.evaluate import LengthTable, Score
from lengthwise.evaluate.retrieval_table import RetrievalScore
from lengthwise.evaluate.statistics import Interval, wilson
from lengthwise.study.config import StudyConfig
from lengthwise.study.results import StudyResults, TaskShare
from lengthwise.study.runs import contrastive_runs, study_runs


def results_of(tmp_path, scores=(), **changes) -> StudyResults:
    """Of runs trained at 128 tokens."""
    plain = {"out": str(tmp_path / "out"), "encodings": ["rope"], "seeds": [1, 2]}
    config = StudyConfig.from_options(**(plain | changes))
    runs = study_runs(config)
    table = LengthTable(scores, rows={run.name: (run.encoding, run.seed) for run in runs}) if scores else None
    retrieval, later = [], []
    if config.evaluation.retrieval:
        later = contrastive_runs(config, runs)
    return StudyResults(config, runs, table, [], {}, {}, {}, 0.0, later, retrieval)


def rope_scores(lengths: dict[int, float], *, protocol="fair", seeds=(1, 2)) -> list[Score]:
    """Of two documents of five tokens; another protocol than "fair" scores other tokens at each length."""
    own = {"documents": [0, 1], "tokens": [5, 5], "bytes": [9, 9]}
    return [
        Score(
            f"rope-{seed}",
            length,
            protocol,
            "x",
            "y",
            targets="same" if protocol == "fair" else str(length),
            nats=[5 * loss + seed / 1000] * 2,
            **own,
        )
        for seed in seeds
        for length, loss in lengths.items()
    ]


@pytest.mark.parametrize(
    ("lengths", "verdict"),
    [({128: 2.0, 256: 2.0}, "not measured"), ({128: 2.0, 256: 2.5, 1024: 2.0}, "held"), ({1024: 2.0}, "not measured")],
)
def test_a_hypothesis_is_judged_at_eight_times_the_training_length_and_nowhere_else(tmp_path, lengths, verdict):
    results = results_of(tmp_path, rope_scores(lengths), hypotheses={"rope": {"at_most": 0.01}})
    (judged,) = results.hypotheses()
    assert judged.verdict == verdict
    assert len(judged.values) == (2 if verdict == "held" else 0)


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_a_rise_is_measured_on_the_same_tokens_alone_with_one_seed_as_with_two(tmp_path, seeds):
    hypotheses = {"rope": {"at_most": 0.01}}
    for protocol, verdict in (("paper", "not measured"), ("fair", "held")):
        scores = rope_scores({128: 2.0, 1024: 2.0}, protocol=protocol, seeds=seeds)
        results = results_of(tmp_path, scores, seeds=seeds, hypotheses=hypotheses)
        assert [judged.verdict for judged in results.hypotheses()] == [verdict]
        assert (results.rise("rope", 1024) is None) == (verdict == "not measured")
        assert len(results.seed_rises("rope", 1024)) == (0 if protocol == "paper" else len(seeds))


@pytest.mark.parametrize(
    ("tried", "bound", "verdict"),
    [
        ({128: None}, 128, "not decided"),
        ({128: None, 256: "the table ends"}, 128, "held"),
        ({128: None, 256: None}, 128, "failed"),
        ({128: None, 256: None}, 256, "not decided"),
        ({128: "no memory"}, 128, "not measured"),
    ],
)
def test_how_long_documents_may_be_is_known_only_where_longer_ones_were_tried(tmp_path, tried, bound, verdict):
    mlm = {"objective": "mlm", "retrieval": True, "seeds": [1]}
    results = results_of(tmp_path, hypotheses={"rope": {"length_at_most": bound}}, **mlm)
    (run,) = results.later
    for length, refused in tried.items():
        own = {} if refused else {"groups": ["a", "b"], "ndcg": [0.5, 0.5]}
        results.retrieval.append(RetrievalScore(run.name, length, "set", 9, refused=refused, **own))
        # Words find documents of any length, which says nothing of the encoding.
        results.retrieval.append(RetrievalScore("BM25", length, "set", 9, ["a", "b"], [0.5, 0.5]))
    results.retrieval.append(RetrievalScore("BM25", 512, "set", 9, ["a", "b"], [0.5, 0.5]))
    (judged,) = results.hypotheses()
    assert judged.verdict == verdict


GIVEN = {"learning_rate": 0.02}


@pytest.mark.parametrize(
    ("changes", "is_test"),
    [
        ({"data": "corpus.txt"}, True),
        ({"data": "corpus.txt", "rates": {"rope": GIVEN, "cable": GIVEN}}, None),
        ({"data": "corpus.txt", "rates": {"rope": GIVEN}}, None),
        ({"rates": {"rope": GIVEN}}, False),
        ({"rates": {"rope": GIVEN, "cable": GIVEN}}, None),
    ],
)
def test_a_study_is_a_test_only_where_the_choice_of_every_rate_is_known(tmp_path, changes, is_test):
    results = results_of(tmp_path, encodings=["rope", "cable"], **changes)
    assert results.is_test is is_test
    assert results.as_json()["rates"]["is_test"] is is_test


def test_what_runs_share_stands_apart_from_what_each_has_of_its_own(tmp_path):
    # cable's rates were chosen, and rope has twice the recipe's for the model.
    results = results_of(
        tmp_path, encodings=["rope", "cable", "rope:64,none"], encoding_options={"rope": {"part": 0.5}}
    )
    content = results.as_json()
    settings, runs = content["settings"], content["runs"]
    assert (settings["data"], settings["steps"], settings["optimizer"]) == ("stdlib", 400, "muon")
    for name in ("learning_rate", "encoding_learning_rate", "encoding_options", "layers", "encoding", "seed"):
        assert name not in settings
    assert list(runs) == [f"{name}-{seed}" for seed in (1, 2) for name in ("rope", "cable", "rope64-none")]
    for run in results.runs:
        assert settings | runs[run.name] == run.resolved.stored()
        assert runs[run.name]["learning_rate"] == run.resolved.learning_rate
    same = results_of(tmp_path, encodings=["rope", "cable"], learning_rate=0.01, encoding_learning_rate=0.1).as_json()
    assert (same["settings"]["learning_rate"], same["settings"]["encoding_learning_rate"]) == (0.01, 0.1)
    assert same["runs"]["cable-1"]["encoding_learning_rate"] == 0.1, "a run's rates are there in any case"


def test_seeds_that_agree_have_the_interval_of_their_examples():
    def share(*exact: int) -> TaskShare:
        return TaskShare("copy", "rope", 128, {seed: [count, 100] for seed, count in enumerate(exact)}, 0.5, None)

    assert share(0, 0, 0).interval == wilson(0, 300)
    assert share(100, 100).interval == wilson(200, 200)
    assert share(0, 0, 0).as_json()["intervals_over"] == share(7).as_json()["intervals_over"] == "examples"
    assert share(0, 0, 9).as_json()["intervals_over"] == "seeds"
    assert share(0, 100).interval == Interval(0.0, 1.0)
    assert share(7).interval == wilson(7, 100)
    nothing = TaskShare("copy", "rope", 128, {}, math.nan, "too long")
    assert math.isnan(nothing.interval.low)
