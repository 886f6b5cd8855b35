"""Ring attention: what is measured here, and what that makes of many devices on paper.

    python benchmarks/ring.py memory       peak memory of a process at 16,384 and 32,768 tokens, alone and in a ring
    python benchmarks/ring.py skip         time of a decaying bias in a ring of 2, with skipping and without, in turn
    python benchmarks/ring.py kernel       the share of the matrix products' rate that attention reaches, both ways
    python benchmarks/ring.py simulate     128k, 1M and 10M tokens on 8 to 1,024 devices: docs/ring.png and a table

The first three check their outputs before they measure, and write one JSON line a case with its birth certificate to
benchmarks/results/ring-*.jsonl. The simulation takes the kernel's share from there; everything else it assumes is in
`Assumptions`, and every field of it is an option: `--bandwidth-gb 25 --tflops 312`.
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from certificate import certificate
from memory import resident_peak

import lengthwise as lw
from lengthwise.distributed import WIDTH, spread, take, zigzag
from lengthwise.encodings.alibi import geometric_slopes

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LENGTHS = (16_384, 32_768)
ROUNDS = 20
HEADS, DIM = 12, 64


def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one sequence of GPT-2 small, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3))
    return q, k, v


def step(
    encoding: lw.Encoding, layout: lw.TokenLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Forward and backward of attention with a bias."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = lw.attend(*leaves, layout=layout, bias=encoding.bias(q.new_zeros(1, q.shape[2], HEADS * DIM), layout))
    torch.autograd.grad(out.sum(), leaves)
    return out.detach()


def in_processes(size: int, work: Callable[[], Any]) -> list[Any]:
    """What some work gives in each process of a gloo group, one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=size)
        results.put((rank, work()))
        dist.barrier()

    processes = [context.Process(target=one, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    answers = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [answers[rank] for rank in range(size)]


def measure_memory() -> list[dict[str, Any]]:
    """By process: the growth of its resident pages over forward and backward, beyond its own inputs."""
    rows = []
    for length in LENGTHS:
        for size in (1, 2):

            def peak(length: int = length) -> int | None:
                encoding = lw.make("alibi", heads=HEADS, width=HEADS * DIM)
                part = spread(lw.layout(length))
                own = [take(x, part, 2).clone() for x in inputs(length)]
                return resident_peak(lambda: step(encoding, part, *own))

            rows.append({"case": "memory", "length": length, "processes": size, "peak_bytes": in_processes(size, peak)})
            print(rows[-1])
    return rows


def measure_skipping() -> list[dict[str, Any]]:
    """Seconds of forward and backward in a ring of 2, with and without skipping, in turn; the ratio by round."""
    rows = []
    for length in LENGTHS:

        def timed(length: int = length) -> dict[str, list[float]]:
            encoding = lw.make("alibi", heads=HEADS, width=HEADS * DIM)
            part = spread(lw.layout(length))
            own = [take(x, part, 2).clone() for x in inputs(length)]
            seconds: dict[str, list[float]] = {"skipping": [], "not skipping": []}
            outs = {}
            for number in range(ROUNDS + 1):
                for name, on in (("skipping", True), ("not skipping", False)):
                    dist.barrier()
                    began = time.perf_counter()
                    with lw.skipping(on):
                        outs[name] = step(encoding, part, *own)
                    dist.barrier()
                    if number:  # the first warms up
                        seconds[name].append(time.perf_counter() - began)
            error = float((outs["skipping"] - outs["not skipping"]).abs().max())
            assert error <= 1e-5 * float(outs["skipping"].abs().max()), f"skipping changes the output by {error}"
            return seconds

        seconds = in_processes(2, timed)[0]
        ratios = [a / b for a, b in zip(seconds["skipping"], seconds["not skipping"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        rows.append(
            {
                "case": "skip",
                "length": length,
                "rounds": ROUNDS,
                "ratio": {"median": middle, "quartiles": [low, high], "of": "the same without skipping"},
                "seconds": {name: median(own) for name, own in seconds.items()},
            }
        )
        print(rows[-1])
    return rows


def measure_kernel() -> list[dict[str, Any]]:
    """Attention's rate of operations, forward and backward, over that of plain matrix products, in turn."""
    torch.set_num_threads(1)
    length = 4096
    q, k, v = inputs(length)
    layout, square = lw.layout(length), torch.randn(1024, 1024)
    shares = []
    for number in range(ROUNDS + 1):
        began = time.perf_counter()
        square @ square
        product = 2 * 1024**3 / (time.perf_counter() - began)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        began = time.perf_counter()
        lw.attend(*leaves, layout=layout).sum().backward()
        # Two products forward and five backward, of which causality leaves half.
        operations = 7 * 2 * HEADS * length**2 * DIM / 2
        if number:
            shares.append(operations / (time.perf_counter() - began) / product)
    low, middle, high = quantiles(shares, n=4)
    row = {"case": "kernel", "length": length, "rounds": ROUNDS, "share": {"median": middle, "quartiles": [low, high]}}
    print(row)
    return [row]


@dataclass(frozen=True)
class Assumptions:
    """What the simulation takes as given, for a model of eight billion parameters on devices of 2024."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 4096
    inner: int = 14_336
    tflops: float = 989.0
    """A device's matrix products in bfloat16."""
    kernel_share: float = 0.5
    """Of that, what attention reaches; from results/ring-kernel.jsonl unless given."""
    bandwidth_gb: float = 50.0
    """Between devices of different machines, each way and device, GB/s."""
    near_gb: float = 450.0
    """Between devices of one machine."""
    machine: int = 8
    """Devices of one machine."""
    latency_us: float = 10.0
    """Of every exchange."""
    window: int = 4096
    spread: float = 20.0
    """How far scores differ by content alone, in nats."""


SIMULATED = {"128k": 2**17, "1M": 2**20, "10M": 10 * 2**20}
DEVICES = [2**i for i in range(3, 11)]
BIASES = ("plain", "window", "decaying")
FLUSH = 105.0
"""Nats below the largest score from which on a weight is 0 in float32."""


def reaches(bias: str, length: int, given: Assumptions) -> list[float]:
    """How many tokens back each head sees: all, its window, or as far as ALiBi's slope leaves any weight."""
    if bias == "plain":
        return [float(length)] * given.heads
    if bias == "window":
        return [float(given.window)] * given.heads
    return [min(float(length), (FLUSH + given.spread) / slope) for slope in geometric_slopes(given.heads)]


def simulate(length: int, devices: int, bias: str, given: Assumptions) -> dict[str, Any]:
    """One layer, forward: what every device computes and receives step by step; the slowest device's time."""
    chunks = zigzag(length, devices)
    first = np.array([chunk.first for chunk in chunks], dtype=float)
    stop = np.array([chunk.stop for chunk in chunks], dtype=float)
    by_head = reaches(bias, length, given)
    furthest = max(by_head)
    rate = given.tflops * 1e12 * given.kernel_share
    token_bytes = 2 * given.kv_heads * given.head_dim * 2
    slowest = most = 0.0
    for rank in sorted({0, devices // 2, devices - 1}):
        own = (rank, 2 * devices - 1 - rank)
        pairs, tokens = np.zeros(2 * devices), np.zeros(2 * devices)
        for a in own:
            # Keys of each chunk that some row of chunk a sees.
            low = np.maximum(first, first[a] - furthest)
            needed = np.clip(np.minimum(stop, stop[a]) - low, 0, None)
            needed = np.where(needed > 0, np.minimum(np.ceil(needed / WIDTH) * WIDTH, stop - first), 0)
            tokens = np.maximum(tokens, needed)
            pairs += sum(visible_pairs(first[a], stop[a], first, stop, reach) for reach in by_head)
        seconds = 4 * given.head_dim * pairs / rate
        total = seconds[list(own)].sum()
        arriving = 0.0
        received = 0.0
        computing = total
        for distance in range(1, devices):
            source = (rank - distance) % devices
            theirs = [source, 2 * devices - 1 - source]
            size = tokens[theirs].sum() * token_bytes
            near = source // given.machine == rank // given.machine
            transfer = size / ((given.near_gb if near else given.bandwidth_gb) * 1e9) + given.latency_us * 1e-6 * (
                size > 0
            )
            # Keys of a step arrive while those of the step before are computed with.
            arriving += transfer
            computing = max(computing, arriving) + seconds[theirs].sum()
            received += size
        slowest, most = max(slowest, computing), max(most, received)
    ends = np.array([0.0]), np.array([float(length)])
    everything = sum(float(visible_pairs(0.0, length, *ends, reach)[0]) for reach in by_head)
    alone = 4 * given.head_dim * everything / rate
    local = length / devices
    largest = max(chunk.count for chunk in chunks) * 2
    # Sharded weights, gradients and moments, what recomputed layers save, own keys and two blocks of others'.
    weights = given.layers * (
        given.width * (2 * given.heads + 2 * given.kv_heads) * given.head_dim + 3 * given.width * given.inner
    )
    saved = local * (4 * given.width * given.layers + 16 * given.width + 4 * given.inner)
    memory = 16 * weights / devices + saved + (local + 2 * min(largest, most / token_bytes)) * token_bytes
    return {
        "bias": bias,
        "length": length,
        "devices": devices,
        "seconds": slowest,
        "efficiency": alone / devices / slowest if slowest else 1.0,
        "received_gb": most / 1e9,
        "memory_gb": memory / 1e9,
    }


def visible_pairs(a: float, b: float, first: np.ndarray, stop: np.ndarray, reach: float) -> np.ndarray:
    """Pairs of queries from a to b and keys from first to stop that are at most `reach` back."""

    def at_least(query: float, key: np.ndarray, back: float) -> np.ndarray:
        # Of queries below `query` and keys below `key`, the pairs that are `back` or more apart.
        count = np.clip(np.minimum(key, query - back), 0, None)
        return count * (query - back) - count * (count - 1) / 2

    def below(query: float, key: np.ndarray) -> np.ndarray:
        return at_least(query, key, 0.0) - at_least(query, key, reach)

    rows = below(b, stop) - below(a, stop) - below(b, first) + below(a, first)
    return np.clip(rows, 0, None)


def run_simulation(given: Assumptions) -> None:
    """All lengths, devices and biases: a table, and the figure."""
    rows = [
        simulate(length, devices, bias, given)
        for length in SIMULATED.values()
        for devices in DEVICES
        for bias in BIASES
    ]
    for row in rows:
        print(
            f"{row['length']:>10,} tokens {row['devices']:>5} devices {row['bias']:9} "
            f"{1e3 * row['seconds']:10.2f} ms a layer, {row['efficiency']:6.1%} of the time is work, "
            f"{row['received_gb']:8.3f} GB received, {row['memory_gb']:8.2f} GB of memory"
        )
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    """Time of a layer, data received, and memory, against the number of devices: docs/ring.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = {"plain": ("black", "-"), "window": ("#0072B2", "--"), "decaying": ("#D55E00", "-.")}
    names = {"plain": "plain", "window": "window of 4,096", "decaying": "decaying (alibi)"}
    panels = [
        ("seconds", "ms a layer, forward", 1e3),
        ("received_gb", "GB received a layer", 1),
        ("memory_gb", "GB of memory", 1),
    ]
    figure, axes = plt.subplots(
        len(panels), len(SIMULATED), figsize=(10, 8), layout="constrained", sharex=True, sharey="row"
    )
    for column, (label, length) in enumerate(SIMULATED.items()):
        for row, (field, title, factor) in enumerate(panels):
            axis = axes[row][column]
            for bias in BIASES:
                own = [r for r in rows if (r["length"], r["bias"]) == (length, bias)]
                colour, style = styles[bias]
                values = [factor * r[field] for r in own]
                axis.plot([r["devices"] for r in own], values, style, color=colour, label=names[bias], marker=".")
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(DEVICES, [f"{n:,}" for n in DEVICES], rotation=45)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(title)
        axes[0][column].set_title(f"{label} tokens")
        axes[-1][column].set_xlabel("devices")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(HERE.parent / "docs/ring.png", dpi=130)


def measured_share() -> float | None:
    """The kernel's share, if it was measured."""
    path = RESULTS / "ring-kernel.jsonl"
    if not path.exists():
        return None
    return float(json.loads(path.read_text().splitlines()[-1])["share"]["median"])


MEASURED = {"memory": measure_memory, "skip": measure_skipping, "kernel": measure_kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[*MEASURED, "simulate"])
    for field in fields(Assumptions):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=None)  # type: ignore[arg-type]
    options = vars(parser.parse_args())
    case = options.pop("case")
    given = {name: value for name, value in options.items() if value is not None}
    if case == "simulate":
        share = measured_share()
        assumed = Assumptions(**(({} if share is None else {"kernel_share": share}) | given))
        run_simulation(assumed)
        print(f"assumed: {asdict(assumed)}")
        return
    rows = MEASURED[case]()
    born = certificate("python benchmarks/ring.py " + " ".join(sys.argv[1:]))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"ring-{case}.jsonl").write_text("".join(json.dumps(row | {"born": born}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
