"""Time and memory of training attention against length, log-log, from the measurements: docs/attention.png."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LINES = {
    ("alibi", "no bias"): ("SDPA, no bias", "black", "-"),
    ("kerple", "dense SDPA"): ("dense learned bias, SDPA", "#999999", "--"),
    ("kerple", "lengthwise"): ("kerple", "#0072B2", "-"),
    ("fire", "lengthwise"): ("fire, L = 512", "#CC79A7", "-"),
    ("alibi", "lengthwise"): ("alibi", "#E69F00", "-"),
    ("cable", "lengthwise"): ("cable", "#009E73", "-"),
    ("cable-nw", "lengthwise"): ("cable-nw", "#D55E00", "-"),
}


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "results/attention-full.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["mode"] == "train" and row["options"] == "{}"]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for (encoding, rival), (label, colour, style) in LINES.items():
        own = sorted((r for r in rows if (r["encoding"], r["rival"]) == (encoding, rival)), key=lambda r: r["length"])
        lengths = [row["length"] for row in own]
        time.plot(lengths, [row["best"] for row in own], style, color=colour, label=label, marker=".")
        memory.plot(lengths, [row["peak_bytes"] / 1e6 for row in own], style, color=colour, label=label, marker=".")
    time.set(title="Forward and backward", ylabel="seconds")
    memory.set(title="Peak extra memory", ylabel="MB")
    for axis in (time, memory):
        axis.set(xscale="log", yscale="log", xlabel="length")
        ticks = sorted({row["length"] for row in rows})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(HERE.parent / "docs/attention.png", dpi=130)


if __name__ == "__main__":
    main()
