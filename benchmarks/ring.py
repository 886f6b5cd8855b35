"""Ring attention: what is measured here, and what that makes of many devices on paper.

    python benchmarks/ring.py memory       peak memory of a process at 16,384 and 32,768 tokens, alone and in a ring: of
                                           attention alone, and of a training step of a small model
    python benchmarks/ring.py skip         a decaying bias in a ring of 2, with skipping and without, in turn: time, and
                                           how much is computed and sent
    python benchmarks/ring.py kernel       what share of the matrix products' rate attention reaches, by kind of bias,
                                           and how far scores differ by content alone
    python benchmarks/ring.py simulate     training with 128k, 1M and 10M tokens on 8 to 1,024 devices: docs/ring.png
                                           and a table

The first three check their outputs before they measure, and write one JSON line a case with its birth certificate to
benchmarks/results/ring-*.jsonl; with `--quick` they are short, and write nothing. The simulation takes what `kernel`
measured from there, and compares itself with what `skip` measured; everything else it assumes is in `Assumptions`, and
every field of that is an option: `--bandwidth-gb 25 --tflops 312`, whose figure is ring.png in the present folder, or
`--out`.
"""

import argparse
import json
import multiprocessing
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from certificate import certificate
from memory import resident_peak

import lengthwise as lw
from lengthwise.distributed import ring, ring_loss, skipping, spread, take
from lengthwise.distributed.sharding import SEGMENT_TOKENS, cut, zigzag
from lengthwise.encodings.alibi import geometric_slopes
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURE = HERE.parent / "docs/ring.png"
HEADS, DIM = 12, 64


@dataclass(frozen=True)
class Sizes:
    """How long and how often a case is measured."""

    lengths: tuple[int, ...] = (16_384, 32_768)
    kernel: int = 4096
    rounds: int = 20


QUICK = Sizes((1024, 2048), 512, 3)


def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one sequence of GPT-2 small, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3))
    return q, k, v


def alibi() -> Any:
    """The bias that decays."""
    return lw.make("alibi", heads=HEADS, width=HEADS * DIM)


def own_part(length: int) -> tuple[lw.TokenLayout, list[torch.Tensor]]:
    """The layout and the inputs of this process."""
    part = spread(lw.layout(length))
    return part, [take(x, part, 2).clone() for x in inputs(length)]


def step(
    layout: lw.TokenLayout, qkv: list[torch.Tensor], *, encoding: Any = None, window: int | None = None
) -> torch.Tensor:
    """Forward and backward of attention."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    tokens = leaves[0].new_zeros(1, layout.query_count, HEADS * DIM)
    bias = None if encoding is None else encoding.bias(tokens, layout)
    out = lw.attend(*leaves, layout=layout, bias=bias, window=window)
    torch.autograd.grad(out.sum(), leaves)
    return out.detach()


def check_near(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    """Nothing is measured that is wrong."""
    error = float((ours - theirs).abs().max())
    assert error <= 1e-5 * float(theirs.abs().max()), f"{name} changes the output by {error}"


def in_processes(size: int, work: Callable[[], Any]) -> list[Any]:
    """What some work gives in each process of a gloo group, one thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=size)
        results.put((rank, work()))
        dist.barrier()

    processes = [context.Process(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    while len(answers) < size:
        try:
            rank, answer = results.get(timeout=1)
            answers[rank] = answer
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a process of the ring ended; see its error above")
    for process in processes:
        process.join()
    return [answers[rank] for rank in range(size)]


def small_model() -> LengthwiseForCausalLM:
    """Four layers of GPT-2, a third as wide as GPT-2 small; the same weights in every process."""
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 4 * DIM, "vocab_size": 256}
    return LengthwiseForCausalLM(LengthwiseConfig.preset("nano", encoding="alibi", **sizes)).train()


def train_step(
    model: LengthwiseForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, *, rings: bool
) -> None:
    """One step of one sequence; processes of a ring add up their gradients."""
    loss = ring_loss(model, ids) if rings else model.loss(ids, ids, reduction="sum")
    loss.backward()
    for parameter in model.parameters():
        if rings and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()


def attention_peak(length: int, *, rings: bool) -> int | None:
    """Of forward and backward of attention, beyond its own inputs."""
    part, own = own_part(length) if rings else (lw.layout(length), list(inputs(length)))
    return resident_peak(lambda: step(part, own, encoding=alibi()))


def training_peak(length: int, *, rings: bool) -> int | None:
    """Of a training step, beyond the model; a short one before it makes the optimizer's moments."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
    train_step(model, optimizer, ids[:, :64], rings=rings)
    return resident_peak(lambda: train_step(model, optimizer, ids, rings=rings))


def measure_memory(sizes: Sizes) -> list[dict[str, Any]]:
    """By process: the growth of its resident pages."""
    rows = []
    for length in sizes.lengths:
        for work, peak in (("attention", attention_peak), ("training step", training_peak)):
            alone = 0
            for name, size in (("alone", 1), ("ring of 1", 1), ("ring of 2", 2)):
                peaks = in_processes(size, partial(peak, length, rings=name != "alone"))
                alone = alone or peaks[0]
                row = {"case": "memory", "work": work, "length": length, "form": name, "peak_bytes": peaks}
                rows.append(row | {"ratio": {"highest": max(peaks) / alone, "of": "alone"}})
                print(rows[-1], flush=True)
    return rows


def measure_skipping(sizes: Sizes) -> list[dict[str, Any]]:
    """Forward and backward in a ring of 2, with and without skipping, in turn: seconds, and what is left out."""
    rows = []
    for length in sizes.lengths:

        def timed(length: int = length) -> dict[str, Any]:
            part, own = own_part(length)
            seconds: dict[str, list[float]] = {"skipping": [], "not skipping": []}
            outs, plans = {}, {}
            for number in range(sizes.rounds + 1):
                for name, on in (("skipping", True), ("not skipping", False)):
                    dist.barrier()
                    began = time.perf_counter()
                    with lw.skipping(on), recorded(ring, "make_plan") as made:
                        outs[name] = step(part, own, encoding=alibi())
                    dist.barrier()
                    plans[name] = made[-1][1]
                    if number:  # the first warms up
                        seconds[name].append(time.perf_counter() - began)
            check_near(outs["skipping"], outs["not skipping"], "skipping")
            return {"seconds": seconds} | {name: planned_work(plan) for name, plan in plans.items()}

        answers = in_processes(2, timed)
        seconds = answers[0]["seconds"]
        ratios = [a / b for a, b in zip(seconds["skipping"], seconds["not skipping"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        shares = {
            name: sum(a["skipping"][name] for a in answers) / sum(a["not skipping"][name] for a in answers)
            for name in ("pairs", "keys")
        }
        rows.append(
            {
                "case": "skip",
                "length": length,
                "rounds": sizes.rounds,
                "ratio": {"median": middle, "quartiles": [low, high], "of": "the same without skipping"},
                "seconds": {name: median(own) for name, own in seconds.items()},
                "shares": shares | {"of": "pairs computed of keys that are not near, and keys received"},
            }
        )
        print(rows[-1])
    return rows


def planned_work(plan: ring.Plan) -> dict[str, float]:
    """Pairs that are computed beside those of near keys, over all heads, and keys that are received."""
    blocks = [*plan.own, *chain(*plan.others.values())]
    heads = [HEADS if block.heads is None else len(block.heads) for block in blocks]
    sides = [(block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start) for block in blocks]
    received = [slots.stop - slots.start for own in plan.requests for slots in own.values()]
    return {"pairs": float(np.dot(heads, sides)), "keys": float(sum(received))}


@contextmanager
def recorded(module: Any, name: str) -> Iterator[list[tuple[Any, Any]]]:
    """What a function of a module gets and gives, while the block lasts."""
    function, calls = getattr(module, name), []

    def call(*arguments: Any) -> Any:
        calls.append((arguments, function(*arguments)))
        return calls[-1][1]

    setattr(module, name, call)
    try:
        yield calls
    finally:
        setattr(module, name, function)


def measure_kernel(sizes: Sizes) -> list[dict[str, Any]]:
    """Attention's rate of operations over that of plain matrix products, in turn, by kind of bias; and the spread.

    Operations are those of pairs that have weight by the ring's bound: two products forward and five backward. The
    kernel's own bound is sharper, so that it computes fewer pairs of a decaying bias than are counted here: its share
    may be above that of plain attention, and above 1.
    """
    torch.set_num_threads(1)
    nats = measure_spread(sizes.lengths[0])
    print(nats)
    length, decaying = sizes.kernel, alibi()
    window = length // 4
    options: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": window}, "decaying": {"encoding": decaying}}
    given = Assumptions(heads=HEADS, window=window, spread=nats["spread"]["median"])
    reach = {bias: reaches(bias, length, given) for bias in BIASES}
    ends = np.array([0.0]), np.array([float(length)])
    pairs = {b: sum(float(visible_pairs(0.0, length, *ends, own)[0]) for own in reach[b]) for b in BIASES}
    qkv, layout, square = list(inputs(length)), lw.layout(length), torch.randn(1024, 1024)
    short = [x[:, :, :256].contiguous() for x in qkv]
    for bias, own in options.items():
        encoding = own.get("encoding")
        described = None if encoding is None else encoding.bias(short[0].new_zeros(1, 256, HEADS * DIM), lw.layout(256))
        both = [lw.attend(*short, bias=described, window=own.get("window"), backend=b) for b in ("auto", "reference")]
        check_near(*both, bias)
    shares: dict[str, list[float]] = {bias: [] for bias in BIASES}
    for number in range(sizes.rounds + 1):
        began = time.perf_counter()
        square @ square
        product = 2 * 1024**3 / (time.perf_counter() - began)
        for bias in BIASES:
            began = time.perf_counter()
            step(layout, qkv, **options[bias])
            if number:
                shares[bias].append(7 * 2 * DIM * pairs[bias] / (time.perf_counter() - began) / product)
    rows = [nats]
    for bias in BIASES:
        low, middle, high = quantiles(shares[bias], n=4)
        share = {"median": middle, "quartiles": [low, high], "of": "the rate of 1024 x 1024 products"}
        row = {"case": "kernel", "bias": bias, "length": length, "rounds": sizes.rounds, "share": share}
        rows.append(row | {"window": window} if bias == "window" else row)
        print(rows[-1])
    return rows


def measure_spread(length: int) -> dict[str, Any]:
    """How many nats beyond FLUSH the bias of a key must fall until the bound says that it has no weight, by head."""

    def needed() -> list[float]:
        part, own = own_part(length)
        with recorded(skipping, "tiles_with_weight") as calls, torch.no_grad():
            encoding = alibi()
            lw.attend(*own, layout=part, bias=encoding.bias(own[0].new_zeros(1, length, HEADS * DIM), part))
        distance = torch.zeros(HEADS, dtype=torch.int64)
        for (call, block, *_), tiles in calls:
            query, key = (part.ring.segments[number] for number in (block.query, block.key))
            width, _ = skipping.tiles(call)
            last = key.first + torch.arange(1, tiles.shape[2] + 1).mul(width).clamp(max=key.count) - 1
            away = (torch.arange(query.first, query.stop)[:, None] - last).where(tiles, 0)
            distance = torch.maximum(distance, away.amax((1, 2)))
        # A head that sees to the start of the sequence shows no end.
        return [
            d * float(s) - FLUSH for d, s in zip(distance.tolist(), encoding.slopes, strict=True) if 0 < d < length // 2
        ]

    (nats,) = in_processes(1, needed)
    values = {"median": median(nats), "lowest": min(nats), "highest": max(nats), "heads": len(nats)}
    return {"case": "spread", "length": length, "spread": values, "inputs": "normal queries and keys of 64"}


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
    plain_share: float = 0.5
    """Of that, what attention reaches without a bias; this and the next three from ring-kernel.jsonl if it is there."""
    window_share: float = 0.5
    """The same with a window."""
    decaying_share: float = 0.5
    """The same with a bias that decays."""
    spread: float = 20.0
    """How far scores differ by content alone, in nats."""
    bandwidth_gb: float = 50.0
    """Between devices of different machines, each way and device, GB/s."""
    near_gb: float = 450.0
    """Between devices of one machine."""
    machine: int = 8
    """Devices of one machine."""
    latency_us: float = 10.0
    """Of every exchange."""
    window: int = 4096


SIMULATED = {"128k": 2**17, "1M": 2**20, "10M": 10 * 2**20}
DEVICES = [2**i for i in range(3, 11)]
BIASES = ("plain", "window", "decaying")
MEASURABLE = {*(f"{bias}_share" for bias in BIASES), "spread"}
"""The assumptions that `kernel` measures."""
FLUSH = 105.0
"""Nats below the largest score from which on a weight is 0 in float32."""


def reaches(bias: str, length: int, given: Assumptions) -> list[float]:
    """How many tokens back each head sees: all, its window, or as far as ALiBi's slope leaves any weight."""
    if bias == "plain":
        return [float(length)] * given.heads
    if bias == "window":
        return [float(given.window)] * given.heads
    return [min(float(length), (FLUSH + given.spread) / slope) for slope in geometric_slopes(given.heads)]


@dataclass(frozen=True)
class RingPass:
    """What a pass over the ring computes and exchanges."""

    products: int
    """Matrix products of each pair of a query and a key: each is two operations a channel."""
    key_bytes: int
    """Of each number of the keys and values that are received."""
    gradient_bytes: int
    """Of each number of their gradients that return to their owner."""


PASSES = (
    RingPass(products=2, key_bytes=2, gradient_bytes=0),
    # Keys are sent again, and attention is computed once more before its five products.
    RingPass(products=2 + 5, key_bytes=2, gradient_bytes=4),
)
"""Forward and backward."""


@dataclass(frozen=True)
class RingWork:
    """Who needs what of whom: a sequence in chunks, two a device, with one kind of bias."""

    chunks: list[Any]
    by_head: list[float]
    """How far back each head sees."""
    tile: float
    """Tokens that are left out together."""

    def own(self, device: int) -> list[int]:
        """The chunks of a device."""
        return [device, len(self.chunks) - 1 - device]

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each chunk, and the one behind its last."""
        first, stop = ([getattr(chunk, end) for chunk in self.chunks] for end in ("first", "stop"))
        return np.array(first, dtype=float), np.array(stop, dtype=float)

    @cached_property
    def tokens(self) -> np.ndarray:
        """(device, chunk): the keys of each chunk that some query of a device sees."""
        first, stop = self.ends
        furthest = max(self.by_head)

        def of_chunk(a: int) -> np.ndarray:
            seen = np.clip(np.minimum(stop, stop[a]) - np.maximum(first, first[a] - furthest), 0, None)
            return np.where(seen > 0, np.minimum(np.ceil(seen / self.tile) * self.tile, stop - first), 0)

        return np.array([np.maximum(*map(of_chunk, self.own(d))) for d in range(len(self.chunks) // 2)])

    def pairs(self, device: int) -> np.ndarray:
        """By chunk of keys: the pairs with queries of a device, of all heads."""
        first, stop = self.ends
        return sum(
            visible_pairs(first[a], stop[a], first, stop, reach) for a in self.own(device) for reach in self.by_head
        )


def pass_time(work: RingWork, device: int, own: RingPass, rate: float, given: Assumptions) -> tuple[float, float]:
    """Seconds of a pass in one device, and the bytes that it receives.

    Keys of a step arrive while those of the step before are computed with, and beside them the gradients that are
    returned for that step; those of the last step are waited for.
    """
    devices = len(work.chunks) // 2
    numbers = 2 * given.kv_heads * given.head_dim
    seconds = 2 * given.head_dim * own.products * work.pairs(device) / rate

    def transfer(size: float, other: int) -> float:
        near = other // given.machine == device // given.machine
        return size / ((given.near_gb if near else given.bandwidth_gb) * 1e9) + given.latency_us * 1e-6 * (size > 0)

    computing = seconds[work.own(device)].sum()
    arriving = received = returning = 0.0
    for distance in range(1, devices):
        source, user = (device - distance) % devices, (device + distance) % devices
        keys = work.tokens[device, work.own(source)].sum() * numbers * own.key_bytes
        gradients = work.tokens[user, work.own(device)].sum() * numbers * own.gradient_bytes
        arriving += transfer(keys, source) + returning
        returning = transfer(gradients, user)
        computing = max(computing, arriving) + seconds[work.own(source)].sum()
        received += keys + gradients
    return computing + returning, received


def simulate(length: int, devices: int, bias: str, given: Assumptions) -> dict[str, Any]:
    """One layer, forward and backward: the slowest device's time, and the most that one receives and holds."""
    chunks = zigzag(length, devices)
    segment = max(part.count for part in cut(chunks, SEGMENT_TOKENS["cuda"]))
    # A window is cut by tokens; what has no weight, by tiles.
    tile = max(skipping.TILE_KEYS, np.ceil(segment / skipping.TILES)) if bias == "decaying" else 1
    work = RingWork(chunks, reaches(bias, length, given), tile)
    rate = given.tflops * 1e12 * getattr(given, f"{bias}_share")
    slowest = most = 0.0
    for device in sorted({0, devices // 2, devices - 1}):
        times, sizes = zip(*(pass_time(work, device, own, rate, given) for own in PASSES), strict=True)
        slowest, most = max(slowest, sum(times)), max(most, sum(sizes))
    ends = np.array([0.0]), np.array([float(length)])
    everything = sum(float(visible_pairs(0.0, length, *ends, reach)[0]) for reach in work.by_head)
    alone = 2 * given.head_dim * sum(own.products for own in PASSES) * everything / rate
    local = length / devices
    # Sharded weights, gradients and moments, and what recomputed layers save.
    weights = given.layers * (
        given.width * (2 * given.heads + 2 * given.kv_heads) * given.head_dim + 3 * given.width * given.inner
    )
    saved = local * (4 * given.width * given.layers + 16 * given.width + 4 * given.inner)
    # Own keys and two segments of others', and the gradients of all.
    others = max(work.tokens[d].sum() - work.tokens[d, work.own(d)].sum() for d in range(devices))
    token_bytes = 2 * given.kv_heads * given.head_dim * (PASSES[1].key_bytes + PASSES[1].gradient_bytes)
    memory = 16 * weights / devices + saved + (local + 2 * min(segment, others)) * token_bytes
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


def run_simulation(given: Assumptions, measured_names: set[str], out: Path) -> None:
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
    draw(rows, given, measured_names, out)


def draw(rows: list[dict[str, Any]], given: Assumptions, measured_names: set[str], out: Path) -> None:
    """Time of a layer, data received, and memory, against the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = {"plain": ("black", "-"), "window": ("#0072B2", "--"), "decaying": ("#D55E00", "-.")}
    names = {"plain": "plain", "window": f"window of {given.window:,}", "decaying": "decaying (alibi)"}
    panels = [
        ("seconds", "ms a layer in training", 1e3),
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
    shares = ", ".join(f"{getattr(given, f'{bias}_share'):.2f} ({bias})" for bias in BIASES)
    title = f"attention at {shares} of the matrix products' rate; content differs by {given.spread:.0f} nats"
    figure.suptitle(f"{title}; {origin_words(measured_names)}", fontsize=9)
    figure.savefig(out, dpi=130)
    print(f"the figure is {out}")


def origin_words(measured_names: set[str]) -> str:
    """Which of the numbers in the figure's title were measured."""
    if not measured_names:
        return "assumed"
    rest = MEASURABLE - measured_names
    return "measured on a CPU" + (f" but for {', '.join(sorted(rest))}" if rest else "")


def rows_of(case: str) -> list[dict[str, Any]]:
    """What was measured, if it was."""
    path = RESULTS / f"ring-{case}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured() -> dict[str, float]:
    """The assumptions that `kernel` measured, by name.

    The share with a decaying bias is at most that of plain attention: see `measure_kernel` for why it was more.
    """
    rows = rows_of("kernel")
    taken = {f"{row['bias']}_share": float(row["share"]["median"]) for row in rows if row["case"] == "kernel"}
    if taken:
        taken["decaying_share"] = min(taken["decaying_share"], taken["plain_share"])
    for row in rows:
        if row["case"] == "spread":
            taken["spread"] = float(row["spread"]["median"])
    return taken


def compare(given: Assumptions) -> None:
    """The simulation of what `skip` measured, beside it."""
    own = replace(given, heads=HEADS, kv_heads=HEADS, head_dim=DIM)
    for row in rows_of("skip"):
        decaying, plain = (simulate(row["length"], 2, bias, own) for bias in ("decaying", "plain"))
        print(
            f"{row['length']:>10,} tokens in a ring of 2: a decaying bias takes "
            f"{decaying['seconds'] / plain['seconds']:.2f} of the time on paper and {row['ratio']['median']:.2f} "
            f"measured, and {decaying['received_gb'] / plain['received_gb']:.2f} of the keys on paper and "
            f"{row['shares']['keys']:.2f} measured"
        )


MEASURED = {"memory": measure_memory, "skip": measure_skipping, "kernel": measure_kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[*MEASURED, "simulate"])
    parser.add_argument("--quick", action="store_true", help="short lengths and few rounds; nothing is written")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(Sizes().lengths), help="of memory and skip")
    parser.add_argument(
        "--out", type=Path, help="of simulate: the figure's file; docs/ring.png, or ring.png with options"
    )
    for field in fields(Assumptions):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=None)  # type: ignore[arg-type]
    options = vars(parser.parse_args())
    case, quick, lengths, out = (options.pop(name) for name in ("case", "quick", "lengths", "out"))
    given = {name: value for name, value in options.items() if value is not None}
    if case == "simulate":
        taken = measured()
        assumed, names = Assumptions(**(taken | given)), taken.keys() - given.keys()
        # The figure of the docs is that of the assumptions above alone.
        run_simulation(assumed, names, out or (Path("ring.png") if given else FIGURE))
        compare(assumed)
        print(f"assumed: {asdict(assumed)}; measured of these: {', '.join(sorted(names)) or 'none'}")
        return
    rows = MEASURED[case](QUICK if quick else Sizes(tuple(lengths)))
    if quick:
        return
    born = certificate("python benchmarks/ring.py " + " ".join(sys.argv[1:]))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"ring-{case}.jsonl").write_text("".join(json.dumps(row | {"born": born}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
