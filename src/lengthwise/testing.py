"""The laws that every encoding obeys under every backend, as a kit for encodings of your own.

    import lengthwise as lw
    from lengthwise.testing import check_laws

    lw.register("mine", Mine)
    check_laws("mine")                  # raises AssertionError with the law that is broken

A law takes a `Subject` and raises. They run on one attention layer whose weights are 20 times GPT-2's, because small
weights make attention so flat that a wrong position hardly shows.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lengthwise.attention import BACKENDS, attend, checked_call, merge, run, skipping
from lengthwise.attention.backend import Refusal
from lengthwise.bias import Bias, DenseBias, at_least_float32, rebuild
from lengthwise.encodings import AttentionShape, Encoding, PositionError
from lengthwise.encodings.registry import build, find
from lengthwise.rescore import Rescore
from lengthwise.token_layout import Band, TokenLayout, Window
from lengthwise.token_layout import layout as layout_of

LOUD = 20 * 0.02
"""The size of all weights here; a twentieth of it is GPT-2's."""

RELATIVE = 1e-5
"""How far two roads to the same float32 output may differ, relative to the largest output."""

FEWEST_NUMBERS = 48
"""How many numbers of a gradient an error is taken from, at least."""


NUMBERS = 2000
"""Up to so many learned numbers are changed one by one to see what that does."""

TRIED = ("auto", "row_block", "sdpa", "reference")
"""What the laws run on: "auto", which is the kernel where it fits; FlexAttention would compile anew at every shape."""


class DoesNotApply(Exception):  # noqa: N818, it is no error
    """Raised by a law that says nothing about its subject, with the reason."""


@dataclass(frozen=True)
class Subject:
    """What a law is tried on: an encoding by name, its shape, and a backend."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    backend: str = "reference"
    causal: bool = True
    heads: int = 3
    head_dim: int = 8
    batch: int = 2
    length: int = 37
    train_length: int = 64

    @property
    def width(self) -> int:
        """The model's width."""
        return self.heads * self.head_dim

    def encoding(self) -> Encoding:
        """The encoding at its initial parameters, the same every time."""
        shape = AttentionShape(self.heads, self.width, self.head_dim, self.train_length, self.causal)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build(self.name, shape, self.options)

    def layer(self) -> "Layer":
        """A layer with this encoding and loud weights, the same every time."""
        layer = Layer(self.encoding(), self.backend)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=LOUD)
        return layer

    def layout(self, length: int | None = None) -> TokenLayout:
        """Tokens that are counted from 0."""
        return layout_of(length or self.length, causal=self.causal)

    def tokens(self, length: int | None = None, batch: int | None = None) -> Float[Tensor, "batch position width"]:
        """Tokens as they leave a layer norm, the same every time."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch or self.batch, length or self.length, self.width, generator=generator)


@dataclass
class Cache:
    """Keys before rotation, values and states of all tokens so far, in a plain list; `room` slots stay free behind."""

    room: int = 0
    parts: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return sum(part["k"].shape[2] for part in self.parts)

    def append(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """Everything, old and new, along axis 2, with the free slots 0."""
        self.parts.append(new)
        free = {name: x.new_zeros(*x.shape[:2], self.room, *x.shape[3:]) for name, x in new.items()}
        return {name: torch.cat([*(part[name] for part in self.parts), free[name]], 2) for name in new}


class Layer(nn.Module):
    """One attention layer, the smallest model in which a positional fault shows."""

    def __init__(self, encoding: Encoding, backend: str = "reference") -> None:
        super().__init__()
        shape = encoding.shape
        self.encoding, self.backend = encoding, backend
        self.to_qkv = nn.Linear(shape.width, 3 * shape.heads * shape.head_dim)
        for parameter in self.to_qkv.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        x: Float[Tensor, "batch query width"],
        *,
        positions: Int[Tensor, "#batch query"] | None = None,
        key_mask: Bool[Tensor, "batch key"] | None = None,
        documents: Int[Tensor, "batch key"] | None = None,
        window: Window | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch query out"]:
        """The new tokens' outputs; masks and documents cover the cached tokens too."""
        encoding, start, room = self.encoding, cache.length if cache else 0, cache.room if cache else 0
        query = torch.arange(start, start + x.shape[1])[None] if positions is None else torch.atleast_2d(positions)
        before = torch.arange(-start, 0) + query[:, :1]
        behind = torch.arange(1, room + 1) + query[:, -1:]
        layout = TokenLayout.of(
            query,
            torch.cat([before, query, behind], 1) if cache else query,
            key_mask=key_mask if key_mask is None else F.pad(key_mask, (0, room)),
            documents=documents if documents is None else F.pad(documents, (0, room), value=-1),
            start=start,
            causal=encoding.shape.causal,
        )
        x = encoding.embed(x, layout)
        q, k, v = self.qkv(x)
        own_qk = encoding.own_qk("bias", q, k)
        state = encoding.state(x, layout.query_mask, **encoding.own_qk("state", q, k))
        new = {"k": k, "v": v} | {f"state {name}": value for name, value in (state or {}).items()}
        every = cache.append(new) if cache else new
        state = state and {name: every[f"state {name}"] for name in state}
        q, k = encoding.rotate(q, every["k"], layout, state)
        out = attend(
            q,
            k,
            every["v"],
            layout=layout,
            bias=encoding.bias(x, layout, state, **own_qk),
            rescore=encoding.rescore(x, layout, state),
            logit_scale=encoding.logit_scale(x, layout, window=window),
            sink=encoding.sink(x),
            scale=self.scale,
            window=window,
            backend=self.backend,
        )
        return out.transpose(1, 2).flatten(2)

    @property
    def scale(self) -> float:
        """1 / sqrt(head_dim), also where an encoding makes keys wider."""
        return float(self.encoding.shape.head_dim**-0.5)

    def qkv(self, x: Float[Tensor, "batch query width"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, head, position, dim)."""
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.encoding.shape.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def described(self, x: Float[Tensor, "batch key width"], layout: TokenLayout) -> tuple[Bias | None, Rescore | None]:
        """The bias and the rescore of some of the tokens as queries, and all of them as keys."""
        encoding, own = self.encoding, slice(x.shape[1] - layout.query_count, None)
        q, k, _ = self.qkv(x)
        state = encoding.state(x, **encoding.own_qk("state", q, k))
        rows = x[:, own] if state else x
        bias = encoding.bias(rows, layout, state, **encoding.own_qk("bias", q[:, :, own], k[:, :, own]))
        return bias, encoding.rescore(rows, layout, state)

    def parts(
        self, x: Float[Tensor, "batch query width"], layout: TokenLayout, backend: str, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of one pass, (batch, head, query, ...); options are `attend`'s."""
        encoding = self.encoding
        x = encoding.embed(x, layout)
        q, k, v = self.qkv(x)
        own_qk = encoding.own_qk("bias", q, k)
        state = encoding.state(x, layout.query_mask, **encoding.own_qk("state", q, k))
        q, k = encoding.rotate(q, k, layout, state)
        made: dict[str, Any] = {
            "bias": encoding.bias(x, layout, state, **own_qk),
            "rescore": encoding.rescore(x, layout, state),
            "logit_scale": encoding.logit_scale(x, layout),
            "sink": encoding.sink(x),
            "scale": self.scale,
        }
        call = checked_call(q, k, v, layout=layout, return_lse=True, **(made | options))
        if backend != "auto" and isinstance(refusal := BACKENDS[backend].plan(call), Refusal):
            raise DoesNotApply("; ".join(refusal.reasons))
        out, lse = run(call, backend)
        assert lse is not None, "A backend that took the call gave no lse."
        return out, lse


def check_laws(name: str, options: Mapping[str, object] | None = None) -> None:
    """Run every law on an encoding, with every backend that takes it; an AssertionError names the law."""
    forms = (True, False) if find(name).two_sided else (True,)
    for backend, causal in product(TRIED, forms):
        subject = Subject(name, options or {}, backend, causal)
        if refuses(subject):
            continue
        for law in LAWS:
            try:
                law(subject)
            except DoesNotApply:
                continue
            except AssertionError as error:
                form = "" if causal else ", two-sided"
                raise AssertionError(f"{name} under {backend}{form}: {law.__doc__} {error}") from error


def refuses(subject: Subject) -> bool:
    """Whether the backend has an objection to the encoding, or the encoding to the subject's form."""
    try:
        subject.layer()(subject.tokens(3))
    except NotImplementedError:
        return True
    return False


def future_does_not_leak(subject: Subject) -> None:
    """Changing the last token, be it to NaN or infinity, changes no earlier output by a single bit."""
    if not subject.causal:
        raise DoesNotApply("it is about time, and the form is two-sided")
    layer, x = subject.layer(), subject.tokens()
    for last in (torch.randn_like(x[:, -1]), torch.nan, torch.inf):
        changed = x.clone()
        changed[:, -1] = last
        with skipping(False):
            before, after = (layer(tokens)[:, :-1] for tokens in (x, changed))
        assert torch.equal(after, before), f"It does where the last token becomes {last}."
        before, after = (layer(tokens)[:, :-1] for tokens in (x, changed))
        assert_near(after, before, f"with skipping, where the last token becomes {last}")


def cached_decoding_equals_one_pass(subject: Subject) -> None:
    """Tokens one by one, in chunks, after padding, across documents, in a static cache: all give one pass's output."""
    if not subject.causal:
        raise DoesNotApply("it is about time, and the form is two-sided")
    layer, x = subject.layer(), subject.tokens()
    whole = torch.arange(subject.length)[None].expand(subject.batch, -1)
    padded = torch.ones(subject.batch, subject.length, dtype=torch.bool)
    padded[0, :7] = False
    border = subject.length // 2 + 1
    setups: dict[str, dict[str, Tensor]] = {
        "plain": {"positions": whole},
        "padded": {"positions": (padded.cumsum(1) - 1).clamp(min=0), "key_mask": padded},
        "packed": {"positions": whole - border * (whole >= border), "documents": (whole >= border).long()},
    }
    for name, setup in setups.items():
        for chunk in (1, 5):
            for room in (0, 9):
                cache = Cache(room)
                for first in range(0, subject.length, chunk):
                    stop = min(first + chunk, subject.length)
                    upto = {key: value[:, :stop] for key, value in setup.items()}
                    step = upto | {"positions": upto["positions"][:, first:]}
                    got = layer(x[:, first:stop], **step, cache=cache)
                    want = layer(x[:, :stop], **upto)[:, first:]
                    real = setup.get("key_mask", torch.ones_like(padded))[:, first:stop]
                    assert_near(got[real], want[real], f"{name}, chunks of {chunk}, {room} free slots, token {first}")


def padding_changes_nothing(subject: Subject) -> None:
    """A sequence padded on either side gives the output that it gives alone."""
    layer, x, pad = subject.layer(), subject.tokens(), 5
    alone = layer(x)
    exact = replace(subject, backend="reference").layer().double()(x.double())
    for left in (True, False):
        junk = torch.randn(subject.batch, pad, subject.width)
        key_mask = F.pad(torch.ones(x.shape[:2], dtype=torch.bool), (pad, 0) if left else (0, pad))
        positions = (key_mask.cumsum(1) - 1).clamp(min=0)
        out = layer(torch.cat([junk, x] if left else [x, junk], 1), positions=positions, key_mask=key_mask)
        assert_near(out[key_mask].view_as(alone), alone, f"padded {'left' if left else 'right'}", exact)


def packing_changes_nothing(subject: Subject) -> None:
    """Documents packed into one sequence give the outputs that they give alone."""
    layer, x, border = subject.layer(), subject.tokens(), subject.length // 3 + 1
    alone = [layer(x[:, :border]), layer(x[:, border:])]
    slots = torch.arange(subject.length)[None].expand(subject.batch, -1)
    second = slots >= border
    packed = layer(x, positions=slots - border * second, documents=second.long())
    assert_near(packed, torch.cat(alone, 1), "packed")


def agrees_with_reference(subject: Subject) -> None:
    """Output and every gradient are as near to float64 as the reference is in float32, within a factor of two."""
    layer, x = subject.layer(), subject.tokens()
    reference = copy.deepcopy(layer)
    reference.backend = "reference"
    roads = {"exact": copy.deepcopy(reference).double(), "plain": reference, "ours": layer}
    found = {road: _with_gradients(model, x.to(model.to_qkv.weight.dtype)) for road, model in roads.items()}
    exact, plain, ours = found.values()
    assert ours.keys() == exact.keys(), f"No gradient reaches {sorted(exact.keys() - ours.keys())}."
    # A parameter's gradient is a sum over all tokens of the batch.
    _assert_as_exact(ours, plain, exact, subject.batch * subject.length)


def gradients_are_right(subject: Subject) -> None:
    """The gradients of input and learned parameters are those of finite differences in float64."""
    small = replace(subject, heads=2, head_dim=4, batch=1, length=6, train_length=8)
    layer = small.layer().double()
    x = small.tokens().double().requires_grad_()
    learned = dict(layer.encoding.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        named = {f"encoding.{name}": value for name, value in zip(learned, values, strict=True)}
        return torch.func.functional_call(layer, named, (x,))

    # One by one, or along random directions where there are too many.
    many = sum(value.numel() for value in learned.values()) > NUMBERS
    assert torch.autograd.gradcheck(run, (x, *learned.values()), fast_mode=many), "They are not."


def gradients_are_deterministic(subject: Subject) -> None:
    """The same call twice gives the same bits, forward and backward."""
    first, second = (_with_gradients(subject.layer(), subject.tokens()) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs."


def half_precision_keeps_positions(subject: Subject) -> None:
    """At 8,192 and 32,768 tokens the output's relative error in half precision is at most twice that of no bias."""
    for dtype in (torch.bfloat16, torch.float16):
        for length in (8_192, 32_768):
            late = replace(subject, heads=2, head_dim=32, batch=1, length=length, train_length=length)
            biased = _half_precision_error(late, dtype)
            plain = _unbiased_error(subject.backend, subject.causal, length, dtype)
            assert biased <= 2 * plain, f"At {length} in {dtype}: {biased:.1e}, unbiased {plain:.1e}."


def constants_survive_casting(subject: Subject) -> None:
    """No float buffers, no parameters without an axis, and what is not learned is the same bits in a bfloat16 model."""
    layer, x = subject.layer(), subject.tokens()
    encoding = layer.encoding
    assert not [name for name, buffer in encoding.named_buffers() if buffer.is_floating_point()], "It has buffers."
    assert all(parameter.ndim for parameter in encoding.parameters()), "A parameter has no axis."
    layout = subject.layout()
    if encoding.learned_parameters == 0 and (bias := encoding.bias(x, layout)):
        cast = encoding.bfloat16().bias(x.bfloat16(), layout)
        assert cast is not None, "The bias is gone."
        assert torch.equal(cast.dense(), bias.dense()), "The bias changed."


def holds_beyond_its_training_length(subject: Subject) -> None:
    """At 8 times the training length the output is finite, or a PositionError names the limit."""
    layer, length = subject.layer(), 8 * subject.train_length
    refusal = None
    try:
        out = layer(subject.tokens(length, batch=1))
    except PositionError as error:
        refusal = str(error)
    if layer.encoding.limit is None:
        assert refusal is None, f"It has no limit and says: {refusal}"
        assert out.isfinite().all(), "It is not."
    else:
        assert str(layer.encoding.limit) in (refusal or ""), f"It ends at {layer.encoding.limit} and says: {refusal}"


def describes_itself(subject: Subject) -> None:
    """It names its paper, and its bias is of the kind it says, float32 or better, with tiles that are parts of it."""
    layer, x = subject.layer(), subject.tokens()
    encoding = layer.encoding
    assert encoding.paper, "It names no paper."
    bias, _ = layer.described(x, subject.layout())
    if bias is None:
        assert encoding.kind is None, f"It says {encoding.kind} and has no bias."
        raise DoesNotApply("it has no bias")
    assert encoding.kind is not None, "It has a bias and says none."
    dense = bias.dense()
    assert dense.dtype == at_least_float32(dense).dtype, f"The bias is {dense.dtype}."
    assert tuple(dense.shape) == bias.shape, "The bias is of another shape than it says."
    assert torch.equal(bias.tile(slice(3, 9), slice(2, 30)), dense[:, :, 3:9, 2:30]), "A tile is not a part of it."


def is_rebuilt_from_its_parts(subject: Subject) -> None:
    """A bias put together again from its tensors and plain values is the same bias, and so is a rescore."""
    bias, rescore = subject.layer().described(subject.tokens(), subject.layout())
    if bias is not None:
        again = rebuild(type(bias).__name__, bias.tensors(), bias.static())
        assert torch.equal(again.dense(), bias.dense()), "It is not."
        leaves, structure = torch.utils._pytree.tree_flatten(bias)
        assert torch.equal(torch.utils._pytree.tree_unflatten(leaves, structure).dense(), bias.dense()), (
            "Its tree is not."
        )
    if rescore is not None:
        again = rebuild(type(rescore).__name__, rescore.tensors(), rescore.static())
        same = zip(again.tensors().values(), rescore.tensors().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in same), "The rescore is not."


def spreads_over_the_batch(subject: Subject) -> None:
    """A bias of one sequence or of one head serves all of them, as the reference spreads it, also for a few queries."""
    layer = replace(subject, batch=1).layer()
    generator = torch.Generator().manual_seed(4)
    for queries in (1, subject.length):
        layout = layout_of(queries, past=subject.length - queries, causal=subject.causal)
        with torch.no_grad():
            bias, _ = layer.described(subject.tokens(batch=1), layout)
        if bias is None:
            raise DoesNotApply("it has no bias")
        shape = (3, subject.heads, subject.length, subject.head_dim)
        q, k, v = torch.randn(3, *shape, generator=generator)
        narrow = [bias, *([_one_head(bias)] if bias.shape[1] > 1 else [])]
        for own in narrow:
            got, wanted = (
                attend(q[:, :, -queries:], k, v, layout=layout, bias=own, backend=backend)
                for backend in (subject.backend, "reference")
            )
            assert_near(got, wanted, f"{queries} queries, a bias of {own.shape}")


def _one_head(bias: Bias) -> Bias:
    """A bias of the first head alone, of the same kind where it can be."""
    own = {name: x[:, :1] for name, x in bias.tensors().items() if x.ndim >= 3}
    for name, x in bias.tensors().items():
        part = name.rpartition(".")[2]
        if part == "profiles" or (part in ("table", "slope", "intercept") and x.ndim == 2):
            own[name] = x[:1]
    made = bias.rebuilt(own)
    return made if made.shape[1] == 1 else DenseBias(bias.dense()[:, :1])


def lse_is_the_reference_s(subject: Subject) -> None:
    """The log-sum-exp is the reference's, and its gradient too, also where nothing else has one, skipping or not."""
    layer, x, layout = subject.layer(), subject.tokens(), subject.layout()
    roads = {"exact": ("reference", torch.float64), "plain": ("reference", torch.float32)}
    for on in (True, False):
        found = {}
        for road, (backend, dtype) in (roads | {"ours": (subject.backend, torch.float32)}).items():
            model, tokens = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
            with skipping(on):
                _, lse = model.parts(tokens, layout, backend)
            (gradient,) = torch.autograd.grad(lse.square().sum(), tokens)
            found[road] = {"lse": lse.detach(), f"the gradient of lse alone, skipping {on}": gradient}
        _assert_as_exact(found["ours"], found["plain"], found["exact"], subject.length)


def bands_merge(subject: Subject) -> None:
    """Attention to near and to far keys, merged, is attention to all of them."""
    layer, x, layout = subject.layer(), subject.tokens(), subject.layout()
    if layer.encoding.overrides("rescore"):
        raise DoesNotApply("a rescore sees whole rows")
    whole = layer.parts(x, layout, subject.backend)
    near, far = {"window": Band(-subject.length, 5)}, {"window": Band(5), "sink": None}
    parts = [layer.parts(x, layout, subject.backend, **part) for part in (near, far)]
    for got, wanted, name in zip(merge(*parts), whole, ("out", "lse"), strict=True):
        assert_near(got, wanted, name)


def sinks_take_weight(subject: Subject) -> None:
    """With a sink rows sum to what it leaves of 1, and a row that sees nothing is 0, with the sink as its lse."""
    layer, x = subject.layer(), subject.tokens()
    sink = torch.linspace(-2, 2, subject.heads)
    hidden = torch.ones(subject.batch, subject.length, dtype=torch.bool)
    hidden[0] = False
    layout = layout_of(subject.length, causal=subject.causal, key_mask=hidden)
    out, lse = layer.parts(x, layout, subject.backend, sink=sink)
    assert not out[0].any(), "A row that sees nothing is not 0."
    assert torch.equal(lse[0], sink[:, None].expand_as(lse[0])), "A row that sees nothing has another lse."
    wanted, wanted_lse = layer.parts(x, layout, "reference", sink=sink)
    assert_near(out, wanted, "out")
    assert_near(lse, wanted_lse, "lse")


def sides_are_as_declared(subject: Subject) -> None:
    """A two-sided form gives mirrored outputs for a mirrored text if and only if it says that it is symmetric."""
    if subject.causal:
        raise DoesNotApply("a causal form has one side")
    # As many tokens as a whole grid has, whose mirror image is a grid again.
    layer, x = subject.layer(), subject.tokens(subject.train_length)
    with torch.no_grad():
        out, mirrored = layer(x), layer(x.flip(1)).flip(1)
    alike = float((out - mirrored).abs().max()) <= RELATIVE * float(out.abs().max())
    assert alike == layer.encoding.symmetric, f"It says {layer.encoding.symmetric}, and mirrored it is {alike}."


def parts_equal_the_whole(subject: Subject) -> None:
    """An encoding for some of its heads gives of these what the whole gives of them."""
    layer, x, layout = subject.layer(), subject.tokens(), subject.layout()
    whole, _ = layer.parts(x, layout, subject.backend)
    for heads in ([1], [2, 0]):
        part = copy.deepcopy(layer)
        try:
            part.encoding = layer.encoding.select_heads(heads)
        except NotImplementedError as error:
            raise DoesNotApply(str(error)) from error
        weight, bias = (
            p.detach().unflatten(0, (3, subject.heads, -1)) for p in (layer.to_qkv.weight, layer.to_qkv.bias)
        )
        part.to_qkv.weight, part.to_qkv.bias = (nn.Parameter(p[:, heads].flatten(0, 2)) for p in (weight, bias))
        own, _ = part.parts(x, layout, subject.backend)
        assert_near(own, whole[:, heads], f"heads {heads}")


LAWS: tuple[Callable[[Subject], None], ...] = (
    describes_itself,
    is_rebuilt_from_its_parts,
    future_does_not_leak,
    cached_decoding_equals_one_pass,
    padding_changes_nothing,
    packing_changes_nothing,
    agrees_with_reference,
    gradients_are_right,
    gradients_are_deterministic,
    half_precision_keeps_positions,
    constants_survive_casting,
    holds_beyond_its_training_length,
    spreads_over_the_batch,
    lse_is_the_reference_s,
    bands_merge,
    sinks_take_weight,
    sides_are_as_declared,
    parts_equal_the_whole,
)


def _assert_as_exact(ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], terms: int) -> None:
    """Twice the error of the reference in float32 against float64, plus the rounding of sums of so many terms."""
    largest = max(float(value.norm()) for value in exact.values())
    for name, value in exact.items():
        error, allowed = (float((other[name] - value).norm()) for other in (ours, plain))
        # Two sums of the same terms in another order differ by about sqrt(terms) roundings of the sum.
        # A gradient that is 0 in exact arithmetic is a sum of terms that cancel, each as large as others' whole sums.
        vanishes = float(value.norm()) < 1e-9 * largest
        rounding = torch.finfo(torch.float32).eps * terms**0.5 * (largest if vanishes else float(value.norm()))
        assert error <= 2 * allowed + rounding, f"{name}: error {error:.1e}, the reference makes {allowed:.1e}."


def assert_near(actual: Tensor, expected: Tensor, where: str, exact: Tensor | None = None) -> None:
    """Two roads to one float32 output agree to RELATIVE of its scale.

    Given the output in float64 they may differ by twice the error of `expected`, too: loud weights turn the rounding of
    a learned position into more of the output than RELATIVE, at some shapes.
    """
    empty = actual == expected  # both may be -inf
    error = float((actual - expected).detach().masked_fill(empty, 0).abs().max())
    scale = float(expected.detach().masked_fill(empty & expected.isinf(), 0).abs().max())
    allowed = RELATIVE * scale + (0.0 if exact is None else 2 * float((expected - exact).detach().abs().max()))
    assert error <= allowed, f"They differ by {error:.1e}, where the largest is {scale:.1e}: {where}."


def _with_gradients(layer: Layer, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of input and parameters, by name, for several gradients of the output, stacked.

    One try would not do: a sum that happens to cancel has no error to compare with. A parameter of few numbers needs
    more of them, or two errors would differ by the draw alone.
    """
    fewest = min(parameter.numel() for parameter in layer.parameters())
    tries = max(4, math.ceil(FEWEST_NUMBERS / fewest))
    x = x.clone().requires_grad_()
    out = layer(x)
    generator = torch.Generator().manual_seed(3)
    sources = {"x": x} | dict(layer.named_parameters())
    found: dict[str, list[Tensor]] = {"out": [out.detach()]}
    for _ in range(tries):
        direction = torch.randn(out.shape, generator=generator).to(out.dtype)
        gradients = torch.autograd.grad(out, tuple(sources.values()), direction, retain_graph=True, allow_unused=True)
        for name, gradient in zip(sources, gradients, strict=True):
            if gradient is not None:
                found.setdefault(name, []).append(gradient)
    return {name: torch.stack(tensors) for name, tensors in found.items()}


@cache
def _unbiased_error(backend: str, causal: bool, length: int, dtype: torch.dtype) -> float:
    """The error without an encoding, which all of them are held to."""
    plain = Subject("none", {}, backend, causal, heads=2, head_dim=32, batch=1, length=length, train_length=length)
    return _half_precision_error(plain, dtype)


def _half_precision_error(subject: Subject, dtype: torch.dtype) -> float:
    """How far the last rows in half precision are from float64, relative to them; initial weights, unit q, k, v.

    The last rows have the longest distances of either form.
    """
    torch.manual_seed(3)
    encoding = subject.encoding()
    x = torch.randn(1, subject.length, subject.width).to(dtype).double()
    q, k, v = torch.randn(3, 1, subject.heads, subject.length, subject.head_dim).double()
    rows = 32
    layout = layout_of(rows, past=subject.length - rows, causal=subject.causal)

    def run(encoding: Encoding, backend: str, x: Tensor, *qkv: Tensor) -> Tensor:
        q, k, v = qkv
        state = encoding.state(x, **encoding.own_qk("state", q, k))
        own, q = x[:, -rows:] if state else x, q[:, :, -rows:]
        made: dict[str, Any] = {
            "bias": encoding.bias(own, layout, state, **encoding.own_qk("bias", q, k[:, :, -rows:])),
            "rescore": encoding.rescore(own, layout, state),
            "logit_scale": encoding.logit_scale(own, layout),
            "sink": encoding.sink(own),
        }
        q, k = encoding.rotate(q, k, layout, state)
        return attend(q, k, v, layout=layout, scale=subject.head_dim**-0.5, backend=backend, **made)

    with torch.no_grad():
        half = run(encoding, subject.backend, *(t.to(dtype) for t in (x, q, k, v)))
        exact = run(encoding.double(), "reference", x, q, k, v)
    return float((half - exact).norm() / exact.norm())
