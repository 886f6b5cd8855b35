"""The page as it looks: `make screenshots` keeps these pictures in docs/; every run makes them, to see that it can."""

import codecs
import json
import os
import this
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from browser_kit import Seen, needs_chromium, open_browser
from PIL import Image
from test_serve import Served, make_checkpoint

from lengthwise.data import load_tokenizer
from lengthwise.inspect import position_views
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.views.page import Page, Snapshot

pytestmark = needs_chromium

SCREENSHOTS = os.environ.get("LENGTHWISE_SCREENSHOTS")
LAYERS = 8 if SCREENSHOTS else 2
TEXT = codecs.decode(this.s, "rot13")[:400]


def make_snapshot(encoding: str) -> Snapshot:
    """Heads of a model that was not trained, with weights loud enough for heads to differ."""
    torch.manual_seed(3)
    tokenizer = load_tokenizer("bytes")
    sizes = {"vocab_size": len(tokenizer), "n_positions": 512, "n_embd": 48, "n_layer": LAYERS, "n_head": 12}
    model = LengthwiseForCausalLM(LengthwiseConfig(encoding=encoding, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.12)
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    rows = torch.stack([ids, ids.flip(0), ids.roll(99)])
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    views = position_views(model, rows, "all", shown="first", resolution=100, tokens=tokens)
    return Snapshot(
        {quantity: replace(maps, model=f"{LAYERS} layers, random weights") for quantity, maps in views.items()}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(SCREENSHOTS) if SCREENSHOTS else tmp_path_factory.mktemp("pictures")


def take(seen: Seen, path: Path) -> None:
    """A picture of the whole page; maps have hundreds of colours, an empty page a few."""
    seen.ready()
    seen.tab.mouse.move(1, 1)
    seen.tab.screenshot(path=path, full_page=True, animations="disabled")
    colours = np.asarray(Image.open(path).convert("RGB"), dtype=np.int64) @ [65536, 256, 1]
    assert len(np.unique(colours)) > 500


def test_the_page_is_drawn_in_light_in_dark_with_two_models_and_on_a_phone(tmp_path, folder):
    cable, kerple = make_snapshot("cable"), make_snapshot("kerple")
    one, two = Page([[cable]]).save(tmp_path / "one.html"), Page([[cable], [kerple]]).save(tmp_path / "two.html")
    with open_browser() as browser:
        seen = Seen(browser, one)
        seen.ready()
        seen.tab.click(f"button.head[data-layer='{LAYERS - 2}'][data-head='1']")
        seen.ready()
        seen.go(310, 120)
        take(seen, folder / "page.png")
        seen.close()

        seen = Seen(browser, two, color_scheme="dark")
        seen.ready()
        seen.tab.locator("#whats label:has(input[value=scores])").click()
        seen.ready()
        seen.go(250, 90)
        take(seen, folder / "page-compare-dark.png")
        seen.close()

        seen = Seen(browser, one, viewport={"width": 390, "height": 844})
        seen.ready()
        seen.go(310, 120)
        take(seen, folder / "page-phone.png")
        seen.close()


def make_run(folder: Path, encoding: str) -> None:
    """A finished run: a small model with loud weights, and losses that fall."""
    make_checkpoint(folder / "final", encoding)
    (folder / "final" / "seal.json").write_text('{"sha256": {}}')
    (folder / "config.yaml").write_text(f"encoding: {encoding}\nsteps: 2000\ndata: stdlib\n")
    losses = [{"step": step, "loss": 2.2 + 3.5 * 0.997**step} for step in range(0, 2001, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))


def test_the_served_page_opens_on_heads_with_runs_and_a_study_as_cards(tmp_path):
    for encoding in ("cable", "kerple"):
        make_run(tmp_path / f"{encoding}-nano", encoding)
    rows = [
        {"encoding": name, "values": {"128": x, "512": x + 1, "2048": x + 4}} for name, x in (("a", 9.5), ("b", 9.7))
    ]
    study = {"metric": "perplexity", "train_length": 128, "rows": rows}
    (tmp_path / "study.json").write_text(json.dumps(study))
    served = Served(tmp_path)
    with open_browser() as browser:
        seen = Seen(browser, f"http://127.0.0.1:{served.port}/")
        seen.tab.wait_for_selector("button.head")
        # Not into docs/: these losses and perplexities are nobody's.
        take(seen, tmp_path / "serve.png")
        assert seen.texts(".card h3") == [
            "cable-nano",
            "kerple-nano",
            f"{tmp_path.name}: perplexity by length, trained at 128",
        ]
        seen.close()
    served.close()
