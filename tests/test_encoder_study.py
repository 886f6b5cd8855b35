"""A study of encoders: masked loss and retrieval by length in one report, beside the paper's table."""

import json

import pytest
from test_encoder_train import write_pairs
from test_study import in_process, small  # noqa: F401

from lengthwise.study.execute import run_study
from lengthwise.study.report import paper_retrieval_rows
from lengthwise.study.runs import contrastive_runs, missing_commands, study_runs


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
    config = encoders(tmp_path, paper="mldr-en")
    said = run_study(config)
    assert trained == ["alibi-1337", "learned-1337", "alibi-1337-retrieval", "learned-1337-retrieval"]
    assert "nDCG@10" in said
    page = (tmp_path / "out/report.html").read_text()
    for words in ("Pseudo-perplexity by length", "Retrieval by length", "Change of retrieval with length", "BM25"):
        assert words in page, words
    assert "14.96 / -" in page, "the paper's Table 3"
    assert (tmp_path / "out/maps/alibi-1337.png").is_file()
    content = json.loads((tmp_path / "out/study.json").read_text())
    assert {score["name"] for score in content["retrieval"]} == {"BM25", *trained[2:]}
    refused = [score for score in content["retrieval"] if score["refused"]]
    assert [(score["name"], score["length"]) for score in refused] == [("learned-1337-retrieval", 64)]
    run_study(config)
    assert len(trained) == 4, "nothing is trained twice"
    assert missing_commands(config) == []


def test_commands_of_contrastive_runs_come_after_those_that_they_start_from(tmp_path):
    commands = missing_commands(encoders(tmp_path))
    assert len(commands) == 4
    assert "--objective mlm" in commands[0]
    assert f"--start-from {tmp_path}/out/runs/alibi-1337" in commands[2]


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


def test_the_paper_s_retrieval_stands_beside_its_own_config_alone():
    assert paper_retrieval_rows(None, None) == []
    assert paper_retrieval_rows("fineweb-edu-medium", None) == []
