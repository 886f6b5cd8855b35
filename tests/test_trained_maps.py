"""Trained maps that come with the package: written from runs, drawn without a model, judged by their structure."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_kit import LENGTH, make_loud
from train_kit import small_config

from lengthwise.cli import main
from lengthwise.data import load_tokenizer
from lengthwise.inspect import position_maps
from lengthwise.loading import load_model, sample_tokens
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.runs import Run
from lengthwise.show.gallery import section, write_gallery
from lengthwise.show.options import SEQUENCES
from lengthwise.show.paper_figures import FIGURES, PaperFigure
from lengthwise.show.structure import COLOURS, Structure
from lengthwise.show.trained_maps import FOLDER, MOST_BYTES, Source, check_sizes, load_trained, write_trained
from lengthwise.train import train
from lengthwise.views import load_maps
from lengthwise.views.described_scores import ContentScores, NetworkBias

ROOT = Path(__file__).parents[1]
SOURCE = Source("a text of tests", "CC0", "abc1234")
REACH = 7
EVERY = pytest.mark.parametrize("figure", FIGURES, ids=[figure.maps_name for figure in FIGURES])


def make_run(folder: Path, figure: PaperFigure) -> Run:
    """What `lengthwise train` leaves behind, with loud weights in the place of trained ones."""
    tokenizer = load_tokenizer("bytes")
    options = dict(figure.options) | ({"reach": REACH} if figure.encoding == "t5-clamped" else {})
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = LengthwiseForCausalLM(LengthwiseConfig(encoding=figure.encoding, encoding_options=options, **sizes))
    make_loud(model)
    model.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    (folder / "final" / "seal.json").write_text('{"sha256": {}}')
    (folder / "config.yaml").write_text(f"encoding: {figure.encoding}\ndata: stdlib\nlength: 64\n")
    line = {"step": 9, "loss": 3.0, "tokens": 1234567, "held_out": {"64": 2.5}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return Run(folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run and the maps of every figure, and what was reported of them."""
    folder = tmp_path_factory.mktemp("trained")
    reports = {}
    for figure in FIGURES:
        run = make_run(folder / "runs" / figure.maps_name, figure)
        reports[figure] = write_trained(run.folder, SOURCE, folder=folder / "maps", length=LENGTH)
    return folder, reports


@EVERY
def test_a_file_holds_the_final_layer_as_what_it_is_made_of(written, figure):
    folder, reports = written
    maps = load_trained(figure, folder / "maps")
    loaded = load_model(folder / "runs" / figure.maps_name)
    sample = sample_tokens(loaded, length=LENGTH, count=SEQUENCES)
    exact = position_maps(loaded.model, sample.ids, quantity=figure.quantity, shown="first")
    assert (maps.encoding, maps.quantity, maps.layers, maps.tokens) == (figure.encoding, figure.quantity, (1,), None)
    assert (maps.maps[0].tiles, maps.maps[0].described is not None) == (None, True)
    ranges = exact.values.nan_to_num(0).amax((1, 2)) - exact.values.nan_to_num(0).amin((1, 2))
    errors = (maps.values - exact.values).abs().nan_to_num(0).amax((1, 2))
    # Beside the stated rounding, sums in another order: a few roundings of the largest score.
    slack = 64 * torch.finfo(torch.float32).eps * (1 + exact.values.nan_to_num(0).abs().amax((1, 2)))
    assert (errors <= maps.origin["rounding"] * ranges + slack).all()
    torch.testing.assert_close(maps.context_dependence, exact.context_dependence)
    for name, tensor in maps.maps[0].described.tensors().items():
        half = name.rpartition(".")[2] in ("q", "k")
        assert tensor.dtype == torch.float16 if half else tensor.dtype != torch.float16, name
    assert maps.origin["rounding"] < 0.5 / COLOURS
    assert {
        "tokens": 1234567,
        "loss": 2.5,
        "commit": "abc1234",
        "text": "a text of tests",
    }.items() <= maps.origin.items()
    assert "the maps hold no text" in maps.origin["licence"]
    assert "Trained on 1,234,567 tokens of a text of tests at length 64, held-out loss 2.500" in reports[figure]


@EVERY
def test_structure_is_that_of_the_papers_figure(written, figure):
    folder, reports = written
    expected = replace(figure, constant_from=figure.constant_from and REACH)
    structure = Structure.of(load_trained(figure, folder / "maps").maps[0])
    assert structure.deviations(expected) == []
    assert "Not as in" not in reports[figure]
    if figure.follows == "distance":
        assert max(structure.context) == 0
        assert max(structure.diagonals) == 0
    if figure.encoding == "t5-clamped":
        assert structure.constant_from == REACH


def test_a_structure_that_is_not_the_papers_is_named(written):
    folder, _ = written
    cable, alibi = (Structure.of(load_trained(FIGURES[place], folder / "maps").maps[0]) for place in (0, 4))
    by_place = {figure.encoding: figure for figure in FIGURES}
    assert [fault.partition(" must")[0] for fault in cable.deviations(by_place["alibi"])] == ["context", "diagonals"]
    assert "some head must follow the tokens" in alibi.deviations(by_place["cable"])[0]
    assert "constant from distance 5 on" in alibi.deviations(replace(by_place["t5-clamped"], constant_from=5))[0]


def test_scores_and_networks_stay_described(written):
    folder, _ = written
    kinds = [type(load_trained(figure, folder / "maps").maps[0].described) for figure in FIGURES]
    assert kinds.count(ContentScores) == 1
    assert kinds.count(NetworkBias) == 2
    assert "8 of 8 files" in check_sizes(folder / "maps")


def shown(capsys, *arguments: object) -> str:
    main(["show", *map(str, arguments)])
    return capsys.readouterr().out


def test_the_papers_figures_are_drawn_without_a_model_and_say_what_they_are(written, tmp_path, capsys, monkeypatch):
    folder, _ = written
    monkeypatch.setattr("lengthwise.show.trained_maps.FOLDER", folder / "maps")
    for name in ("initial_model", "load_model", "position_maps"):
        monkeypatch.setattr(
            f"lengthwise.show.paper.{name}", lambda *a, name=name, **k: pytest.fail(f"{name} was called")
        )
    out = shown(capsys, "--paper", "--out", tmp_path / "paper")
    assert out.count("(trained: comes with the package)") == 8
    assert out.count("Trained on 1,234,567 tokens of a text of tests") == 8
    assert len(list((tmp_path / "paper").glob("*.png"))) == 8


def test_figures_without_trained_maps_are_drawn_at_initial_parameters_and_named(
    written, tmp_path, capsys, monkeypatch, small_presets
):
    folder, _ = written
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "alibi.safetensors").write_bytes((folder / "maps" / "alibi.safetensors").read_bytes())
    monkeypatch.setattr("lengthwise.show.trained_maps.FOLDER", tmp_path / "maps")
    monkeypatch.setattr("lengthwise.show.paper.FIGURES", (FIGURES[1], FIGURES[4]))
    out = shown(capsys, "--paper", "--out", tmp_path / "paper", "--style", "annotated")
    assert out.count("not trained: at its initial parameters") == 1
    assert "since no trained maps of cable+dapev2 are at hand" in out
    assert "figure-12-alibi.png) (trained: comes with the package)" in out
    out = shown(capsys, "--paper", "--initial", "--out", tmp_path / "initial")
    assert out.count("(not trained: at its initial parameters)") == 2


@pytest.fixture
def small_presets(monkeypatch):
    from lengthwise.model.configuration import PRESETS

    monkeypatch.setitem(PRESETS, "small", {"n_layer": 2, "n_head": 2, "n_embd": 16})


@pytest.mark.parametrize("figure", FIGURES, ids=[figure.maps_name for figure in FIGURES])
def test_what_the_package_ships_has_the_structure_of_the_papers_figure(figure):
    maps = load_trained(figure)
    if maps is None:
        pytest.skip(f"no trained maps of {figure.encoding} come with the package yet")
    assert Structure.of(maps.maps[0]).deviations(figure) == []
    assert (maps.tokens, maps.heads, maps.maps[0].queries) == (None, 12, 512)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) <= MOST_BYTES


def test_a_run_that_was_trained_is_drawn_by_its_steps_and_its_last_maps_are_written(tmp_path, capsys):
    run = train(small_config(tmp_path, "moved", encoding="kerple", maps_every=4))
    out = shown(capsys, run.folder, "--by-step", "--out", tmp_path / "moved.png")
    assert "kerple: bias of moved, layer 2, after step 0, 4, 8, 11." in out
    assert (tmp_path / "moved.png").stat().st_size > 10_000
    with pytest.raises(SystemExit) as ended:
        shown(capsys, run.folder, "--by-step", "--layer", "all")
    assert "--by-step must be of one layer" in f"{ended.value.code}{capsys.readouterr().err}"
    write_trained(run.folder, SOURCE, folder=tmp_path / "maps", length=33)
    (kerple,) = (figure for figure in FIGURES if figure.maps_name == "kerple")
    maps, last = load_trained(kerple, tmp_path / "maps"), run.metrics[-1]
    assert (maps.origin["tokens"], maps.origin["loss"]) == (last["tokens"], last["held_out"]["33"])
    torch.testing.assert_close(maps.values, load_maps(run.maps[-1]).only().values, equal_nan=True)
    for path in run.maps[1:]:
        path.unlink()
    with pytest.raises(SystemExit) as ended:
        shown(capsys, run.folder, "--by-step")
    assert "two snapshots of a run or more, got 1" in f"{ended.value.code}{capsys.readouterr().err}"


def test_the_gallery_states_numbers_of_the_maps(written, tmp_path, monkeypatch):
    folder, _ = written
    monkeypatch.setattr("lengthwise.show.trained_maps.FOLDER", folder / "maps")
    assert "8 pictures and page.html" in write_gallery(tmp_path)
    text = (tmp_path / "gallery.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / link).is_file(), link
    assert text.count("![") == 8
    # ALiBi of three heads at a distance of 28: 28 times 2 ** (-8/3), 2 ** (-16/3) and 2 ** -8.
    minus = "\N{MINUS SIGN}"
    assert f"| alibi | {minus}4.4 to 0 | {minus}0.69 to 0 | {minus}0.11 to 0 |" in text
    sentence = f"Least values {minus}4.4 to {minus}0.11, greatest 0 over the heads; context 0 in every head"
    assert sentence in text.replace("\n", " ")
    page = json.loads(re.search(r'id="data">(.*?)</script>', (tmp_path / "gallery/page.html").read_text(), re.S)[1])
    assert [model["encoding"] for model in page["models"]] == [figure.encoding for figure in FIGURES]
    monkeypatch.setattr("lengthwise.show.trained_maps.FOLDER", tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"docs/trained_maps\.py"):
        write_gallery(tmp_path)


def test_the_gallery_says_up_to_which_row_the_diagonals_of_fire_are_uniform():
    (fire,) = (figure for figure in FIGURES if figure.encoding == "fire")
    maps = load_trained(fire)
    lines = maps.maps[0].described
    # Of factor = 1 / (log(|c| L + 1) + 1e-6) in the first rows, and curve = log(|c| distance + 1) at distance 1.
    c = lines.curve.table[0, 1 - lines.curve.first].double().expm1()
    learned = float((1 / lines.factor[0, 0].double() - 1e-6).expm1() / c)
    structure = Structure.of(maps.maps[0])
    assert structure.uniform_to == int(learned) < maps.maps[0].queries - 1
    sentence = (
        f"L is learned, and here it is {int(learned)} (rounded down): rows {int(learned) + 1} to 511 are stretched"
    )
    assert sentence in section(fire, maps, structure).replace("\n", " ")
    assert sentence in (ROOT / "docs/gallery.md").read_text().replace("\n", " ")


@pytest.mark.parametrize("name", ["trained_maps", "gallery"])
def test_the_scripts_of_the_docs_can_be_loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
