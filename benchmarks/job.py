"""One job of attention with ordinary inputs, in the words of whichever revision of Lengthwise is imported.

The same file runs under two revisions, so what they call differently stands in `adapter` and nowhere else.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lengthwise as lw

HEADS, DIM = 12, 64
SPANS, ROWS = 8, 128
"""The check looks at so many spans of so many rows, spread evenly: at 1,024 tokens that is every row."""

RELATIVE, LOSSES = 1e-5, 16
"""A result may be off by that part of its norm, some 100 units in the last place, and so many losses of float32."""

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "fire": ("fire", {"threshold": 65536.0}),
    "fire-512": ("fire", {"threshold": 512.0}),
    "dape": ("kerple+dape", {}),
    "dapev2": ("kerple+dapev2", {}),
}
"""Names of our own: FIRE's L beyond the length, and as in its paper; DAPE over what its paper has it over."""

EXTRAS: dict[str, Callable[[int], Tensor | float]] = {
    "sink": lambda length: torch.randn(HEADS),
    "softcap": lambda length: 30.0,
    "logit_scale": lambda length: 0.9 + 0.2 * torch.rand(1, HEADS, length),
}
"""Arguments of `attend` beside the bias, by name, for a call of so many tokens."""


@dataclass(frozen=True)
class Case:
    """An encoding, or "plain" for `attend` alone, at a length; decoding is one query against that many keys.

    mode is "forward", "train" (forward and backward), "decode-ready" or "decode-built" (building the bias is timed).
    """

    encoding: str
    mode: str
    length: int
    extra: str = ""

    @property
    def name(self) -> str:
        """encoding/mode/length, which a pattern matches."""
        return f"{self.extra or self.encoding}/{self.mode}/{self.length}"


class Adapter(NamedTuple):
    """What an encoding and `attend` are called with. A place is where queries and keys stand."""

    place: Callable[[int, int], object]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    state: Callable[..., dict[str, Tensor] | None]
    """(encoding, x, q, k)"""
    described: Callable[..., dict[str, object]]
    """(encoding, x, place, state, q, k) -> bias and rescore as arguments of `attend`; q and k are not yet rotated."""
    attend: Callable[..., Tensor]


def adapter() -> Adapter:
    """The API of the revision at hand: with layouts, or with positions of queries and keys as at 9fcc0ca."""
    if hasattr(lw, "layout"):
        return Adapter(
            place=lambda rows, keys: lw.layout(rows, past=keys - rows),
            rotate=lambda encoding, q, k, layout, state: encoding.rotate(q, k, layout, state),
            state=lambda encoding, x, q, k: encoding.state(x, **_own_qk(encoding, "state", q, k)),
            described=lambda encoding, x, layout, state, q, k: {
                "bias": encoding.bias(x, layout, state, **_own_qk(encoding, "bias", q, k)),
                "rescore": encoding.rescore(x, layout, state),
            },
            attend=lambda q, k, v, layout, **given: lw.attend(q, k, v, layout=layout, **given),
        )
    return Adapter(
        place=lambda rows, keys: (torch.arange(keys)[keys - rows :], torch.arange(keys)),
        rotate=lambda encoding, q, k, place, state: encoding.rotate(q, k, *place, state),
        state=lambda encoding, x, q, k: encoding.state(x),
        described=lambda encoding, x, place, state, q, k: {
            "bias": encoding.bias(x, *place, state),
            "rescore": encoding.rescore if encoding.overrides("rescore") else None,
        },
        attend=lambda q, k, v, place, **given: lw.attend(q, k, v, **given),
    )


def _own_qk(encoding: nn.Module, hook: str, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """What a hook gets beside tokens, where the revision has it."""
    return encoding.own_qk(hook, q, k) if hasattr(encoding, "own_qk") else {}


class Job:
    """A case with its inputs: unit-variance q, k, v, layer-normed tokens, the encoding at its initial parameters."""

    def __init__(self, case: Case) -> None:
        self.case, self.api = case, adapter()
        self.learning, decoding = case.mode == "train", case.mode.startswith("decode")
        self.rows = 1 if decoding else case.length
        torch.manual_seed(0)
        self.q, self.k, self.v, self.d_out = torch.randn(4, 1, HEADS, case.length, DIM)
        self.x = F.layer_norm(torch.randn(1, case.length, HEADS * DIM), (HEADS * DIM,))
        self.extra = {case.extra: EXTRAS[case.extra](case.length)} if case.extra else {}
        self.encoding = _encoding(case)
        self.last_q = self.q[:, :, -self.rows :].contiguous()
        self.place = None if self.encoding is None else self.api.place(self.rows, case.length)
        for tensor in (self.last_q, self.k, self.v, *_tensors(self.extra).values()):
            tensor.requires_grad_(self.learning)
        self.last_extra = _of_rows(self.extra, slice(-self.rows, None))
        self.state = self.ready = None
        if decoding and self.encoding is not None:
            with torch.no_grad():
                self.state = self.api.state(self.encoding, self.x, self.q, self.k)
                self.ready = self._described(self.state) if case.mode == "decode-ready" else None

    def call(self) -> object:
        """What is timed."""
        if self.learning:
            return self._gradients(self._out(), self.d_out)
        with torch.no_grad():
            return self._out()

    def check(self) -> tuple[str | None, dict[str, dict[str, object]]]:
        """What is wrong against the reference in float64, or None; and some numbers of each result to compare.

        It looks for faults, not for precision, which is the tests' matter. A sum of thousands of terms that cancel, as
        some gradients are, has no scale but what the reference itself loses in float32.
        """
        results = self._results()
        exact, rounded = self._reference(torch.float64), self._reference(torch.float32)
        samples = {}
        for name, value in exact.items():
            error, lost = (float((other[name] - value).norm()) for other in (results, rounded))
            tolerance = RELATIVE * float(value.norm()) + LOSSES * lost
            if not error <= tolerance:
                return f"{name} is off by {error:.1e} in norm, where {tolerance:.1e} is allowed", {}
            some = results[name].flatten()[:: max(1, value.numel() // 64)]
            samples[name] = {"values": some.tolist(), "tolerance": tolerance}
        return None, samples

    def _out(self) -> Tensor:
        if self.encoding is None:
            return lw.attend(self.last_q, self.k, self.v, **self.last_extra)
        q, k, given = self.prepared()
        return self.api.attend(q, k, self.v, self.place, **given)

    def prepared(self) -> tuple[Tensor, Tensor, dict[str, object]]:
        """Queries, keys, and bias and rescore as arguments of `attend`; without a cache the state is computed here."""
        state = self.state
        if state is None:
            state = self.api.state(self.encoding, self.x, self.last_q, self.k)
        q, k = self.api.rotate(self.encoding, self.last_q, self.k, self.place, state)
        return q, k, self.ready or self._described(state)

    def _described(self, state: dict[str, Tensor] | None) -> dict[str, object]:
        x, k = self.x[:, -self.rows :], self.k[:, :, -self.rows :]
        return self.api.described(self.encoding, x, self.place, state, self.last_q, k)

    def _gradients(self, out: Tensor, d_out: Tensor) -> list[Tensor | None]:
        parameters = [] if self.encoding is None else list(self.encoding.parameters())
        learned = [self.last_q, self.k, self.v, *_tensors(self.extra).values(), *parameters]
        return list(torch.autograd.grad(out, learned, d_out, allow_unused=True))

    def _results(self) -> dict[str, Tensor]:
        """The output of the rows that are looked at, and the gradients of their sum."""
        rows = torch.cat([torch.arange(*span) for span in self._spans()]) - (self.case.length - self.rows)
        with torch.set_grad_enabled(self.learning):
            out = self._out()
        results = {"out": out.detach()[:, :, rows]}
        if not self.learning:
            return results
        d_out = torch.zeros_like(self.d_out).index_copy(2, rows, self.d_out[:, :, rows])
        return results | self._named(self._gradients(out, d_out))

    def _reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same by the reference, span by span, in a dtype."""
        q, k, v, x = (t.detach().to(dtype).requires_grad_(self.learning) for t in (self.q, self.k, self.v, self.x))
        encoding = _encoding(self.case)
        parameters = [] if encoding is None else list(encoding.to(dtype).parameters())
        cast = {n: t.detach().to(dtype).requires_grad_(self.learning) for n, t in _tensors(self.extra).items()}
        learned = [q, k, v, *cast.values(), *parameters]
        outs, sums = [], [torch.zeros_like(tensor) for tensor in learned]
        for first, last in self._spans():
            some_q, some_k, some_v = q[:, :, first:last], k[:, :, :last], v[:, :, :last]
            given = _of_rows(self.extra | cast, slice(first, last)) | {"backend": "reference"}
            with torch.set_grad_enabled(self.learning):
                if encoding is None:
                    out = lw.attend(some_q, some_k, some_v, **given)
                else:
                    place = self.api.place(last - first, last)
                    state = self.api.state(encoding, x[:, :last], q[:, :, :last], some_k)
                    turned = self.api.rotate(encoding, some_q, some_k, place, state)
                    own = some_q, some_k[:, :, first:]
                    given |= self.api.described(encoding, x[:, first:last], place, state, *own)
                    out = self.api.attend(*turned, some_v, place, **given)
            outs.append(out.detach())
            if self.learning:
                some = torch.autograd.grad(out, learned, self.d_out[:, :, first:last].to(dtype), allow_unused=True)
                sums = [total if one is None else total + one for total, one in zip(sums, some, strict=True)]
        results = {"out": torch.cat(outs, 2)}
        return results | self._named(sums) if self.learning else results

    def _named(self, gradients: list[Tensor | None]) -> dict[str, Tensor]:
        """Gradients by what they are of; nothing learned from a tensor is a gradient of 0."""
        named = {"q": self.last_q, "k": self.k, "v": self.v} | _tensors(self.extra)
        named |= {} if self.encoding is None else dict(self.encoding.named_parameters())
        return {
            f"gradient of {name}": torch.zeros_like(of) if one is None else one
            for (name, of), one in zip(named.items(), gradients, strict=True)
        }

    def _spans(self) -> list[tuple[int, int]]:
        """(first, last + 1) of the rows that are checked."""
        if self.rows == 1:
            return [(self.case.length - 1, self.case.length)]
        length = self.case.length
        if length <= SPANS * ROWS:
            return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]
        return [(first, first + ROWS) for first in torch.linspace(0, length - ROWS, SPANS).long().tolist()]


def _tensors(extra: dict[str, Tensor | float]) -> dict[str, Tensor]:
    return {name: value for name, value in extra.items() if isinstance(value, Tensor)}


def _of_rows(extra: dict[str, Tensor | float], rows: slice) -> dict[str, Tensor | float]:
    return {name: value[:, :, rows] if name == "logit_scale" else value for name, value in extra.items()}


def _encoding(case: Case) -> nn.Module | None:
    """The encoding; parameters that start at 0, as CoPE's table does, would hide a fault and are drawn."""
    if case.encoding == "plain":
        return None
    name, options = VARIANTS.get(case.encoding, (case.encoding, {}))
    torch.manual_seed(0)
    encoding = lw.make(name, heads=HEADS, width=HEADS * DIM, head_dim=DIM, train_length=case.length, **options)
    with torch.no_grad():
        for name, parameter in encoding.named_parameters():
            if not parameter.any():
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return encoding
