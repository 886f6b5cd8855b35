"""Scoring against the bare forward passes it needs: preset nano, protocol paper, 8,192 tokens; one JSON line.

Scoring and bare passes take turns over the same windows, so that a busy machine is busy for both.
"""

import argparse
import json
import time

import numpy as np
import torch
from certificate import certificate

from lengthwise.evaluate import Corpus, score_lengths
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM

WINDOWS = 4
"""Windows in a turn."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--encoding", default="cable")
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--length", type=int, default=8192)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = LengthwiseConfig.preset("nano", encoding=arguments.encoding, vocab_size=1024, n_positions=128)
    model = LengthwiseForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    turns = max(1, arguments.tokens // (WINDOWS * arguments.length))
    times: dict[str, list[float]] = {"scoring": [], "bare": []}
    for turn in range(turns + 1):
        tokens = rng.integers(1024, size=WINDOWS * arguments.length + 1)
        text = Corpus("random", tokens, np.arange(len(tokens)) // 1000, np.ones_like(tokens))
        began = time.perf_counter()
        score_lengths(model, text, [arguments.length], name="m", protocol="paper", windows=WINDOWS)
        scored = time.perf_counter() - began
        began = time.perf_counter()
        with torch.no_grad():
            for first in range(0, WINDOWS * arguments.length, arguments.length):
                model(torch.from_numpy(tokens[None, first : first + arguments.length]), use_cache=False)
        if turn:  # the first one warms up
            times["scoring"].append(scored)
            times["bare"].append(time.perf_counter() - began)
    ratios = np.array(times["scoring"]) / np.array(times["bare"])
    line = {
        "case": f"{arguments.encoding} nano, {turns * WINDOWS * arguments.length:,} tokens at {arguments.length:,}",
        "seconds": {name: round(sum(found), 2) for name, found in times.items()},
        "ratio": round(sum(times["scoring"]) / sum(times["bare"]), 3),
        "median_ratio": round(float(np.median(ratios)), 3),
        "born": certificate(f"python benchmarks/evaluate.py --encoding {arguments.encoding}"),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
