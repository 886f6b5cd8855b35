"""`lengthwise show --out heads.html`, as a user runs it."""

import json
import re
from pathlib import Path

import pytest
import torch
from test_serve import make_checkpoint

from lengthwise.cli import main
from lengthwise.inspect import load_maps, position_maps
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.model.modeling import LengthwiseModel
from lengthwise.show.options import parse_heads
from lengthwise.show.page import CELLS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A checkpoint, and a run with two snapshots that has it as its final model."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "model", "kerple")
    make_checkpoint(folder / "run" / "final", "cable")
    (folder / "run" / "config.yaml").write_text("encoding: cable\ndata: stdlib\n")
    (folder / "run" / "final" / "seal.json").write_text('{"sha256": {}}')
    (folder / "run" / "maps").mkdir()
    model = LengthwiseForCausalLM.from_pretrained(folder / "run" / "final")
    for step in (0, 250):
        maps = position_maps(model, torch.arange(19)[None], "all")
        maps.save(folder / "run" / "maps" / f"step-{step:08d}.safetensors")
    return folder


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def test_a_page_has_all_layers_every_view_and_single_cells_of_the_heads_that_are_named(models, tmp_path, capsys):
    path = tmp_path / "heads.html"
    main(["show", str(models / "model"), "--out", str(path), "--length", "41", "--detail", "2.3,1.1"])
    assert f"Wrote {path}" in capsys.readouterr().out
    (model,) = data_of(path)["models"]
    (snapshot,) = model["snapshots"]
    assert model["name"] == "model"
    assert len(snapshot["tokens"]) == 41
    assert list(snapshot["views"]) == ["bias", "content", "scores", "weights", "profile"]
    for quantity, layers in snapshot["views"].items():
        assert [layer["layer"] for layer in layers] == [0, 1]
        assert layers[1]["detail"].keys() == ({"2"} if quantity in ("content", "scores", "weights") else set()), (
            quantity
        )
    assert snapshot["views"]["bias"][0]["matrix"]["kind"] == "DistanceBias"


def test_a_head_without_a_bias_is_named_where_another_layer_has_one(tmp_path):
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 300}
    config = LengthwiseConfig(layers=[{"encoding": "rope"}, {"encoding": "cope"}], **sizes)
    LengthwiseForCausalLM(config).save_pretrained(tmp_path / "model")
    path = tmp_path / "heads.html"
    main(["show", str(tmp_path / "model"), "--out", str(path), "--length", "19", "--detail", "1.1,2.2"])
    (snapshot,) = data_of(path)["models"][0]["snapshots"]
    detail = {what: [{*layer["detail"]} for layer in layers] for what, layers in snapshot["views"].items()}
    assert detail["bias"] == [{"1"}]
    assert detail["scores"] == [{"0"}, {"1"}]


def test_a_run_brings_its_snapshots(models, tmp_path):
    path = tmp_path / "run.html"
    main(["show", str(models / "run"), str(models / "model"), "--out", str(path), "--length", "19"])
    run, model = data_of(path)["models"]
    assert [snapshot["step"] for snapshot in run["snapshots"]] == [0, 250, None]
    assert run["name"] == "run"
    assert [snapshot["step"] for snapshot in model["snapshots"]] == [None]
    assert load_maps(models / "run" / "maps" / "step-00000250.safetensors").layers == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        (["--quantity", "bias"], [[0, 1]] * 3),
        (["--layer", "last"], [[1]] * 3),
        (["--layer", "1"], [[0]] * 3),
        (["--quantity", "scores"], [[0, 1]]),
    ],
)
def test_snapshots_of_a_run_are_of_the_view_and_the_layers_that_are_asked_for(
    models, tmp_path, capsys, arguments, layers
):
    path = tmp_path / "run.html"
    main(["show", str(models / "run"), "--out", str(path), "--length", "19", *arguments])
    snapshots = data_of(path)["models"][0]["snapshots"]
    views = [layers for snapshot in snapshots for layers in list(snapshot["views"].values())[:1]]
    assert [[layer["layer"] for layer in view] for view in views] == layers
    if "--quantity" in arguments:
        assert {quantity for snapshot in snapshots for quantity in snapshot["views"]} == {arguments[1]}
    left_out = "2 of the run's snapshots are not on the page" in capsys.readouterr().out
    assert left_out == (len(layers) == 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--detail", "3"], r"detail must be LAYER\.HEAD from 1 on"),
        (["--detail", "9.1"], "got Layer 9, Head 1"),
        (["--detail", "1.1", "--length", "2500"], "4,194,304 single cells, got 1 x 2,500 x 2,500; .* --length 2048 or"),
        (["--heads", "1"], "--heads must be left out for a page"),
        (["--layer", "last", "--detail", "1.1"], "heads that are on the page, got Layer 1, Head 1"),
        (["--layer", "7"], "layer must be"),
    ],
)
def test_what_cannot_be_put_on_a_page_is_answered_in_words(models, tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["show", str(models / "model"), "--out", str(tmp_path / "x.html"), *arguments])
    assert re.search(words, f"{ended.value.code}{capsys.readouterr().err}")
    assert not (tmp_path / "x.html").exists()


def test_a_figure_has_no_single_cells(models, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["show", str(models / "model"), "--out", str(tmp_path / "x.png"), "--detail", "1.1"])
    assert "only a page has cells" in f"{ended.value.code}{capsys.readouterr().err}"


def test_views_and_single_cells_come_from_one_forward_pass(models, tmp_path, monkeypatch):
    passes = []
    forward = LengthwiseModel.forward
    monkeypatch.setattr(LengthwiseModel, "forward", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])
    main(["show", str(models / "model"), "--out", str(tmp_path / "one.html"), "--length", "41", "--detail", "2.3"])
    assert len(passes) == 1


def test_the_block_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/page.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, "page.md", "exec"), {})
    assert (tmp_path / "heads.html").stat().st_size > 50_000


def test_the_command_of_the_docs_asks_for_no_more_single_cells_than_a_page_has():
    ((length, heads),) = re.findall(r"--length (\d+) .* --detail (\S+)", (ROOT / "docs/page.md").read_text())
    assert len(parse_heads(heads)) * int(length) ** 2 <= CELLS
