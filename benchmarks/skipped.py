"""How much of attention's work is skipped in trained models, layer by layer: `python benchmarks/skipped.py RUN ...`.

On a text that the model reads beyond its training length, where encodings that fall with distance leave most keys out.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from certificate import certificate

from lengthwise.attention import attend, checked_call
from lengthwise.attention.native import skipped_share
from lengthwise.loading import load_model, sample_tokens
from lengthwise.model import attention


@contextmanager
def shares() -> Iterator[list[float]]:
    """The share of every call of attention of our models, in order."""
    found: list[float] = []

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> object:
        options = {name: value for name, value in given.items() if name != "backend"}
        found.append(skipped_share(checked_call(q, k, v, **options)))
        return attend(q, k, v, **given)

    attention.attend = watched
    try:
        yield found
    finally:
        attention.attend = attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/skipped.jsonl")
    options = parser.parse_args()
    born = certificate("python benchmarks/skipped.py " + " ".join([*options.runs, "--length", str(options.length)]))
    lines = []
    for source in options.runs:
        loaded = load_model(source)
        sample = sample_tokens(loaded, length=options.length, seed=0)
        with torch.no_grad(), shares() as found:
            loaded.model(sample.ids)
        encoding = loaded.model.config.encoding
        row = {"run": loaded.name, "encoding": encoding, "length": options.length, "by_layer": found, "born": born}
        lines.append(json.dumps(row | {"skipped_share": sum(found) / len(found)}))
        print(f"{loaded.name:24} {sum(found) / len(found):6.1%}   by layer {', '.join(f'{x:.0%}' for x in found)}")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
