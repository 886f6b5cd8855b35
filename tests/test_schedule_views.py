"""Figures and the page show which layer has what."""

import pytest
import torch
import transformers as hf
from browser_kit import Seen, needs_chromium, open_browser
from model_kit import SCHEDULES, loud_model, tokens

import lengthwise as lw
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
    views = position_views(model, tokens(1), "all")
    weights = views["weights"].values
    query, key = torch.meshgrid(torch.arange(29), torch.arange(29), indexing="ij")
    near = (query >= key) & (query - key < 7)
    windowed = views["bias"].layer(0)
    for values in (weights[0], windowed.values):
        assert values[:, ~near].isnan().all()
        assert not values[:, near].isnan().any()
    assert windowed.profile.mean.isnan().any(0).tolist() == [False] * 7 + [True] * 22
    assert windowed.described is None
    assert views["bias"].layer(2).described is not None
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


@pytest.mark.parametrize("layers", [[1, 2], [2, 1], [-2, -3]])
def test_layers_of_a_fitted_model_are_named_by_what_each_of_them_has(layers):
    config = hf.LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=24, num_hidden_layers=4, num_attention_heads=3
    )
    model = lw.fit(hf.LlamaForCausalLM(config).eval(), ["alibi", "kerple"], layers=layers)
    views = position_views(model, tokens(1), "all")
    assert [views["scores"].layer_label(layer) for layer in range(4)] == ["own", "alibi", "kerple", "own"]
    kinds = [type(views["bias"].layer(layer).described).__name__ for layer in (1, 2)]
    assert kinds == ["LevelBias", "DistanceBias"]
    assert views["bias"].only(2).title.startswith("kerple: bias")


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
