"""Attention in bands, merged by log-sum-exp, against one fused call: `python benchmarks/stretch.py`; JSON lines.

    bands   attend for every band, and merge, of queries and keys that are turned already / attend(q, k, v)
    whole   the same with turning: what a stretched layer costs / what a layer with plain RoPE costs

Forward only, 8 heads of 64, batch 1, in turn. The limit is on `bands` of two, at 4,096 tokens with a window of 1,024.
Before anything is timed, bands that change no distance must give the plain call. With --quick all is small, to see
that it runs, and nothing is stored.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from certificate import certificate
from paired import against_limit, median_interval, spread

import lengthwise as lw
from lengthwise.encodings import AttentionShape
from lengthwise.encodings.rope import Rope
from lengthwise.model.attention import attend_zones
from lengthwise.model.stretch.rope import StretchedRope
from lengthwise.model.stretch.spec import parse_stretch

SPECS = ("rerope:1024", "leaky-rerope:1024:16", "self-extend:8:1024", "dca", "lm-infinite:1024", "streaming:1024")
LIMIT = 1.25


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compared(ours: Callable[[], object], other: Callable[[], object], rounds: int) -> dict[str, object]:
    """Times in turn, the order changing every round, after one of each to warm up."""
    ours(), other()
    times: list[tuple[float, float]] = []
    for turn in range(rounds):
        if turn % 2:
            first = seconds(ours)
            times.append((first, seconds(other)))
        else:
            first = seconds(other)
            times.append((seconds(ours), first))
    ratios = [a / b for a, b in times]
    return {
        "rounds": rounds,
        "ours_seconds": spread([a for a, _ in times]),
        "other_seconds": spread([b for _, b in times]),
        "ratio": spread(ratios),
        "interval": median_interval(ratios),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/stretch.jsonl")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.length, options.rounds = 2048, 6
    torch.manual_seed(0)
    heads, dim, trained = 8, 64, 2048
    q, k, v = (torch.randn(1, heads, options.length, dim) for _ in range(3))
    rope, layout = Rope(AttentionShape(heads, heads * dim, dim, trained)), lw.layout(options.length)
    turned = rope.rotate(q, k, layout)
    plain = lw.attend(*turned, v, layout=layout)
    same = StretchedRope(rope, parse_stretch("self-extend:1:1024"), trained).zones(q, k, layout)
    off = (attend_zones(same, v, layout=layout)[0].transpose(1, 2) - plain).abs().max() / plain.abs().max()
    if off > 1e-4:
        sys.exit(f"bands that change no distance must give the plain call, got {off:.1e} of the largest")
    born, lines = certificate("python benchmarks/stretch.py"), []
    for spec in options.specs:
        encoding = StretchedRope(rope, parse_stretch(spec), trained)
        zones = encoding.zones(q, k, layout)
        bands = compared(
            lambda zones=zones: attend_zones(zones, v, layout=layout),
            lambda: lw.attend(*turned, v, layout=layout),
            options.rounds,
        )
        whole = compared(
            lambda encoding=encoding: attend_zones(encoding.zones(q, k, layout), v, layout=layout),
            lambda: lw.attend(*rope.rotate(q, k, layout), v, layout=layout),
            options.rounds,
        )
        verdict = against_limit(bands, LIMIT) if len(zones) == 2 else "no limit"
        row = {"spec": spec, "length": options.length, "zones": len(zones), "bands": bands, "whole": whole}
        lines.append(json.dumps(row | {"limit": LIMIT, "verdict": verdict, "born": born}))
        words = "   ".join(f"{name} {in_words(part)}" for name, part in (("bands", bands), ("whole", whole)))
        print(f"{spec:22} {len(zones)} bands   {words}   asked {LIMIT} of bands: {verdict}", flush=True)
    if not options.quick:
        options.out.write_text("\n".join(lines) + "\n")


def in_words(row: dict) -> str:
    """The ratio and its interval."""
    between = "-" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])
    return f"{row['ratio']['median']:.3f} ({between})"


if __name__ == "__main__":
    main()
