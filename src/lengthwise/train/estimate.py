"""What a run will need, on paper: memory of a device, time at a given utilisation, and disk.

Memory is counted, not guessed: what the optimizer keeps, what a layer saves for its backward pass (one number for each
tensor that torch saves, see `layer_bytes`), the logits of a chunk, and what a ring holds of other processes' keys. What
an allocator loses to fragments, and what a library keeps for itself, is not in it: RESERVE is left free for both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lengthwise.data.sources import GPT2_TOKENS
from lengthwise.distributed.sharding import SEGMENT_TOKENS
from lengthwise.errors import check_int, check_number
from lengthwise.model import LengthwiseConfig
from lengthwise.model.losses import CHUNK
from lengthwise.model.modeling import LengthwisePreTrainedModel
from lengthwise.train.config import ResolvedTrainConfig

RESERVE = 0.1
"""The share of a device's memory that is left free."""
GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """What a dry run reckons with: `--hardware '{"devices": 8, "memory_gb": 80, "tflops": 989}'`."""

    devices: int = 1
    memory_gb: float | None = None
    """Of each device; None where nothing is to be refused."""
    tflops: float | None = None
    """A device's highest rate of matrix products in the run's precision, as its vendor prints it."""
    utilisation: float = 0.4
    """The share of it that a training reaches."""

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> "Hardware":
        """From the option, checked."""
        known = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise ValueError(f"hardware has {', '.join(map(repr, known))}, got {name!r}")
        hardware = cls(**(given or {}))
        check_int("hardware's devices", hardware.devices)
        for name in ("memory_gb", "tflops"):
            if getattr(hardware, name) is not None:
                check_number(f"hardware's {name}", getattr(hardware, name))
        check_number("hardware's utilisation", hardware.utilisation, most=1.0)
        return hardware


@dataclass(frozen=True)
class Estimate:
    """The needs of a run, by what needs them; bytes are those of one device."""

    state: float
    """Weights, gradients, moments."""
    activations: float
    """What layers save for the backward pass, of one micro-batch."""
    head: float
    """A chunk's logits and the gradient of the head."""
    ring: float
    """Keys and values of other processes."""
    micro_batches: int
    flops: float
    """Of the whole run, over all devices."""
    seconds: float | None
    checkpoints: float
    """The most that checkpoints and the final model take on disk at a time."""
    tokens: float | None
    """Of token files on disk, once for all runs; None where the size of the data is not known."""

    @property
    def disk(self) -> float:
        """All that is known of it."""
        return self.checkpoints + (self.tokens or 0.0)

    @property
    def memory(self) -> float:
        """All of it."""
        return self.state + self.activations + self.head + self.ring


def estimate(config: ResolvedTrainConfig, model: LengthwisePreTrainedModel, hardware: Hardware) -> Estimate:
    """From the config and a model without weights; an error if it is more than a device has."""
    together = config.context_parallel
    if hardware.devices % together:
        raise ValueError(
            f"--context-parallel must divide the devices, got {together} and {hardware.devices}; see --hardware"
        )
    readers = hardware.devices // together
    if config.sequences < readers:
        raise ValueError(
            f"every device must have a sequence, got {config.sequences} sequences and {readers} readers of them"
        )
    blocks: Any = model.base_model.h
    parameters, width = model.num_parameters(), model.config.n_embd
    half = config.precision == "bfloat16" or (config.precision == "auto" and hardware.tflops is not None)
    element = 2 if half else 4
    matrices = sum(p.numel() for p in model.block_matrices()) if config.optimizer == "muon" else 0
    # Float32 throughout: weights, gradients, and one moment of Muon's or two of AdamW's.
    state = 4.0 * (2 * parameters + matrices + 2 * (parameters - matrices))
    if hardware.devices > 1 and not config.sharded:
        state += 4.0 * parameters  # DDP adds up gradients in buckets of its own
    if config.sharded:
        # Of layers that are whole at a time, one computes and the next one arrives; so is what is no layer.
        layer = sum(p.numel() for p in blocks[0].parameters())
        rest = parameters - layer * len(blocks)
        state = state / hardware.devices + element * (2 * layer + rest)
    own = -(-config.sequences // readers)
    micro = min(config.micro_batch, own)
    tokens = micro * config.length / together
    saved = layer_bytes(model.config, element)
    layers = len(blocks)
    activations = tokens * (saved * layers if not config.recompute else saved + 4 * width * layers)
    vocabulary = model.config.vocab_size
    head = 4.0 * (2 * min(CHUNK, tokens) * vocabulary + vocabulary * width) + tokens * width * 4
    kv_heads = model.config.n_kv_head or model.config.n_head
    # Of a segment, of the next one and of what is sent, keys and values; of as many their gradients, in float32.
    segment = micro * min(config.length / together / 2, max(SEGMENT_TOKENS.values()))
    ring = 0.0 if together == 1 else segment * kv_heads * (model.config.head_dim or 0) * 2 * 3 * (element + 4)
    flops = config.steps * config.batch_tokens * token_flops(model, config)
    rate = None if hardware.tflops is None else hardware.tflops * 1e12 * hardware.utilisation * hardware.devices
    needs = Estimate(
        state=state,
        activations=activations,
        head=head,
        ring=ring,
        micro_batches=-(-own // micro),
        flops=flops,
        seconds=None if rate is None else flops / rate,
        checkpoints=checkpoint_bytes(config, parameters, matrices),
        tokens=token_bytes(config, vocabulary),
    )
    if hardware.memory_gb is not None and needs.memory > (1 - RESERVE) * hardware.memory_gb * GB:
        raise MemoryError(
            f"a device must have room for {needs.memory / GB:.1f} GB and a tenth free, got {hardware.memory_gb:g} GB: "
            f"state {state / GB:.1f}, activations {activations / GB:.1f}, head {head / GB:.1f}, ring {ring / GB:.1f}; "
            f"{_advice(config)}"
        )
    return needs


def _advice(config: ResolvedTrainConfig) -> str:
    steps = []
    if config.micro_batch > 1:
        steps.append("a smaller --micro-batch")
    if not config.recompute:
        steps.append("--recompute")
    if not config.sharded:
        steps.append("--sharded")
    steps.append("--context-parallel")
    return f"use {', '.join(steps)}, or more devices"


def checkpoint_count(config: ResolvedTrainConfig) -> int:
    """How many checkpoints a run makes."""
    return -(-config.steps // config.checkpoint_every)


def checkpoint_bytes(config: ResolvedTrainConfig, parameters: int, matrices: int) -> float:
    """The most disk at a time: the oldest checkpoint is removed after a new one is whole, and then comes the model."""
    model = 4.0 * parameters
    # Weights, and one moment of each of Muon's matrices or two of AdamW's.
    checkpoint = model + 4.0 * (matrices + 2 * (parameters - matrices))
    count = checkpoint_count(config)
    return min(config.keep, count) * checkpoint + (checkpoint if count > config.keep else model)


def token_bytes(config: ResolvedTrainConfig, vocabulary: int) -> float | None:
    """Of the data's token files, whose numbers have two bytes or four; None where the size of the data is not known."""
    tokens = GPT2_TOKENS.get(config.data)
    return None if tokens is None else tokens * (2.0 if vocabulary <= 2**16 else 4.0)


def layer_bytes(config: LengthwiseConfig, element: int) -> float:
    """What a block saves for its backward pass, per token; a number of the products has `element` bytes.

    norms       their inputs, the tokens between the layers, in float32
    attention   what enters c_attn; queries, keys, values and the output; a log-sum-exp per head; what enters c_proj
    mlp         what enters c_fc, what leaves it, what enters c_proj
    """
    width, inner = config.n_embd, config.n_inner or 4 * config.n_embd
    dim, heads = config.head_dim or width // config.n_head, config.n_head
    kv_heads = config.n_kv_head or heads
    products = 2 * width + (3 * heads + 2 * kv_heads) * dim + 2 * inner
    return 4.0 * (2 * width + 2 * heads) + element * products


def token_flops(model: LengthwisePreTrainedModel, config: ResolvedTrainConfig) -> float:
    """Operations per token, forward and backward: six per weight of a matrix, twelve per channel and key it sees.

    A query sees half of the keys, all of them where it is two-sided, or its window. Recomputing does the forward pass
    twice, and so does a ring for attention.
    """
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    heads, dim = model.config.n_head, model.config.head_dim or 0
    per_key = 12.0 * heads * dim
    seen = config.length / 2 if model.config.causal else config.length
    reaches = [min(seen, spec.reach or config.length) for spec in model.config.schedule]
    again = 4 / 3 if config.recompute else 1.0
    of_attention = again + (1 / 3 if config.context_parallel > 1 else 0.0)
    return 6.0 * weights * again + per_key * sum(reaches) * of_attention


def describe_needs(config: ResolvedTrainConfig, needs: Estimate, hardware: Hardware) -> list[str]:
    """Lines for the dry run."""
    limit = "" if hardware.memory_gb is None else f" of {hardware.memory_gb:g}"
    parts = f"state {needs.state / GB:.2f}, activations {needs.activations / GB:.2f}, head {needs.head / GB:.2f}"
    if needs.ring:
        parts += f", ring {needs.ring / GB:.2f}"
    devices = "1 device" if hardware.devices == 1 else f"{hardware.devices:,} devices"
    micro = "1 micro-batch" if needs.micro_batches == 1 else f"{needs.micro_batches:,} micro-batches"
    lines = [
        f"step      {config.batch_tokens:,} tokens over {devices}, {micro} each",
        f"memory    {needs.memory / GB:.2f}{limit} GB a device: {parts}",
    ]
    if needs.seconds is not None:
        share = f"{100 * hardware.utilisation:.0f} %"
        lines.append(
            f"time      {needs.seconds / 3600:,.1f} hours at {share} of {hardware.devices} x {hardware.tflops:g} "
            f"TFLOP/s, {needs.flops:.2g} operations"
        )
    else:
        lines.append(f"time      {needs.flops:.2g} operations; give --hardware for hours")
    tokens = "token files not counted" if needs.tokens is None else f"about {needs.tokens / GB:.2f} of token files"
    kept = f"{checkpoint_count(config):,} checkpoints, of which {config.keep} are kept, and the model"
    lines.append(f"disk      {needs.disk / GB:.2f} GB: {needs.checkpoints / GB:.2f} of {kept}; {tokens}")
    return lines
