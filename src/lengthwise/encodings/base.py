"""What an encoding is: a module with seven hooks, of which it overrides the ones it needs, nearly always one.

embed(x, layout)               as tokens enter, once per model
state(x, key_mask)             numbers per token that later tokens need; cached beside the keys
rotate(q, k, layout, state)    before queries meet keys
bias(x, layout, state)         described, added to the scores
rescore(x, layout, state)      described, instead of the scores
logit_scale(x, layout)         a factor on the scores of each row
sink(x)                        a logit that takes weight and gives no value

Those that `uses_qk` names, `state` or `bias`, also get the queries and keys of the new tokens, before they are rotated.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lengthwise.bias import Bias, at_least_float32, without_autocast
from lengthwise.errors import OptionError, check_choice, check_flag, check_int, check_tensor, describe
from lengthwise.rescore import Rescore
from lengthwise.token_layout import TokenLayout, Window

Tokens = Float[Tensor, "batch position width"]
"""The input of the model for `embed`, of the attention block for the other hooks."""

Queries = Float[Tensor, "batch head query dim"]
Keys = Float[Tensor, "batch kv_head key dim"]
"""A layer's own; with fewer heads of keys each of them serves several of the queries."""

State = dict[str, Float[Tensor, "batch head key ..."]]
"""Per-token numbers by name, float32 or better: whoever runs the model keeps them beside the keys."""


class Zone(NamedTuple):
    """Queries and keys as they meet within a window; what lies outside of it is that of other zones."""

    q: Queries
    k: Keys
    window: Window | None = None
    """None for that of the layer."""


Sides = Literal["alike", "apart"]
"""Two-sided: whether keys before a query and after it are treated alike, or told apart."""

Hook = Literal["embed", "state", "rotate", "bias", "rescore", "logit_scale", "sink"]

E = TypeVar("E", bound="Encoding")

HOOKS: tuple[Hook, ...] = ("embed", "rotate", "rescore", "bias", "logit_scale", "sink")
"""The hooks that change attention, the most telling first: DAPE has a bias too, but its point is to rescore."""


@dataclass(frozen=True)
class AttentionShape:
    """The shape of the attention that an encoding serves; `causal` picks its one-sided or its two-sided form."""

    heads: int
    width: int
    head_dim: int
    train_length: int
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("heads", "width", "head_dim", "train_length"):
            check_int(name, getattr(self, name), "Check the model's sizes.")
        check_flag("causal", self.causal, "False is for two-sided attention.")


class Encoding(nn.Module):
    """A positional encoding that does nothing: the base of all others, and `none` itself but for the name."""

    paper: ClassVar[str]
    """Where it comes from, as "Authors year, arXiv number"."""
    kind: type[Bias] | None = None
    """The kind of bias it describes at its training length, if any."""
    two_sided: ClassVar[bool] = True
    """Whether it is defined without causality."""
    symmetric: bool = False
    """Whether its two-sided form treats left and right alike: a mirrored text gives mirrored outputs."""
    context_free: bool = False
    """Whether its bias comes from positions alone: then layers that share it need to build it only once."""
    length_dependent: bool = False
    """Whether `rotate` changes as a sequence grows: then a cache must hold keys that are not yet turned."""
    windowed: ClassVar[bool] = True
    """Whether it is defined where a query sees the nearest keys only."""
    turns_last: ClassVar[bool] = False
    """Whether nothing may turn or norm queries and keys after it: only their products have a meaning, or it widens
    them."""
    rescores_qk: ClassVar[bool] = False
    """Whether its rescore reads queries and keys themselves, not only the products of both."""
    replaces_content: ClassVar[bool] = False
    """Whether its rescore does without the products of queries and keys, and so without a model's scale and softcap."""
    uses_qk: ClassVar[tuple[Hook, ...]] = ()
    """Which of `state` and `bias` take the layer's own queries and keys, `q=` and `k=`, of the new tokens."""
    tables: tuple[str, ...] = ()
    """Its learned tables by name: each entry is a number of its own, which weight decay would only pull to 0."""
    by_head: tuple[str | tuple[str, int], ...] | None = None
    """What of it belongs to single heads, by name: parameters, tensors and lists whose first axis runs over the heads,
    or (name, axis). A head may have several numbers, which stand together. None if heads cannot be had apart."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        if not shape.causal and not self.two_sided:
            raise ValueError(
                f"{type(self).__name__} is defined for causal attention only, got causal=False; encodings with a "
                "two-sided form are e.g. 'alibi', 'fire' and 't5'"
            )
        self.shape = shape

    @classmethod
    def from_options(cls, name: str, shape: AttentionShape, options: Mapping[str, object]) -> "Encoding":
        """One with options of its own; `name` is for the error if there is no such option."""
        unknown = [option for option in options if option not in cls.options()]
        if unknown:
            known = ", ".join(map(repr, cls.options())) or "none"
            raise OptionError(f"unknown option {unknown[0]!r} for {name!r}; its options are: {known}")
        return cls(shape, **options)

    def reset_parameters(self) -> None:
        """Draw the learned parameters anew, as the paper does."""

    def embed(self, x: Tokens, layout: TokenLayout) -> Tokens:
        """Tokens as they enter the model; they are the layout's queries."""
        return x

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State | None:
        """What later tokens will need to know of these, or None; padding, False in the mask, counts for nothing."""
        return None

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys as they meet; the layout has one position for each of both."""
        return q, k

    def zones(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> list[Zone]:
        """What `rotate` gives, or several of the kind where queries and keys turn differently by how far they are.

        Zones share no pair of a query and a key; whoever runs the model merges what attention gives for each.
        """
        return [Zone(*self.rotate(q, k, layout, state))]

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias | None:
        """What is added to the scores.

        x holds the new tokens, one per query; the state covers all keys, old and new. Without a state x must cover all
        keys and the state is computed.
        """
        return None

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Rescore | None:
        """What makes the scores of content and bias, if it is not their sum; x and state as for `bias`."""
        return None

    def logit_scale(
        self, x: Tokens, layout: TokenLayout, *, window: Window | None = None
    ) -> Float[Tensor, "#batch #head #query"] | None:
        """A factor on the scores of each row, bias included; x holds the new tokens, one per query."""
        return None

    def sink(self, x: Tokens) -> Float[Tensor, " head"] | Float[Tensor, "#batch head query"] | None:
        """A logit per head, or per row, that takes weight and gives no value."""
        return None

    def select_heads(self: E, heads: Sequence[int]) -> E:
        """The same for some of its heads, as a process of a tensor-parallel model has them.

        Its hooks take the queries and keys of these heads, and the tokens in full width, and give of these heads what
        those of the whole give. Parameters are its own.
        """
        chosen, total = list(heads), self.shape.heads
        if not chosen or len(set(chosen)) != len(chosen) or not all(h in range(total) for h in chosen):
            raise ValueError(f"heads must be some of 0 to {total - 1}, each once, got {chosen}")
        part = copy.deepcopy(self)
        part.shape = replace(self.shape, heads=len(chosen))
        part._pick_heads(chosen, total)
        return part

    def _pick_heads(self, chosen: list[int], total: int) -> None:
        if self.by_head is None:
            raise NotImplementedError(
                f"{type(self).__name__} mixes its heads, or does not say what belongs to them in `by_head`: it cannot "
                "be had for some of them"
            )
        for entry in self.by_head:
            name, axis = entry if isinstance(entry, tuple) else (entry, 0)
            owner, _, own = name.rpartition(".")
            module = self.get_submodule(owner)
            value = getattr(module, own)
            if value is None:
                continue
            if isinstance(value, Tensor):
                blocks = value.detach().unflatten(axis, (total, -1))
                picked = blocks.index_select(axis, torch.tensor(chosen, device=value.device)).flatten(axis, axis + 1)
                learned = isinstance(value, nn.Parameter)
                setattr(module, own, nn.Parameter(picked, value.requires_grad) if learned else picked)
            else:
                setattr(module, own, [value[head] for head in chosen])

    def own_qk(self, hook: Hook, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """The keywords by which a hook gets the layer's queries and keys, if it uses them."""
        return {"q": q, "k": k} if hook in self.uses_qk else {}

    @property
    def limit(self) -> int | None:
        """How many positions it has an answer for; None if it has no end."""
        return None

    @property
    def turns_by_state(self) -> bool:
        """Whether `rotate` needs the state of all keys."""
        return self.overrides("rotate") and self.overrides("state")

    @property
    def rotates_late(self) -> bool:
        """Whether a cache must hold keys that are not yet turned."""
        return self.overrides("rotate") and (self.length_dependent or self.turns_by_state)

    @property
    def learned_parameters(self) -> int:
        """How many numbers it learns, per layer that has one."""
        return sum(parameter.numel() for parameter in self.parameters())

    def no_weight_decay(self) -> list[nn.Parameter]:
        """What weight decay must leave alone: parameters with fewer than two axes, and tables."""
        nested = [part for part in self.modules() if isinstance(part, Encoding)]
        tables = {id(getattr(part, name)) for part in nested for name in part.tables}
        return [parameter for parameter in self.parameters() if parameter.ndim < 2 or id(parameter) in tables]

    @classmethod
    def takes_window(cls, window: Window) -> bool:
        """Whether it is defined where a query sees the keys of this window alone."""
        return cls.windowed

    @classmethod
    def overrides(cls, hook: Hook) -> bool:
        """Whether it has a hook of its own."""
        return getattr(cls, hook) is not getattr(Encoding, hook)

    @classmethod
    def hook(cls) -> Hook | None:
        """The hook by which it acts, or None."""
        return next((hook for hook in HOOKS if cls.overrides(hook)), None)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The keywords of its own that `make` takes."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)

    def extra_repr(self) -> str:
        """The shape it serves."""
        shape = self.shape
        return f"heads={shape.heads}, width={shape.width}, head_dim={shape.head_dim}, causal={shape.causal}"


class QueryEncoding(Encoding):
    """Shaw's encoding and its heirs: their bias is a product of the layer's own queries and something else."""

    uses_qk: ClassVar[tuple[Hook, ...]] = ("bias",)

    def queries(self, q: Tensor | None, layout: TokenLayout) -> Queries:
        """The layer's queries in float32 or better."""
        return every_head("q", q, self.shape, layout.query_count)


def check_sides(layout: TokenLayout, *, causal: bool) -> None:
    """An error for an encoding of causal attention where queries see later keys, for which it has no numbers."""
    if causal and not layout.causal and layout.mask is None:
        raise ValueError("an encoding made for causal attention got a two-sided layout; make it with causal=False")


def are_apart(shape: AttentionShape, sides: Sides) -> bool:
    """Whether the option `sides` tells left from right; under causality there is one side, and it changes nothing."""
    check_choice("sides", sides, ("alike", "apart"), "Under causality there is one side, and it changes nothing.")
    return sides == "apart" and not shape.causal


def checked_tokens(x: Tokens, width: int) -> None:
    """An error unless x is (batch, position, width)."""
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != width or not x.is_floating_point():
        raise ValueError(
            f"x must be a floating-point tensor (batch, position, {width}), got {describe(x)}: the vectors that enter "
            "the model for `embed`, else those that enter attention"
        )


def checked_count(x: Tokens, positions: Int[Tensor, "#batch position"], of: str) -> None:
    """An error unless x has one token per position, in as many sequences."""
    if x.shape[1] != positions.shape[1]:
        raise ValueError(
            f"x must hold one token per {of}, {positions.shape[1]}, got {x.shape[1]}; with cached keys x has the new "
            "tokens, and state that of all keys"
        )
    if positions.shape[0] not in (1, x.shape[0]):
        raise ValueError(f"the layout must be of x's {x.shape[0]} sequences, or of 1 for all, got {positions.shape[0]}")


def every_head(name: str, x: Tensor | None, shape: AttentionShape, count: int) -> Float[Tensor, "batch head token dim"]:
    """The layer's queries or keys, one for every head of the queries, in float32 or better; an error unless there are
    `count` of them."""
    axes = ("batch", "head", count, shape.head_dim)
    check_tensor(name, x, axes, "floating-point", "Give the layer's own: q=q, k=k.")
    assert x is not None
    if x.shape[1] == 0 or shape.heads % x.shape[1]:
        raise ValueError(f"{name} must have {shape.heads} heads, or as many as divide that, got {x.shape[1]}")
    own = at_least_float32(x)
    return own if own.shape[1] == shape.heads else own.repeat_interleave(shape.heads // own.shape[1], 1)


def query_tokens(x: Tokens, layout: TokenLayout) -> Float[Tensor, "batch query width"]:
    """The tokens of the queries: x, or a part of it where it has those of all keys."""
    start, count = layout.start, layout.query_count
    if x.shape[1] == count:
        return x
    checked_count(x, layout.key, "key")
    if isinstance(start, Tensor):
        return x.index_select(1, start + torch.arange(count, device=x.device))
    return x[:, start : start + count]


def checked_state(
    state: State | None, name: str, batch: int, heads: int, keys: int, *axes: int
) -> Float[Tensor, "batch head key *axis"]:
    """A part of the state by name, or an error unless it covers all keys and every head."""
    if not isinstance(state, dict) or name not in state:
        has = f"a dictionary of {sorted(state)}" if isinstance(state, dict) else describe(state)
        raise ValueError(f"the state must be a dictionary with {name!r}, got {has}; pass encoding.state(x)")
    numbers = state[name]
    if numbers.ndim == 3 + len(axes) and numbers.shape[2] != keys:
        raise ValueError(
            f"the state must cover all {keys} keys, old and new, got {numbers.shape[2]}; append encoding.state(x) of "
            "the new tokens to the cached state before asking for more"
        )
    check_tensor(f"the state's {name}", numbers, (batch, heads, keys, *axes), "floating-point")
    return numbers


def masked_tokens(
    numbers: Float[Tensor, "batch head position *axis"], key_mask: Bool[Tensor, "#batch position"] | None
) -> Float[Tensor, "batch head position *axis"]:
    """A state's numbers with 0 for masked tokens, or an error unless the mask has an entry for each."""
    if key_mask is None:
        return numbers
    batch, _, count = numbers.shape[:3]
    check_tensor("key_mask", key_mask, ("batch", count), "bool", "True for tokens, False for padding.")
    if key_mask.shape[0] not in (1, batch):
        raise ValueError(f"key_mask must have a row for each of {batch} sequences, or one; got {tuple(key_mask.shape)}")
    real = key_mask[:, None].reshape(key_mask.shape[0], 1, count, *(1 for _ in numbers.shape[3:]))
    return numbers.where(real, 0)


def project(layer: nn.Linear, x: Tokens) -> Float[Tensor, "batch head position"]:
    """layer(x) with heads first, in float32 or better whatever the autocast: positions are made of it."""
    x, weight, bias = at_least_float32(x), layer.weight, cast(Tensor | None, layer.bias)
    if weight.dtype != x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    with without_autocast(x):
        return F.linear(x, weight, bias).transpose(1, 2).contiguous()


def reset_linear(layer: nn.Linear | nn.Conv2d) -> None:
    """GPT-2's initialisation: N(0, 0.02), bias 0."""
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
