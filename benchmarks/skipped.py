"""How much of attention's work is skipped in trained models, layer by layer: `python benchmarks/skipped.py RUN ...`.

On a text that the model reads beyond its training length, where encodings that fall with distance leave most keys out.
"""

import argparse
import json
import sys
from pathlib import Path

from certificate import certificate

from lengthwise.inspect.skipping import skipped_shares
from lengthwise.loading import load_model, sample_tokens


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
        shares = skipped_shares(loaded.model, sample.ids)
        encoding = loaded.model.config.encoding
        row = {"run": loaded.name, "encoding": encoding, "length": options.length, "by_layer": shares, "born": born}
        lines.append(json.dumps(row | {"skipped_share": sum(shares) / len(shares)}))
        print(f"{loaded.name:24} {sum(shares) / len(shares):6.1%}   by layer {', '.join(f'{x:.0%}' for x in shares)}")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
