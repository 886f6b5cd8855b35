"""Figures and the page show which layer has what."""

import pytest
import torch
from browser_kit import Seen, needs_chromium, open_browser
from model_kit import SCHEDULES, loud_model, tokens

from lengthwise.inspect import position_maps, position_views
from lengthwise.views.page import Page, Snapshot

SCHEDULE = "alibi:7,rope:chunk8,kerple+sink,none"


def scheduled():
    return loud_model("chunks", layers=SCHEDULE, n_layer=4)


def test_a_figure_names_what_every_layer_has():
    model = scheduled()
    every = position_maps(model, tokens(), "all", "scores")
    labels = [label.get_text() for label in every.overview().axes[0].get_yticklabels()]
    assert labels == ["Layer 1\nalibi:7", "Layer 2\nrope:chunk8", "Layer 3\nkerple+sink", "Layer 4\nnone"]
    assert every.title.startswith(f"{SCHEDULE}: scores")
    assert every.only(1).title.startswith("rope:chunk8: scores")


@torch.no_grad()
def test_maps_of_a_layer_with_a_window_are_masked_by_it():
    model = scheduled()
    weights = position_maps(model, tokens(1), "all", "weights").values
    query, key = torch.meshgrid(torch.arange(29), torch.arange(29), indexing="ij")
    near = (query >= key) & (query - key < 7)
    assert weights[0][:, ~near].isnan().all()
    assert not weights[0][:, near].isnan().any()
    chunk = (query >= key) & (query // 8 == key // 8)
    assert weights[1][:, ~chunk].isnan().all()
    assert not weights[1][:, chunk].isnan().any()
    with pytest.raises(ValueError, match="adds none"):
        position_maps(model, tokens(1), "all", "bias")


@pytest.mark.parametrize("case", SCHEDULES)
@torch.no_grad()
def test_every_schedule_can_be_captured(case):
    views = position_views(loud_model(case), tokens(), "all")
    assert views["weights"].layers == views["scores"].layers == (0, 1)


@needs_chromium
def test_the_page_names_what_a_layer_has(tmp_path):
    views = position_views(scheduled(), tokens(), "all")
    assert views["bias"].layers == (0, 2)
    path = Page([[Snapshot(views)]]).save(tmp_path / "page.html")
    with open_browser() as browser:
        seen = Seen(browser, path)
        seen.ready()
        seen.tab.evaluate("choose(2, 1)")
        seen.ready()
        assert seen.tab.inner_text("#head-title") == "Layer 3 (kerple+sink), head 2"
        assert seen.tab.locator(".label.row").all_inner_texts() == ["1 alibi:7", "3 kerple+sink"]


def test_heads_that_share_keys_and_turn_apart_are_seen_by_their_scores():
    model = loud_model("pope", n_head=4, n_kv_head=2, head_dim=8)
    views = position_views(model, tokens(1), "all")
    assert {"scores", "profile"} <= views.keys()
    assert views["scores"].maps[0].heads == 4
