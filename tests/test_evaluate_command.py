"""`lengthwise evaluate`, as a user runs it."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from model_kit import loud_model
from rounding import EPS
from train_kit import in_processes
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

import lengthwise as lw
from lengthwise.cli import main
from lengthwise.data import load_tokenizer
from lengthwise.evaluate import memory, run
from lengthwise.runs import begin, seal

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints, one text."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for case in ("rope", "learned", "dape"):
        loud_model(case, vocab_size=257, n_positions=37).save_pretrained(folder / case)
        load_tokenizer("bytes").save_pretrained(folder / case)
    (folder / "text.txt").write_text("".join(f"{n} crows, {n * n % 89} ships\n" for n in range(2000)))
    return folder


def evaluate(folder: Path, *words: str) -> None:
    main(["evaluate", "--text", str(folder / "text.txt"), "--windows", "5", *words])


def test_the_table_is_on_the_terminal_and_in_every_form(folder, tmp_path, capsys):
    sources = [str(folder / "rope"), f"table={folder / 'learned'}"]
    more = ["--tasks", "copy", "--examples", "3", "--out", str(tmp_path)]
    evaluate(folder, *sources, "--lengths", "20", "37", "74", *more)
    said = capsys.readouterr().out
    for name in ("rope", "table"):
        assert re.search(rf"^{re.escape(name)} ", said, re.MULTILINE)
    assert re.search("table at 74: .*ends at 37", said)
    assert re.search(r"^copy +rope", said, re.MULTILINE)
    scores = json.loads((tmp_path / "scores.json").read_text())
    value = next(c["value"] for c in scores["cells"] if c["model"] == "rope" and c["length"] == 74)
    assert f"{value:,.0f}" in said or f"{value:.2f}" in said
    assert {"command", "commit", "machine"} <= scores["born"].keys()
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".md", ".tex", ".png"}
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--protocol", "paper", "--stride", "9"], "--stride is for --protocol fair and sliding, got 9 with"),
        (["--examples", "3"], "--examples is for --tasks, got 3 without; give e.g. --tasks copy"),
    ],
)
def test_options_that_nothing_would_come_of_are_refused(folder, words, message):
    with pytest.raises(SystemExit, match=message):
        evaluate(folder, str(folder / "rope"), "--lengths", "20", *words)


def test_files_that_only_an_earlier_evaluation_has_are_removed_and_no_others(folder, tmp_path):
    words = [str(folder / "rope"), "--lengths", "20", "--out", str(tmp_path)]
    (tmp_path / "tasks.json").write_text("the user's own")
    evaluate(folder, *words)
    assert (tmp_path / "tasks.json").is_file(), "there was no earlier evaluation"
    (tmp_path / "control.png").touch()
    (tmp_path / "notes.png").touch()
    before = {path.name for path in tmp_path.iterdir()}
    evaluate(folder, *words)
    assert before - {path.name for path in tmp_path.iterdir()} == {"tasks.json", "control.png"}


def test_stretched_models_stand_beside_the_control_the_trained_length_and_tasks_that_need_far_text(
    folder, tmp_path, capsys
):
    sources = [str(folder / "rope"), f"table={folder / 'learned'}"]
    words = ["--stretch", "yarn:4", "self-extend:4", "--lengths", "20", "74", "--examples", "1", "--out", str(tmp_path)]
    evaluate(folder, *sources, *words)
    said = capsys.readouterr().out
    head = said.splitlines()[0].split("  ")
    assert [word.strip() for word in head if word.strip()] == [
        *("model", "20", "37", "74", "holds to", "against the control at 74"),
        *("passkey at 74", "recall at 74"),
    ]
    for name in ("rope", "rope+window:37", "rope+yarn:4", "rope+self-extend:4"):
        assert re.search(rf"^{re.escape(name)}  +\S+ \(-\)", said, re.MULTILINE), name
        assert len(re.findall(rf"^(?:passkey|recall) +\d+% +{re.escape(name)} ", said, re.MULTILINE)) == 10
    assert re.search(r"^table  .* -  ", said, re.MULTILINE), "a table of positions ends, and no length is added for it"
    assert "no 95 % intervals: the scored tokens are of one document" in said
    assert "memory of rope: " in said
    assert re.search(r"^rope\+window:37 .* the control  ", said, re.MULTILINE)
    assert re.search(r"^rope\+yarn:4 .* [+-]\d+\.\d% \(-\)  ", said, re.MULTILINE)
    assert (tmp_path / "control.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")
    holds = json.loads((tmp_path / "scores.json").read_text())["holds"]["rope"]
    assert holds["low"] <= holds["length"] <= holds["high"]


def saved(model, folder: Path) -> str:
    model.save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def test_a_model_that_refuses_a_way_to_stretch_is_measured_without_it_and_a_note_says_why(folder, tmp_path, capsys):
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=37, **sizes))
    scaled = {"encoding_options": {"scaling": {"type": "yarn", "factor": 2.0}}}
    sources = [
        saved(lw.fit(llama, "alibi"), tmp_path / "fitted"),
        saved(loud_model("rope", vocab_size=257, n_positions=37, encoding=None, layers="rope:9"), tmp_path / "near"),
        saved(loud_model("rope", vocab_size=257, n_positions=37, **scaled), tmp_path / "scaled"),
        saved(loud_model("rope", vocab_size=257, n_positions=16), tmp_path / "short"),
        str(folder / "learned"),
    ]
    evaluate(folder, *sources, "--stretch", "yarn:4", "rerope:20", "--tasks", "copy", "--lengths", "20", "37")
    said = capsys.readouterr().out
    table = said.partition("\n\n")[0]
    rows = [line.split("  ")[0] for line in table.splitlines()[1:]]
    assert rows == [
        *("fitted", "near", "scaled", "scaled+window:37", "scaled+rerope:20"),
        *("short", "short+window:16", "short+yarn:4", "learned"),
    ]
    every = "without window:37, yarn:4, rerope:20: "
    for note in (
        f"fitted {every}LlamaForCausalLM has attention of ours in place already",
        f"near {every}stretching needs RoPE in layers that see beyond the trained length, 37",
        "scaled without yarn:4: a scaling needs a RoPE without one",
        "short without rerope:20: 'rerope:W' must leave distances below the trained length, 16",
        f"learned {every}stretching needs RoPE",
    ):
        assert said.count(f"\n{note}") == 1, note


def test_missing_answers_and_places_have_their_reasons_in_the_notes(folder, tmp_path, capsys):
    dynamic = saved(loud_model("rope-dynamic", vocab_size=257, n_positions=37), tmp_path / "dynamic")
    options = ["--tasks", "copy", "--examples", "3", "--lengths", "5", "74", "--by-position"]
    evaluate(folder, str(folder / "rope"), f"table={folder / 'learned'}", dynamic, *options)
    said = capsys.readouterr().out
    assert re.search("^copy at 5 of rope, table, dynamic: copy has no example of 5 tokens", said, re.MULTILINE)
    assert re.search("^copy at 74 of table: .*ends at 37", said, re.MULTILINE)
    assert re.findall("^(.*) without losses at every place", said, re.MULTILINE) == ["dynamic"]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("nowhere", "expected an encoding, a run, a checkpoint folder or a name on the hub"),
        ("mute", "which has no tokenizer"),
        ("cable", "got the encoding 'cable'"),
        ("masked", "--stretch, --tasks: for models that predict the next token, got masked, an encoder"),
    ],
)
def test_all_sources_are_checked_before_the_first_is_measured(folder, tmp_path, monkeypatch, last, message):
    if last == "mute":
        loud_model("rope", vocab_size=257).save_pretrained(tmp_path / last)
    if last == "masked":
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
        saved(BertForMaskedLM(BertConfig(vocab_size=257, **sizes)), tmp_path / last)
    monkeypatch.setattr(run, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    source = last if last == "cable" else str(tmp_path / last)
    with pytest.raises(SystemExit, match=message):
        evaluate(folder, str(folder / "rope"), source, "--lengths", "20", "--stretch", "yarn:2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rope", "rope"], "names must differ, got 'rope' twice; use NAME=FOLDER"),
        (["nowhere"], "expected an encoding, a run, a checkpoint folder or a name on the hub"),
        (["rope", "--lengths", "99999"], "one token more than the longest length"),
        (["rope", "--tasks", "sing"], "unknown task 'sing'"),
        (["rope", "--stretch", "yarn"], "TYPE:FACTOR, such as 'yarn:8', got 'yarn'"),
        (["rope", "--stretch", "rerope:99"], "below the trained length, 37, as they are, got 99"),
        (["unfinished"], "finished"),
    ],
)
def test_bad_input_ends_with_a_sentence_and_not_with_a_traceback(folder, words, message):
    (folder / "unfinished").mkdir(exist_ok=True)
    (folder / "unfinished/config.yaml").write_text("version: 1\n")
    with pytest.raises(SystemExit) as stopped:
        evaluate(folder, str(folder / words[0]), *(str(folder / w) if w == "rope" else w for w in words[1:]))
    assert message in str(stopped.value)
    assert str(stopped.value).startswith("lengthwise evaluate: ")


def test_no_runs_at_all_is_said():
    with pytest.raises(SystemExit, match="to evaluate, got none"):
        main(["evaluate", "--lengths", "20"])


def test_the_example_of_the_docs_runs():
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/measure.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, "measure.md", "exec"), {})


def test_a_model_that_cannot_be_evaluated_is_refused(folder, tmp_path):
    loud_model("rope", vocab_size=257).save_pretrained(tmp_path / "mute")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=257, **sizes)).save_pretrained(tmp_path / "encoder")
    load_tokenizer("bytes").save_pretrained(tmp_path / "encoder")
    for source, words in (
        ("cable", "got the encoding 'cable'; name a run"),
        (str(tmp_path / "mute"), "which has no tokenizer"),
        (str(tmp_path / "encoder"), "which sees tokens before it predicts them"),
    ):
        with pytest.raises(SystemExit, match="expected a trained causal language model.*" + words):
            evaluate(folder, source, "--lengths", "20")


def trained_run(folder: Path, **config: object) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    partial = begin(folder / "final")
    saved(loud_model("rope", vocab_size=257, n_positions=37), partial)
    seal(partial, {})
    return str(folder)


def test_text_that_a_run_was_trained_on_is_no_held_out_text_of_it(folder, tmp_path, capsys):
    text, other = folder / "text.txt", tmp_path / "other.txt"
    # Too short for a window in the twentieth that is held out of it.
    other.write_text(text.read_text()[:300])
    whole = trained_run(tmp_path / "whole", data=str(text), held_out=str(other))
    words = rf"must be text that whole was not trained on, got .*; give --text {re.escape(str(other))}"
    with pytest.raises(SystemExit, match=words):
        evaluate(folder, whole, "--lengths", "20")
    plain = trained_run(tmp_path / "plain", data=str(text), held_out=None)
    evaluate(folder, plain, "--lengths", "20")
    evaluate(folder, whole, plain, "--lengths", "20", "--text", str(other))
    assert f"text: {other}; " in capsys.readouterr().out
    both = trained_run(tmp_path / "both", data=str(other), held_out=None)
    with pytest.raises(SystemExit, match="one token more than the longest length"):
        evaluate(folder, whole, both, "--lengths", "20", "--text", str(other))


def test_tasks_that_a_model_cannot_take_are_json_of_every_reader(folder, tmp_path):
    evaluate(folder, str(folder / "rope"), "--lengths", "5", "--tasks", "copy", "--out", str(tmp_path))
    (score,) = json.loads((tmp_path / "tasks.json").read_text(), parse_constant=pytest.fail)
    assert score["tokens"] is None
    assert "no example of 5 tokens" in score["refused"]


def test_a_figure_that_cannot_be_drawn_leaves_the_scores(folder, tmp_path, capsys):
    evaluate(folder, str(folder / "learned"), "--lengths", "74", "--out", str(tmp_path))
    assert "learned at 74: " in capsys.readouterr().out
    assert (tmp_path / "scores.json").exists()
    assert not (tmp_path / "lengths.png").exists()


def test_two_processes_that_share_each_text_give_the_numbers_of_one(folder, tmp_path, capfd):
    words = [str(folder / "rope"), "--lengths", "3", "20", "1501", "--by-position"]

    def measure(name):
        evaluate(folder, *words, "--out", str(tmp_path / name))

    assert in_processes(lambda: measure("one")) == [0]
    alone = capfd.readouterr()
    assert in_processes(lambda: measure("two"), 2) == [0, 0]
    together = capfd.readouterr()
    assert together.out.count("holds to") == alone.out.count("holds to"), "one process speaks"
    one, two = (json.loads((tmp_path / name / "scores.json").read_text())["cells"] for name in ("one", "two"))
    assert [cell["length"] for cell in two] == [3, 20, 1501]
    for mine, theirs in zip(two, one, strict=True):
        # A sum of some hundred losses, each of logits that are sums of 24 numbers.
        assert math.log(mine["value"]) == pytest.approx(math.log(theirs["value"]), rel=64 * EPS)


def test_processes_of_machines_with_unlike_memory_agree_on_how_to_read_a_window(folder, tmp_path, capfd):
    def measure():
        def some_memory(model):
            # Of the second process, half has room for chunks, and for no part of a window.
            chunks = memory.bytes_needed(model, length=1501, scored=1501, chunk=memory.SMALLEST_CHUNK)
            return 2 * chunks if os.environ["RANK"] == "1" else 10**12

        memory.memory_of = some_memory
        evaluate(folder, str(folder / "rope"), "--lengths", "1501", "--out", str(tmp_path))

    assert in_processes(measure, 2) == [0, 0]
    assert "each of 2 processes measures all of a window of 1,501: only its chunks fit" in capfd.readouterr().err
    (cell,) = json.loads((tmp_path / "scores.json").read_text())["cells"]
    assert math.isfinite(cell["value"])


def test_a_model_that_cannot_be_spread_is_refused_by_name_and_costs_no_other_its_numbers(folder, tmp_path, capfd):
    words = [str(folder / "rope"), str(folder / "dape"), "--lengths", "3", "20", "--out", str(tmp_path)]
    assert in_processes(lambda: evaluate(folder, *words), 2) == [0, 0]
    assert "dape at 20: 'dape' replaces the scores" in capfd.readouterr().out
    cells = json.loads((tmp_path / "scores.json").read_text())["cells"]
    finite = {(cell["model"], cell["length"]) for cell in cells if cell["value"] is not None}
    assert finite == {("rope", 3), ("rope", 20), ("dape", 3)}, "a window of three tokens is not shared"


def test_chunks_and_several_processes_are_refused_together(folder, capfd):
    words = [str(folder / "rope"), "--lengths", "20", "--chunk", "5"]
    assert in_processes(lambda: evaluate(folder, *words), 2) == [1, 1]
    assert "chunks go through a cache, which processes cannot share" in capfd.readouterr().err
