"""The page as a file: what is sent is what there is, in few bytes, and nothing in it can run or fail to be read."""

import base64
import html
import json
import re
import zlib

import numpy as np
import pytest
import torch
from model_kit import loud_model, tokens

import lengthwise as lw
from lengthwise.inspect import position_maps, position_views
from lengthwise.views.page import SCRIPTS, STATIC, Page, Snapshot, as_data, document, policy
from lengthwise.views.page.payload import packed


def unpacked(said: dict) -> np.ndarray:
    """numbers.js in numpy."""
    size = said["bytes"]
    planes = np.frombuffer(zlib.decompress(base64.b64decode(said["text"])), np.uint8).reshape(size, -1)
    words = np.ascontiguousarray(planes.T).view(np.uint32 if size == 4 else np.uint64).reshape(said["shape"])
    if said["smooth"]:
        signed = words.astype(np.int64)
        steps = (signed >> 1) ^ -(signed & 1)
        whole = steps.cumsum(-1).cumsum(-1).astype(np.int32).astype(np.int64)
        words = np.where(whole < 0, -whole | 0x80000000, whole).astype(np.uint32)
    return words.view(np.float32 if size == 4 else np.float64)


@pytest.fixture(scope="module")
def noise():
    x = np.random.default_rng(0).normal(size=(7, 63)).astype(np.float32) * np.float32(10.0) ** np.arange(-3, 4)[:, None]
    x[2, 5], x[3, 4] = np.nan, 0
    return x


@pytest.mark.parametrize("bits", [7, 10, 15])
def test_a_number_keeps_the_bits_that_are_asked_for(noise, bits):
    found = unpacked(packed(noise, bits=bits))
    assert np.array_equal(np.isnan(found), np.isnan(noise))
    error = np.abs(found / np.where(noise == 0, 1, noise) - 1)[~np.isnan(noise) & (noise != 0)]
    assert 0 < error.max() <= 2.0 ** -(bits + 1)


def test_bounds_are_rounded_outwards(noise):
    least, greatest = (unpacked(packed(noise, bits=7, side=side)) for side in ("down", "up"))
    known = ~np.isnan(noise)
    assert (least[known] <= noise[known]).all()
    assert (greatest[known] >= noise[known]).all()
    assert (np.abs(greatest - least)[known] <= 2.0**-7 * np.abs(noise[known]) * (1 + 1e-6)).all()


def test_a_table_comes_back_to_the_last_bit_and_a_smooth_one_is_small():
    kerple = lw.make("kerple", heads=7, width=63)
    table = kerple.bias(torch.zeros(1, 1000, 63), lw.TokenLayout.of(torch.arange(1000))).table.detach().numpy()
    said = packed(table, smooth=True)
    assert np.array_equal(unpacked(said), table)
    assert len(said["text"]) < table.nbytes / 3
    rough = np.random.default_rng(1).normal(size=(7, 63)).astype(np.float32)
    assert np.array_equal(unpacked(packed(rough, smooth=True)), rough)


def test_levels_keep_more_bits_than_a_float32_has():
    level = np.random.default_rng(2).random((3, 500)).cumsum(1)
    found = unpacked(packed(level, bits=32))
    assert found.dtype == np.float64
    assert np.abs(found / level - 1).max() <= 2.0**-33


def test_twelve_by_twelve_heads_of_a_distance_table_at_4096_tokens_are_under_a_megabyte():
    size = 0
    for layer in range(12):
        torch.manual_seed(layer)
        kerple = lw.make("kerple", heads=12, width=12)
        torch.nn.init.normal_(kerple.raw_p)
        torch.nn.init.normal_(kerple.raw_a)
        table = kerple.bias(torch.zeros(1, 4096, 12), lw.TokenLayout.of(torch.arange(4096))).table
        size += len(packed(table.detach().numpy(), smooth=True)["text"])
    code = sum(len((STATIC / f"{name}.js").read_bytes()) for name in SCRIPTS)
    assert size + code < 1e6


@pytest.mark.parametrize("case", ["kerple", "t5", "swin", "cable", "fire", "rope-dynamic", "dapev2-cable"])
@pytest.mark.parametrize("resolution", [7, None])
def test_every_head_comes_with_the_least_and_the_greatest_of_all_its_numbers(case, resolution):
    found, exact = (position_views(loud_model(case), tokens(1), "all", resolution=side) for side in (resolution, 64))
    for quantity, layers in Page([[Snapshot(found)]]).payload()["models"][0]["snapshots"][0]["views"].items():
        for layer, maps in zip(layers, exact[quantity].maps, strict=True):
            numbers = maps.profile.mean if quantity == "profile" else maps.values.flatten(1)
            wanted = [[float(head[~head.isnan()].min()), float(head[~head.isnan()].max())] for head in numbers]
            np.testing.assert_allclose(layer["range"], wanted, rtol=1e-6, atol=1e-7)


def test_data_cannot_end_the_element_it_stands_in():
    hostile = ["</script><script>alert(1)</script>", "<!--<script>", "{{scripts}}", "\u2028"]
    made = document({"title": "x", "models": [], "tokens": hostile}, title="</title><script>alert(2)</script>")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', made, re.DOTALL)[1]
    assert json.loads(data)["tokens"] == hostile
    assert "<" not in data
    assert "alert(2)</script>" not in made
    assert made.count("<script>") == len(SCRIPTS)


def test_a_number_that_json_has_not_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        as_data({"x": float("nan")})


def test_the_policy_names_every_script_by_its_hash_and_lets_nothing_out():
    said = policy(live=False)
    assert "default-src 'none'" in said
    assert "connect-src 'none'" in said
    assert "unsafe" not in said
    assert said.count("sha256-") == len(SCRIPTS) + 1
    assert "connect-src 'self'" in policy(live=True)


def test_a_page_is_written_once_and_shows_itself_in_a_notebook_cut_off_from_it(tmp_path):
    maps = position_maps(loud_model("kerple"), tokens(1), tokens=["<b>"] * 29)
    path = maps.page().save(tmp_path / "new" / "heads.html")
    assert path.read_text().startswith("<!doctype html>")
    with pytest.raises(FileExistsError, match="--force"):
        maps.page().save(path)
    maps.page().save(path, force=True)
    with pytest.raises(ValueError, match=r"must end in \.html"):
        maps.page().save(tmp_path / "heads.png")
    with pytest.raises(ValueError, match="at least one view"):
        Page([])
    shown = maps._repr_html_()
    assert 'sandbox="allow-scripts"' in shown
    inside = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    assert inside == maps.page().html
