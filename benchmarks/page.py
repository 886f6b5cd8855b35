"""The page in headless chromium: how large its file is, when it is first painted, how soon a head is enlarged.

Maps are of a model of 12 layers of 12 heads with random weights; one JSON line a case.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from certificate import certificate

from lengthwise.inspect import position_maps
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.views.maps import Quantity
from lengthwise.views.page import Page

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from browser_kit import open_browser

CASES: list[tuple[str, Quantity, int]] = [
    ("rope", "scores", 2048),
    ("kerple", "bias", 4096),
    ("t5", "bias", 4096),
    ("fire", "bias", 4096),
    ("cable", "bias", 4096),
]
REPEATS = 5

PAINT = """
() => new Promise((done) => new PerformanceObserver((seen) => {
  for (const entry of seen.getEntriesByName("first-contentful-paint")) done(entry.startTime);
}).observe({ type: "paint", buffered: true }))
"""

# From the click to the end of the frame that shows the map, and until the numbers beside it are there too.
ENLARGE = """
async ([layer, head]) => {
  const wait = () => new Promise((done) => setTimeout(done, 0));
  while (document.getElementById("tokens").ariaBusy !== "false") await wait();
  const begun = performance.now();
  document.querySelector(`button.head[data-layer="${layer}"][data-head="${head}"]`).click();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const shown = performance.now() - begun;
  while (document.body.ariaBusy !== "false") await wait();
  return [shown, performance.now() - begun];
}
"""


def make_page(encoding: str, quantity: Quantity, length: int) -> Page:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_positions": length, "n_embd": 192, "n_layer": 12, "n_head": 12}
    options = {"threshold": float(length)} if encoding == "fire" else {}
    model = LengthwiseForCausalLM(LengthwiseConfig(encoding=encoding, encoding_options=options, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ids = torch.randint(257, (1, length))
    return position_maps(model, ids, "all", quantity, tokens=[f" w{token}" for token in ids[0].tolist()]).page()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        for encoding, quantity, length in CASES:
            path = make_page(encoding, quantity, length).save(Path(folder) / f"{encoding}.html")
            paints, wholes, enlarged = [], [], []
            for repeat in range(REPEATS):
                tab = browser.new_page(viewport={"width": 1360, "height": 1000})
                began = time.perf_counter()
                tab.goto(path.as_uri(), wait_until="commit")
                tab.wait_for_selector("body[aria-busy=false]")
                wholes.append(time.perf_counter() - began)
                paints.append(tab.evaluate(PAINT) / 1000)
                enlarged += [tab.evaluate(ENLARGE, [layer, (layer + repeat) % 12]) for layer in range(12)]
                tab.close()
            line = {
                "case": f"{encoding}: {quantity} of 12 x 12 heads, {length:,} tokens",
                "megabytes": round(path.stat().st_size / 1e6, 2),
                "first_paint_seconds": round(statistics.median(paints), 3),
                "all_heads_drawn_seconds": round(statistics.median(wholes), 3),
                "enlarged_milliseconds": round(statistics.median(shown for shown, _ in enlarged), 1),
                "enlarged_milliseconds_slowest": round(max(shown for shown, _ in enlarged), 1),
                "numbers_beside_it_milliseconds": round(statistics.median(read for _, read in enlarged), 1),
                "load": round(os.getloadavg()[0], 1),
                "born": certificate("python benchmarks/page.py"),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
