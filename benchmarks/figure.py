"""Time and memory of training attention against length, log-log, from the measurements: docs/attention.png."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LINES = {
    ("sdpa", None): ("SDPA, no bias", "black", "-"),
    ("kerple", "dense SDPA"): ("dense learned bias, SDPA", "#999999", "--"),
    ("kerple", None): ("kerple", "#0072B2", "-"),
    ("fire-512", None): ("fire, L = 512", "#CC79A7", "-"),
    ("alibi", None): ("alibi", "#E69F00", "-"),
    ("cable", None): ("cable", "#009E73", "-"),
    ("cable-nw", None): ("cable-nw", "#D55E00", "-"),
}


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "results/attention-full.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["mode"] == "train"]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for (encoding, rival), (label, colour, style) in LINES.items():
        own = [row for row in rows if (row["encoding"], row.get("rival")) == (encoding, rival)]
        own = sorted(own, key=lambda row: row["length"])
        timed = [row for row in own if row["rounds"] > 1]
        seconds = [row["seconds"]["median"] for row in timed]
        time.plot([row["length"] for row in timed], seconds, style, color=colour, label=label, marker=".")
        peaks = [row["peak_bytes"] / 1e6 for row in own]
        memory.plot([row["length"] for row in own], peaks, style, color=colour, label=label, marker=".")
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
