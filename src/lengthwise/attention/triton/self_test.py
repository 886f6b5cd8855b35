"""Kernels prove themselves on a device before they are used there, since the authors had none to run them on.

Before the first call of a kind two small calls of that kind run twice, one of lengths that 16 divides, for which Triton
compiles other machine code. Both are long enough for some tiles that all rows see whole. Output, log-sum-exp and
gradients must be those of plain torch in float64 on the same device, row by row, and have the same bits both times. The
verdict is kept in the cache folder, by card, driver, versions and the text of the kernels; an error is not, since the
next process may not meet it.

Few queries, which decode, are of another kind than many, and so is a call that is long enough to skip keys: its small
calls must be seen to skip, forward and backward.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lengthwise.attention.backend import Output
from lengthwise.attention.call import AttentionCall, checked_call
from lengthwise.attention.decode import whole_rows
from lengthwise.attention.triton.terms import Terms, can_skip
from lengthwise.attention.triton.tiles import FEW_ROWS, Load, capability_of, shares_of_keys, tile_for
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, QueryDistanceBias, SumBias
from lengthwise.files import cache_folder, write_atomic
from lengthwise.token_layout import Band, TokenLayout

REPORT = "lengthwise info --prove --device {device}"
"""The command whose report shows a fault."""

ALLOWED = {"float32": 2.0**-16, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""Errors relative to the norm of a row: some roundings of the precision in which weights are multiplied, no fault."""

FLOOR = 0.25
"""Of the mean row's norm: so much is added to that of each row, since what cancels leaves rounding."""

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
MANY, FEW = ((397, 397), (400, 400)), ((3, 397), (1, 400))
"""Queries and keys of the small calls: of kinds of many queries, and of those that decode."""

LESS = 13
"""So many lines or profiles fewer than the power of two that holds them: 3, 19, 51."""

log = logging.getLogger(__name__)

Notes = Mapping[str, int]
Run = Callable[[AttentionCall, Notes], Output]
Skips = Callable[[AttentionCall, Notes], bool]
"""Whether a call skips keys, forward and backward."""
LSE = "log-sum-exp"


class Kind(NamedTuple):
    """What decides which kernels a call needs; all plain, so that a compiled graph and a file can hold it."""

    tables: int
    """0, 1, or 2 for several."""
    by_position: bool
    """Whether tables are read by positions instead of slots."""
    level: str
    """The curve of levels; empty without them."""
    lines: int
    """The power of two that holds the number of lines; 0 without them."""
    profile: str
    """The side of profiles and what is beyond them; empty without them."""
    profiles: int
    """The power of two that holds the number of profiles; 0 without them."""
    dtype: str
    width: int
    """The power of two that holds a head's width."""
    value: int
    is_narrower: bool
    """Whether heads are narrower than that."""
    decoding: str
    """How programs read the keys of few queries, "whole" or in "shares"; empty for many queries."""
    options: str
    """What else the call has, in words."""
    is_learned: bool

    @property
    def text(self) -> str:
        """In one line; `Kind.of_text` reads it."""
        return json.dumps(self._asdict())

    @classmethod
    def of_text(cls, text: str) -> "Kind":
        """The kind that wrote the line."""
        return cls(**json.loads(text))

    @property
    def in_a_graph(self) -> "Kind":
        """What the same call is in a compiled graph, which does not know whether positions follow the slots."""
        if self.tables != 1:
            return self
        options = ", ".join(option for option in self.options.split(", ") if option != "skipping")
        return self._replace(by_position=True, options=options)

    def has(self, option: str) -> bool:
        """Whether the call has an option."""
        return option in self.options.split(", ")

    def __str__(self) -> str:
        parts = [f"{self.tables} table{'s' * (self.tables > 1)}{' by position' * self.by_position}"] * bool(self.tables)
        parts += [f"{self.level} levels"] * bool(self.level) + [f"up to {self.lines} lines"] * bool(self.lines)
        parts += [f"up to {self.profiles} profiles ({self.profile})"] * bool(self.profile)
        bias = " + ".join(parts) or "no bias"
        decoding = f"few queries, keys {self.decoding}" if self.decoding else ""
        words = [bias, self.dtype, f"heads up to {self.width} wide", *filter(None, [decoding, self.options])]
        return ", ".join(words + ["learned"] * self.is_learned)


def kind_of(call: AttentionCall, terms: Terms, *, follows_slots: bool) -> Kind:
    """The kind of a call."""
    options = {
        "softcap": call.softcap,
        "logit scale": call.logit_scale,
        "sink": call.sink,
        "documents": call.layout.key_documents,
        "padding": call.layout.key_mask,
        "window": call.visibility.window,
        "bands": call.visibility.bands or None,
        "two-sided": None if call.visibility.is_causal else True,
        "shared keys": True if call.group > 1 else None,
        "skipping": True if can_skip(call, terms, follows_slots=follows_slots) else None,
    }
    width, value = call.q.shape[3], call.v.shape[3]
    powers = [_power(width), _power(value)]
    profile = terms.profile and f"{terms.profile[1].side} {terms.profile[1].beyond}"
    return Kind(
        tables=min(len(terms.tables), 2),
        by_position=bool(terms.tables) and not follows_slots,
        level="" if terms.level is None else terms.level[1].curve,
        lines=0 if terms.line is None else _power(terms.line[1].slope.shape[1]),
        profile=profile or "",
        profiles=0 if terms.profile is None else _power(terms.profile[1].rows.shape[3]),
        dtype=DTYPES[call.dtype],
        width=powers[0],
        value=powers[1],
        is_narrower=width != powers[0] or value != powers[1],
        decoding=_decoding(call),
        options=", ".join([name for name, part in options.items() if part is not None]),
        is_learned=call.needs_grad,
    )


def _decoding(call: AttentionCall) -> str:
    if call.queries > FEW_ROWS:
        return ""
    width = max(call.q.shape[3], call.v.shape[3])
    tile = tile_for("decode", call.dtype, width, Load.LIGHT, capability_of(call.q.device))
    shares = shares_of_keys(call.batch * call.heads, -(-call.keys // tile.keys), call.q.device)
    return "shares" if shares > 1 else "whole"


def _power(size: int) -> int:
    power = 16
    while power < size:
        power *= 2
    return power


def known_fault(device: str, kind: str) -> str | None:
    """Why a kind is not to be trusted on a device, without trying it: None if it has proved itself."""
    known = _verdicts(device)
    if kind in known:
        return known[kind]
    return (
        f"it has not proved itself here for {Kind.of_text(kind)}, and cannot inside a graph or on tensors without "
        "numbers; make one such call outside"
    )


def fault(device: str, kind: str, run: Run, skips: Skips) -> str | None:
    """Why a kind is not to be trusted on a device; it and what a graph makes of it are tried if nobody knows."""
    known = _verdicts(device)
    for each in (kind, Kind.of_text(kind).in_a_graph.text):
        if each not in known:
            known[each] = _try(device, each, run, skips)
    return known[kind]


def _try(device: str, kind: str, run: Run, skips: Skips) -> str | None:
    log.warning("Lengthwise: trying the Triton kernels on %s, once: %s", card_of(device), Kind.of_text(kind))
    try:
        verdict = judge(Kind.of_text(kind), torch.device(device), run, skips)
        _keep(device, kind, verdict)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver may raise
        lines = str(error).strip().splitlines() or [""]
        verdict = f"they failed with {type(error).__name__}: {lines[0][:300]}"
        if isinstance(error, torch.AcceleratorError):
            # The card serves this process no more: the next one must not try again.
            _keep(device, kind, verdict)
    if verdict is not None:
        log.warning(
            "Lengthwise: the Triton kernels are not used on %s for %s: %s. Please report what this prints: %s",
            card_of(device),
            Kind.of_text(kind),
            verdict,
            REPORT.format(device=device),
        )
    return verdict


def judge(kind: Kind, device: torch.device, run: Run, skips: Skips) -> str | None:
    """What is wrong with the kernels of a kind, in words; None if nothing is."""
    autocast = torch.autocast(device.type, enabled=False)
    # The call that is waiting may save its tensors elsewhere, or recompute them: none of ours are among them.
    own_tensors = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), autocast, own_tensors, device:
        sizes = FEW if kind.decoding else MANY
        return next((fault for size in sizes for fault in _faults(kind, device, size, run, skips)), None)


def _faults(kind: Kind, device: torch.device, size: tuple[int, int], run: Run, skips: Skips) -> Iterator[str]:
    call, notes = small_call(kind, device, *size)
    if kind.has("skipping") and not skips(call, notes):
        yield "keys are to be skipped, and none is"
    exact = _results(_in_float64(call), whole_rows, learned=kind.is_learned)
    first, second = (_results(call, lambda own: run(own, notes), learned=kind.is_learned) for _ in range(2))
    for name, truth in exact.items():
        ours = first[name].double()
        if not torch.equal(ours.isfinite(), truth.isfinite()):
            yield f"{name} is not finite where it should be, or the other way round"
            continue
        if not torch.equal(first[name], second[name]):
            yield f"{name} has other bits in a second run"
        # A log-sum-exp is a number for each row, and in float32 whatever the weights are multiplied in.
        is_lse = name == LSE
        error, size_of_row = _rows(ours - truth, is_lse), _rows(truth, is_lse)
        ratio = error / (size_of_row + (1.0 if is_lse else FLOOR * size_of_row.mean()))
        worst = float(ratio.nan_to_num(0).max()) if ratio.numel() else 0.0
        if not worst <= ALLOWED["float32" if is_lse else kind.dtype]:
            yield f"{name} is off by {worst:.1%} of a row"


def _rows(x: Tensor, each: bool) -> Tensor:
    """The norm of every row, or of each number."""
    x = x.masked_fill(~x.isfinite(), 0)
    return x.abs() if each else x.norm(dim=-1)


def _in_float64(call: AttentionCall) -> AttentionCall:
    return call.with_tensors({name: x.double() for name, x in call.tensors().items() if x.is_floating_point()})


def _results(call: AttentionCall, run: Callable[[AttentionCall], Any], *, learned: bool) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients, by name."""
    tensors = {name: x for name, x in call.tensors().items() if x.is_floating_point()}
    leaves = {name: x.detach().clone().requires_grad_(learned) for name, x in tensors.items()}
    out, lse = run(call.with_tensors(leaves))
    results = {"out": out.detach(), LSE: lse.detach()}
    if learned:
        # Through both: rows whose weights sum to 1 would cancel in the gradients of what adds to a whole row.
        upstream = [_drawn(7, x.shape, x.device).bfloat16().to(x.dtype) for x in (out, lse)]
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), upstream, allow_unused=True)
        pairs = zip(leaves.items(), gradients, strict=True)
        results |= {f"gradient of {name}": x for (name, _), x in pairs if x is not None}
    return results


def _drawn(seed: int, shape: tuple[int, ...] | torch.Size, device: torch.device) -> Tensor:
    """Normal numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device)


def small_call(
    kind: Kind, device: torch.device, queries: int, keys: int, *, batch: int = 2, kv_heads: int = 2
) -> tuple[AttentionCall, Notes]:
    """A call of a kind, and what its plan knows of it."""
    start = keys - queries
    heads = 2 * kv_heads if kind.has("shared keys") else kv_heads
    dtype = next(dtype for dtype, name in DTYPES.items() if name == kind.dtype)
    narrower = 3 * kind.is_narrower
    widths = (kind.width - narrower, kind.width - narrower, kind.value - narrower)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (
        _drawn(seed, (batch, *size, width), device).to(dtype)
        for seed, (size, width) in enumerate(zip(sizes, widths, strict=True))
    )
    slots = torch.arange(keys, device=device)[None]
    positions = slots * (1 + kind.by_position)
    real = torch.ones(batch, keys, dtype=torch.bool, device=device)
    real[-1, :5] = False
    layout = TokenLayout.of(
        positions[:, start:],
        positions,
        start=start,
        causal=not kind.has("two-sided"),
        documents=slots // 50 if kind.has("documents") else None,
        key_mask=real if kind.has("padding") else None,
    )
    options: dict[str, Any] = {
        "softcap": 5.0 if kind.has("softcap") else None,
        "logit_scale": 1 + _drawn(3, (1, heads, queries), device) / 8 if kind.has("logit scale") else None,
        "sink": _drawn(4, (heads,), device) if kind.has("sink") else None,
        "window": 50 if kind.has("window") else (Band(0, 30), Band(40, first=20)) if kind.has("bands") else None,
    }
    call = checked_call(q, k, v, layout=layout, bias=_bias(kind, layout, batch, heads), return_lse=True, **options)
    notes = {} if kind.by_position else {f"offset.{n}.0": 0 for n in range(kind.tables)}
    notes |= {"shortest": 0} if kind.has("skipping") else {}
    return call, notes | ({"shares": 1 if kind.decoding == "whole" else 3} if kind.decoding else {})


def _bias(kind: Kind, layout: TokenLayout, batch: int, heads: int) -> Bias | None:
    query, key = layout.query, layout.key
    device, queries, keys = key.device, query.shape[1], key.shape[1]
    start = keys - queries
    # Where keys are to be skipped, far ones are faint.
    steep = 1.0 * kind.has("skipping")
    falling = steep * torch.arange(90, device=device)
    terms: list[Bias] = [
        DistanceBias(_drawn(10 + n, (heads, 90), device) - falling, query, key, -20 + n) for n in range(kind.tables)
    ]
    if kind.level:
        level = _drawn(20, (1, heads, keys), torch.device("cpu")).abs().double().cumsum(2).to(device)
        slope = 2 * steep + _drawn(21, (1, heads, queries), device).abs()
        terms.append(LevelBias(level[..., start:], level, slope, kind.level))  # type: ignore[arg-type]
    if kind.lines:
        curve = DistanceBias(torch.arange(120, dtype=torch.float32, device=device).log1p()[None], query, key, -9)
        lines = kind.lines - LESS
        knots = torch.linspace(1, 4, lines - 1, dtype=torch.float32, device=device)
        slope = _drawn(30, (heads, lines), device)
        # Lines that meet at the knots.
        starts = [torch.zeros_like(slope[:, 0])]
        for n in range(lines - 1):
            starts.append(starts[-1] + (slope[:, n] - slope[:, n + 1]) * knots[n])
        factor = 1 + _drawn(31, (1, queries), device).abs() / 8
        terms.append(LineBias(curve, factor, knots, slope, torch.stack(starts, 1)))
    if kind.profile:
        side, beyond = kind.profile.split()
        count = kind.profiles - LESS
        rows = _drawn(40, (batch, heads, queries if side == "query" else keys, count), device) / count**0.5
        profiles = _drawn(41, (heads, count, 60), device)
        terms.append(QueryDistanceBias(rows, profiles, query, key, -9, side, beyond))  # type: ignore[arg-type]
    if len(terms) < 2:
        return terms[0] if terms else None
    return SumBias(tuple(terms))


def card_of(device: str) -> str:
    """What a device calls itself."""
    is_cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine()


def facts_of(device: str) -> dict[str, str]:
    """What a verdict hangs on."""
    facts = {"card": card_of(device), "driver": driver(), "torch": str(torch.__version__), "triton": triton_version()}
    if torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["capability"] = f"{major}.{minor}"
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return facts | {"kernels": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]}


def driver() -> str:
    """NVIDIA's driver, as the system knows it; CUDA's version where it does not say."""
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.exists() else []
    numbers = [word for word in words if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else str(torch.version.cuda)


def triton_version() -> str:
    """The installed Triton."""
    for package in ("triton", "pytorch-triton", "triton-windows"):
        with suppress(PackageNotFoundError):
            return version(package)
    return "none"


@cache
def _verdicts(device: str) -> dict[str, str | None]:
    """By kind, what is known of a device: read once from the cache folder, then what this process finds out."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads(_file(device).read_text())["verdicts"])
    return {}


def _file(device: str) -> Path:
    name = hashlib.sha256(json.dumps(facts_of(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "triton" / f"verdicts-{name}.json"


def _keep(device: str, kind: str, verdict: str | None) -> None:
    """Two processes that write at once lose a verdict at most, which is found out again."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        file, verdicts = _file(device), {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            verdicts = dict(json.loads(file.read_text())["verdicts"])
        content = {"device": facts_of(device), "verdicts": verdicts | {kind: verdict}}
        write_atomic(file, json.dumps(content, indent=1))
