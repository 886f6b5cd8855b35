"""`lengthwise show`, as a user runs it."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from matplotlib.figure import Figure
from model_kit import loud_model, make_config
from train_kit import small_config

from lengthwise.cli import main
from lengthwise.data import load_tokenizer
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.model.configuration import PRESETS
from lengthwise.show.paper_figures import FIGURES
from lengthwise.train import train


@pytest.fixture
def little(monkeypatch, tmp_path):
    """GPT-2 Small in small, and a package without trained maps: the commands are the same."""
    monkeypatch.setitem(PRESETS, "small", {"n_layer": 2, "n_head": 2, "n_embd": 16})
    monkeypatch.setattr("lengthwise.show.trained_maps.FOLDER", tmp_path / "no trained maps")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a model and its tokenizer."""
    folder = tmp_path / "mine"
    tokenizer = load_tokenizer("bytes")
    torch.manual_seed(0)
    LengthwiseForCausalLM(make_config("fox", vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def shown(capsys, *arguments: object) -> str:
    main(["show", *map(str, arguments)])
    return capsys.readouterr().out


def refused(capsys, *arguments: object) -> str:
    """The line with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        main(["show", *map(str, arguments)])
    line = f"{ended.value.code}{capsys.readouterr().err}"
    assert "lengthwise show: " in line
    assert "Traceback" not in line
    return line


def test_an_encodings_name_draws_it_at_its_initial_parameters(little, tmp_path, capsys):
    out = shown(capsys, "kerple", "--out", tmp_path / "a.pdf", "--length", 41)
    assert "kerple: bias of GPT-2 Small at its initial parameters, layer 2, 41 tokens of held-out text" in out
    assert f"Wrote {tmp_path / 'a.pdf'}." in out
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_what_has_no_bias_is_drawn_by_its_scores_and_said_so(little, tmp_path, capsys):
    out = shown(capsys, "rope", "--out", tmp_path / "a.png", "--length", 41)
    assert "rope: scores" in out
    assert "(it adds no bias, so the scores)" in out


@pytest.mark.parametrize("options", [["--layer", "all"], ["--quantity", "profile"], ["--heads", "1-2", "--layer", "1"]])
def test_a_checkpoint_is_drawn_by_layer_head_and_view(checkpoint, tmp_path, capsys, options):
    shown(capsys, checkpoint, "--out", tmp_path / "a.png", "--length", 41, *options)
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_a_text_is_read_and_others_beside_it_tell_its_context(checkpoint, tmp_path, capsys):
    out = shown(capsys, checkpoint, "--text", "The sheep ate the ox.", "--out", tmp_path / "a.png")
    assert "fox: bias of mine, layer 2, 21 tokens of the given text." in out


def test_the_same_seed_shows_the_same_text_and_another_another(checkpoint, tmp_path, capsys):
    pictures = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        shown(capsys, checkpoint, "--out", tmp_path / f"{name}.png", "--length", 41, "--seed", seed)
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_several_are_drawn_side_by_side(little, checkpoint, tmp_path, capsys):
    out = shown(capsys, "alibi", checkpoint, "--out", tmp_path / "a.png", "--length", 41)
    assert "alibi: bias" in out
    assert "fox: bias of mine" in out


def test_a_foreign_checkpoint_without_tokenizer_reads_random_tokens_and_says_so(tmp_path, capsys):
    config = hf.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64)
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    out = shown(capsys, tmp_path / "gpt2", "--out", tmp_path / "a.png")
    assert "learned: scores of gpt2, layer 2 (it adds no bias, so the scores), 64 tokens of random tokens" in out
    line = refused(capsys, tmp_path / "gpt2", "--text", "x", "--out", tmp_path / "b.png")
    assert "a text needs a tokenizer, and gpt2 has none" in line


def test_all_of_the_papers_figures_come_from_one_command_some_from_runs_with_their_own_held_out_text(
    little, tmp_path, capsys
):
    loud_model("alibi", vocab_size=257).save_pretrained(tmp_path / "run")
    cable = train(small_config(tmp_path, "my-cable", steps=2, warmup=0))
    out = shown(capsys, tmp_path / "run", cable.folder, "--paper", "--out", tmp_path / "paper")
    assert [figure.number for figure in FIGURES] == list(range(8, 16))
    for figure in FIGURES:
        assert (tmp_path / "paper" / f"{figure.name}.png").is_file()
    said = (tmp_path / "paper" / "README.md").read_text()
    assert said.count("not trained: at its initial parameters") == 6
    assert "(figure-08-cable.png) (trained: my-cable, at length 33). CABLE's bias follows the tokens" in said
    assert "(figure-12-alibi.png) (trained: run, at length 23). ALiBi: a straight line" in said
    assert "Wrote 8 figures" in out
    assert "--force" in refused(capsys, "--paper", "--out", tmp_path / "paper")


@pytest.fixture
def captions(monkeypatch):
    """The captions of the paper's figures, of which only ALiBi's is drawn."""
    drawn: list[str] = []

    def noted(self, *, caption):
        drawn.append(caption)
        return Figure()

    monkeypatch.setattr("lengthwise.views.PositionMaps.paper_figure", noted)
    monkeypatch.setattr("lengthwise.show.paper.FIGURES", [figure for figure in FIGURES if figure.encoding == "alibi"])
    return drawn


def test_a_caption_says_what_is_not_as_in_the_paper_and_what_the_model_read(captions, tmp_path, capsys):
    options = {"slopes": "interleaved"}
    for name, changes in {"same": {"n_positions": 512}, "other": {"encoding_options": options}}.items():
        loud_model("alibi", vocab_size=257, **changes).save_pretrained(tmp_path / name)
        shown(capsys, tmp_path / name, "--paper", "--out", tmp_path / f"{name}-paper")
    same, other = captions
    assert "steepest in the first head; nothing is learned" in same
    assert same.endswith("Trained: same.")
    assert "steepest" not in other
    assert other.startswith("Figure 12. alibi with slopes='interleaved'. The bias of all 3 heads")
    assert other.endswith("Trained: other, at length 23.")
    assert all("on 512 tokens of random tokens (there is no tokenizer), seed 0;" in caption for caption in captions)


def test_two_models_of_one_of_the_papers_figures_are_refused(captions, tmp_path, capsys):
    for name in ("first", "second"):
        loud_model("alibi").save_pretrained(tmp_path / name)
    line = refused(capsys, tmp_path / "first", tmp_path / "second", "--paper", "--out", tmp_path / "paper")
    assert "one model for each figure, got first and second, both with 'alibi'" in line


def test_the_blocks_of_the_page_run_in_order():
    page = (Path(__file__).parents[1] / "docs/see.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "see.md", "exec"), scope)


def remote_code(folder):
    config = {"model_type": "strange", "auto_map": {"AutoConfig": "code.Strange", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "got nothing to show"),
        (["alibo"], "expected an encoding, a run.*got 'alibo'; did you mean 'alibi'"),
        (["nobody/nothing"], "got 'nobody/nothing', which cannot be loaded"),
        (["alibi", "--out", "a.gif"], r"must end in \.png, \.svg, \.pdf"),
        (["mine", "--layer", "3"], r"layer must be .* from -2 to 1"),
        (["mine", "--layer", "0"], "layer must be numbers from 1 on"),
        (["mine", "--heads", "4"], r"heads must be from Head 1 to Head 3 .*got Head 4 \(index 3\)"),
        (["mine", "--heads", "x"], "heads must be numbers from 1 on"),
        (["mine", "--quantity", "colour"], "quantity must be 'bias'"),
        (["mine", "--text", ""], "must have at least one token"),
        (["mine", "--length", "0"], "length must be a positive int"),
        (["empty"], "got 'empty', which has neither config.yaml nor config.json"),
        (["empty/config.txt"], "has neither"),
        (["remote"], "brings code of its own.*--trust-remote-code"),
        (["none", "--quantity", "bias"], "adds no"),
        (["mine", "--paper", "--out", "empty/config.txt"], "--out must be a folder"),
        (["--paper", "--out", "x.png"], "--out must be a folder, got 'x.png', the name of a file; use e.g. --out x"),
        (["--paper", "--length", "99"], "figures decide length"),
        (["--paper", "--detail", "1.1"], "figures decide detail"),
        (["--paper", "--seed", "3"], "--seed must be with runs or --initial"),
        (["--paper", "--by-step"], "--by-step must be without --paper"),
        (["--paper", "--style", "plain"], "style"),
        (["mine", "--initial"], "--initial must be with --paper"),
        (["mine", "--by-step", "--seed", "3"], "--seed must be without --by-step: .* their own text, got 3"),
        (["mine", "--by-step", "--trust-remote-code"], "--trust-remote-code must be without --by-step"),
        (["mine", "--detail", "1.²", "--out", "a.html"], "detail must be LAYER.HEAD from 1 on"),
        (["mine", "--by-step"], "--by-step must be of one run of `lengthwise train`, got mine"),
        (["mine", "alibi", "--style", "paper"], "--style paper must be of one model and one layer"),
        (["mine", "--layer", "all", "--style", "paper"], "--style paper must be of one model and one layer"),
        (["mine", "alibi", "--layer", "1-2"], "--layer must be one layer for several models and for profiles, got 2"),
        (["mine", "--layer", "all", "--quantity", "profile"], "--layer must be one layer .* for profiles, got 2"),
        (["mine", "--layer", "all", "--heads", "1"], "--heads must be of one layer"),
        (["mine", "--style", "paper", "--out", "a.html"], "--style must be left out for a page"),
        (["mine", "--paper"], "one of their encodings, .* got mine with 'fox'"),
    ],
)
def test_what_cannot_be_shown_is_answered_with_what_can(little, checkpoint, monkeypatch, capsys, arguments, words):
    home = checkpoint.parent
    monkeypatch.chdir(home)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (home / "empty").mkdir()
    (home / "empty/config.txt").write_text("x")
    (home / "remote").mkdir()
    remote_code(home / "remote")
    assert re.search(words, refused(capsys, *arguments))


def test_a_pickle_is_refused(tmp_path, capsys):
    hf.GPT2Config(vocab_size=97).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "weights must be in safetensors" in refused(capsys, tmp_path)


def test_a_text_longer_than_the_model_takes_is_refused(tmp_path, capsys):
    tokenizer = load_tokenizer("bytes")
    LengthwiseForCausalLM(make_config("learned", vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    line = refused(capsys, tmp_path, "--text", "x" * 70, "--quantity", "scores", "--out", tmp_path / "a.png")
    assert "64 tokens" in line
    assert "70" in line
