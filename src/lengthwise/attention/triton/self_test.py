"""Kernels prove themselves on a device before they are used there, since the authors had none to run them on.

Before the first call of a kind two small calls of that kind, one of many queries and one of few, run twice. Output,
log-sum-exp and gradients must be those of plain torch in float64 on the same device, and have the same bits both times.
The verdict is kept in the cache folder, by card, driver, versions and the text of the kernels.

A call long enough to skip keys is of another kind than a short one: the small call then skips too.
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
from lengthwise.bias import Bias, DistanceBias, LevelBias, LineBias, QueryDistanceBias, SumBias
from lengthwise.files import cache_folder, write_atomic
from lengthwise.token_layout import Band, TokenLayout

REPORT = "lengthwise info --prove --device cuda"
"""The command whose report shows a fault."""

ALLOWED = {"float32": 2.0**-16, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""Errors relative to a tensor's norm: some roundings of the precision in which weights are multiplied, no fault."""

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LENGTH, FEW = 131, 3
"""How many tokens the small calls have, an odd number of more than one tile; and how many of them decode."""

log = logging.getLogger(__name__)

Notes = Mapping[str, int]
Run = Callable[[AttentionCall, Notes], Output]


class Kind(NamedTuple):
    """What decides which kernels a call needs; all plain, so that a compiled graph and a file can hold it."""

    tables: int
    """0, 1, or 2 for several."""
    by_position: bool
    """Whether tables are read by positions instead of slots."""
    level: str
    """The curve of levels; empty without them."""
    has_lines: bool
    profile: str
    """The side of profiles and what is beyond them; empty without them."""
    dtype: str
    width: int
    """The power of two that holds a head's width."""
    value: int
    is_narrower: bool
    """Whether heads are narrower than that."""
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

    def has(self, option: str) -> bool:
        """Whether the call has an option."""
        return option in self.options.split(", ")

    def __str__(self) -> str:
        parts = [f"{self.tables} table{'s' * (self.tables > 1)}{' by position' * self.by_position}"] * bool(self.tables)
        parts += [f"{self.level} levels"] * bool(self.level) + ["lines"] * self.has_lines
        parts += [f"profiles ({self.profile})"] * bool(self.profile)
        bias = " + ".join(parts) or "no bias"
        words = [bias, self.dtype, f"heads up to {self.width} wide", *filter(None, [self.options])]
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
        has_lines=terms.line is not None,
        profile=profile or "",
        dtype=DTYPES[call.dtype],
        width=powers[0],
        value=powers[1],
        is_narrower=width != powers[0] or value != powers[1],
        options=", ".join([name for name, part in options.items() if part is not None]),
        is_learned=call.needs_grad,
    )


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
        f"it has not proved itself here for {Kind.of_text(kind)}, and cannot inside a graph; make one such call outside"
    )


def fault(device: str, kind: str, run: Run) -> str | None:
    """Why a kind is not to be trusted on a device; it is tried if nobody knows."""
    known = _verdicts(device)
    if kind not in known:
        log.warning("Lengthwise: trying the Triton kernels on %s, once: %s", card_of(device), Kind.of_text(kind))
        known[kind] = judge(Kind.of_text(kind), torch.device(device), run)
        _keep(device, known)
        if known[kind] is not None:
            log.warning(
                "Lengthwise: the Triton kernels are not used on %s for %s: %s. Please report what this prints: %s",
                card_of(device),
                Kind.of_text(kind),
                known[kind],
                REPORT,
            )
    return known[kind]


def judge(kind: Kind, device: torch.device, run: Run) -> str | None:
    """What is wrong with the kernels of a kind, in words; None if nothing is."""
    autocast = torch.autocast(device.type, enabled=False)
    # The call that is waiting may save its tensors elsewhere, or recompute them: none of ours are among them.
    own_tensors = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), autocast, own_tensors:
        try:
            faults = (fault for queries in (LENGTH, FEW) for fault in _faults(kind, device, queries, run))
            return next(faults, None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a driver may raise
            lines = str(error).strip().splitlines() or [""]
            return f"they failed with {type(error).__name__}: {lines[0][:300]}"


def _faults(kind: Kind, device: torch.device, queries: int, run: Run) -> Iterator[str]:
    call, notes = small_call(kind, device, queries, LENGTH)
    exact = _results(_in_float64(call), whole_rows, learned=kind.is_learned)
    first, second = (_results(call, lambda own: run(own, notes), learned=kind.is_learned) for _ in range(2))
    for name, truth in exact.items():
        ours = first[name].double()
        if not torch.equal(ours.isfinite(), truth.isfinite()):
            yield f"{name} is not finite where it should be, or the other way round"
            continue
        if not torch.equal(first[name], second[name]):
            yield f"{name} has other bits in a second run"
        ours, truth = (x.masked_fill(~x.isfinite(), 0) for x in (ours, truth))
        error, size = float((ours - truth).norm()), float(truth.norm())
        if not error <= ALLOWED[kind.dtype] * size:
            yield f"{name} is off by {error:.2e} of {size:.2e}"


def _in_float64(call: AttentionCall) -> AttentionCall:
    return call.with_tensors({name: x.double() for name, x in call.tensors().items() if x.is_floating_point()})


def _results(call: AttentionCall, run: Callable[[AttentionCall], Any], *, learned: bool) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients, by name."""
    tensors = {name: x for name, x in call.tensors().items() if x.is_floating_point()}
    leaves = {name: x.detach().clone().requires_grad_(learned) for name, x in tensors.items()}
    out, lse = run(call.with_tensors(leaves))
    results = {"out": out.detach(), "log-sum-exp": lse.detach()}
    if learned:
        # Through both: rows whose weights sum to 1 would cancel in the gradients of what adds to a whole row.
        upstream = [_drawn(7, x.shape, x.device).bfloat16().to(x.dtype) for x in (out, lse)]
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), upstream, allow_unused=True)
        pairs = zip(leaves.items(), gradients, strict=True)
        results |= {f"gradient of {name}": x for (name, _), x in pairs if x is not None}
    return results


def _drawn(seed: int, shape: tuple[int, ...] | torch.Size, device: torch.device) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def small_call(kind: Kind, device: torch.device, queries: int, keys: int) -> tuple[AttentionCall, Notes]:
    """A call of a kind, and what its plan knows of it."""
    start, batch, kv_heads = keys - queries, 2, 2
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
    real[1, :5] = False
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
    call = checked_call(q, k, v, layout=layout, bias=_bias(kind, layout, heads), return_lse=True, **options)
    notes = {} if kind.by_position else {f"offset.{n}.0": 0 for n in range(kind.tables)}
    return call, notes | ({"shortest": 0} if kind.has("skipping") else {})


def _bias(kind: Kind, layout: TokenLayout, heads: int) -> Bias | None:
    query, key = layout.query, layout.key
    device, queries, keys = key.device, query.shape[1], key.shape[1]
    start = keys - queries
    # Where keys are to be skipped, far ones are faint.
    steep = 0.5 * torch.arange(90, device=device) if kind.has("skipping") else 0.0
    terms: list[Bias] = [
        DistanceBias(_drawn(10 + n, (heads, 90), device) - steep, query, key, -20 + n) for n in range(kind.tables)
    ]
    if kind.level:
        level = _drawn(20, (1, heads, keys), torch.device("cpu")).abs().double().cumsum(2).to(device)
        slope = _drawn(21, (1, heads, queries), device).abs()
        terms.append(LevelBias(level[..., start:], level, slope, kind.level))  # type: ignore[arg-type]
    if kind.has_lines:
        curve = DistanceBias(torch.arange(120.0, device=device).log1p()[None], query, key, -9)
        knots = torch.tensor([1.0, 2.0, 3.0], device=device)
        slope = _drawn(30, (heads, 4), device)
        # Lines that meet at the knots.
        steps = [slope[:, n] * knots[n] - slope[:, n + 1] * knots[n] for n in range(3)]
        starts = [torch.zeros_like(slope[:, 0])]
        for step in steps:
            starts.append(starts[-1] + step)
        factor = 1 + _drawn(31, (1, queries), device).abs() / 8
        terms.append(LineBias(curve, factor, knots, slope, torch.stack(starts, 1)))
    if kind.profile:
        side, beyond = kind.profile.split()
        rows = _drawn(40, (2, heads, queries if side == "query" else keys, 3), device)
        profiles = _drawn(41, (heads, 3, 60), device)
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


def _keep(device: str, verdicts: dict[str, str | None]) -> None:
    """Two processes that write at once lose a verdict at most, which is found out again."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        file = _file(device)
        with suppress(OSError, ValueError, KeyError, TypeError):
            verdicts = dict(json.loads(file.read_text())["verdicts"]) | verdicts
        write_atomic(file, json.dumps({"device": facts_of(device), "verdicts": verdicts}, indent=1))
