"""The configuration of a GPT-2 with any positional encoding, in GPT-2's field names.

LengthwiseConfig.preset("small", encoding="alibi", encoding_options={"slopes": "geometric"})
LengthwiseConfig.preset("small", layers="rope:512,rope:512,none", n_kv_head=4)

Every error is raised here, before a weight is allocated: encodings are built once without storage to see that they can.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import cycle, islice
from typing import Any, ClassVar, TypeVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from lengthwise.encodings import ENCODINGS, AttentionShape
from lengthwise.encodings.base import Hook
from lengthwise.encodings.registry import build, find
from lengthwise.errors import OptionError, check_choice, check_int, check_number
from lengthwise.model.schedule import LayerSpec, parse_layer, parse_layers, split_embedding

C = TypeVar("C", bound="LengthwiseConfig")

PRESETS = {
    "nano": {"n_layer": 4, "n_head": 12, "n_embd": 192},
    "tiny": {"n_layer": 6, "n_head": 8, "n_embd": 512},
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
}
"""Sizes by name; nano is for two cores, the others are GPT-2's and the CABLE paper's."""

ENCODER_PRESETS = {"nano": PRESETS["nano"], "tiny": PRESETS["tiny"], "base": PRESETS["small"]}
"""Sizes of encoders by name; base is BERT's, and the CABLE paper's."""

FORMAT = 2
"""The version of stored configs. Version 1, which has no such entry, had DAPE over another encoding as an option."""

SCORE_NETWORKS = ("dape", "dapev2")

DEFAULT_ENCODING = "cable"


QK_NORMS = ("rms", "layer", "l2")

POOLINGS = ("mean", "first")
"""How the vectors of a text's tokens become one: their mean, or that of the first."""


@strict
class LengthwiseConfig(PreTrainedConfig):
    """GPT-2's sizes, an encoding by name, and its options; `n_positions` is the training length.

    layers          a schedule in place of `encoding`: {encoding, encoding_options, window} by layer, repeated over the
                    depth, see schedule.py
    embed           an encoding that acts as tokens enter, by name or with its options; it may also be in every layer
    share_encoding  gives all layers one encoding instead of one each
    n_kv_head       heads of keys and values, each for as many of the queries; `n_head` if not given
    head_dim        n_embd / n_head if not given
    qkv_bias, out_bias    whether the projections into and out of attention have a bias
    scale           of the scores, 1 / sqrt(head_dim) if not given
    softcap         content becomes softcap tanh(content / softcap)
    qk_norm         of queries and keys, head by head: "rms" and "layer" with learned weights, "l2" RMS without
    qk_norm_place   "before" the rotation, or "after" it: then layers without a rotation have no norm, as in Llama 4

    There is no attention dropout.
    """

    model_type = "lengthwise"
    causal: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, int]]] = PRESETS
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_key_value_heads": "n_kv_head",
    }

    vocab_size: int = 50304
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True
    encoding: str | None = None
    encoding_options: dict[str, Any] | None = None
    share_encoding: bool = False
    layers: str | list[Any] | tuple[Any, ...] | None = None
    embed: str | dict[str, Any] | None = None
    n_kv_head: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = True
    out_bias: bool = True
    scale: float | int | None = None
    softcap: float | int | None = None
    qk_norm: str | None = None
    qk_norm_place: str = "before"
    format: int = FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_strangers(kwargs)
        if self.layers is None:
            self.encoding = self.encoding or DEFAULT_ENCODING
        elif self.encoding is not None or self.encoding_options:
            raise OptionError("`encoding` is short for layers that are all alike, got it beside `layers`; use one")
        else:
            self.layers = [spec.stored() for spec in parse_layers(self.layers)]
        self.encoding_options = dict(self.encoding_options or {})
        self._head_dim_given = self.head_dim is not None
        self._reaches: list[int | None] = []
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, from any version of a stored config."""
        return super().from_dict(current_format(config_dict), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers; a width of heads that follows from the others stays open."""
        stored: dict[str, Any] = super().to_dict()
        stored.pop("_reaches", None)
        if not stored.pop("_head_dim_given", True):
            stored["head_dim"] = None
        return stored

    @classmethod
    def preset(cls: type[C], name: str, **changes: Any) -> C:
        """A size by name, with any field changed.

        >>> LengthwiseConfig.preset("nano", encoding="kerple").head_dim
        16
        """
        if name not in cls.presets:
            known = ", ".join(map(repr, cls.presets))
            raise ValueError(f"unknown preset {name!r}; there are {known}. Take one of them.")
        return cls(**(cls.presets[name] | changes))

    @property
    def shape(self) -> AttentionShape:
        """The attention that the encodings serve."""
        return AttentionShape(self.n_head, self.n_embd, self.head_dim or 0, self.n_positions, self.causal)

    @property
    def embedding(self) -> LayerSpec | None:
        """What acts as tokens enter, GPT-2's wpe; None if nothing does."""
        return self._split()[0]

    @property
    def schedule(self) -> list[LayerSpec]:
        """What each layer has, without what acts as tokens enter."""
        return list(islice(cycle(self._split()[1]), self.n_layer))

    def _split(self) -> tuple[LayerSpec | None, list[LayerSpec]]:
        embed = None if self.embed is None else parse_layer(self.embed)
        return split_embedding(self._listed(), embed)

    def _listed(self) -> list[LayerSpec]:
        """The layers as they were given."""
        if self.layers is not None:
            return parse_layers(self.layers)
        return [LayerSpec(self.encoding or DEFAULT_ENCODING, self.encoding_options or {})]

    @property
    def label(self) -> str:
        """Its encodings in short: "cable", "rope:512,none", "learned; alibi:512,alibi"."""
        own = ",".join(spec.label for spec in self._listed())
        return own if self.embed is None else f"{parse_layer(self.embed).encoding}; {own}"

    def overrides(self, hook: Hook, *, everywhere: bool = False) -> bool:
        """Whether the encoding of some layer has that hook, or that of every layer."""
        has = [find(spec.encoding).overrides(hook) for spec in self.schedule]
        return all(has) if everywhere else any(has)

    @property
    def stock_attention(self) -> str | None:
        """What keeps the attention functions of transformers from computing this model; None if they can.

        They add to the scores, and can neither replace nor cap them.
        """
        if self.softcap is not None:
            return "a softcap"
        return "a rescore" if self.overrides("rescore") else None

    @property
    def layer_types(self) -> list[str] | None:
        """In transformers' words, for its caches; None where every layer sees everything."""
        if not any(self._reaches):
            return None
        return ["full_attention" if reach is None else "sliding_attention" for reach in self._reaches]

    @property
    def sliding_window(self) -> int | None:
        """The longest window, for transformers' caches; the model cuts those of other layers down to theirs."""
        return max((reach for reach in self._reaches if reach is not None), default=None)

    @sliding_window.setter
    def sliding_window(self, window: int | None) -> None:
        """Give every layer this window, as setting it does in transformers' own models."""
        specs = [replace(spec, window=window) for spec in self._listed()]
        self.layers, self.encoding, self.encoding_options = [spec.stored() for spec in specs], None, {}
        self.check()

    def with_options(self, part: str, **options: Any) -> None:
        """Change options of one encoding wherever it stands."""
        specs = [
            spec.with_parts([(name, {**own, **options} if name == part else own) for name, own in spec.parts()])
            for spec in self._listed()
        ]
        if self.layers is not None:
            self.layers = [spec.stored() for spec in specs]
        else:
            self.encoding_options = dict(specs[0].options)

    def check(self) -> None:
        """An error unless a model can be built."""
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            check_int(name, getattr(self, name))
        if not self._head_dim_given:
            if self.n_embd % self.n_head:
                raise ValueError(f"n_head must divide n_embd, got n_head={self.n_head} and n_embd={self.n_embd}")
            self.head_dim = self.n_embd // self.n_head
        check_int("head_dim", self.head_dim)
        check_int("n_kv_head", self.n_kv_head or self.n_head)
        if self.n_head % (self.n_kv_head or self.n_head):
            raise ValueError(f"n_kv_head must divide n_head, got n_kv_head={self.n_kv_head} and n_head={self.n_head}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale must be a finite number, got {self.scale}")
        if self.softcap is not None:
            check_number("softcap", self.softcap)
        if self.qk_norm is not None:
            check_choice("qk_norm", self.qk_norm, QK_NORMS)
        check_choice("qk_norm_place", self.qk_norm_place, ("before", "after"))
        self._check_schedule()

    def _check_schedule(self) -> None:
        listed = self._listed()
        if self.n_layer % len(listed):
            raise OptionError(
                f"layers must cover the depth: n_layer must be a multiple of the {len(listed)} that are listed, got "
                f"{self.n_layer}"
            )
        embedding, specs = self._split()
        # Stored for the caches of compiled graphs.
        self._reaches = [spec.reach for spec in self.schedule]
        if not self.causal:
            check_two_sided([*specs, *([embedding] if embedding else [])])
        for spec in specs:
            if spec.window is not None and not find(spec.encoding).takes_window(spec.window):
                raise OptionError(f"{spec.encoding!r} cannot have such a window, got the layer {spec.label!r}")
            if self.qk_norm and self.qk_norm_place == "after" and find(spec.encoding).turns_last:
                raise OptionError(f"qk_norm must be before {spec.encoding!r}, which turns keys last, got 'after'")
            if find(spec.encoding).replaces_content and (self.scale is not None or self.softcap is not None):
                raise OptionError(
                    f"{spec.encoding!r} scores queries and keys by itself and can have neither scale nor softcap, got "
                    f"scale={self.scale} and softcap={self.softcap}"
                )
        if self.share_encoding and any((s.encoding, s.options) != (specs[0].encoding, specs[0].options) for s in specs):
            raise OptionError(f"share_encoding needs layers with one encoding, got {self.label!r}")
        with torch.device("meta"):
            for spec in (*listed, *specs, *([embedding] if embedding else [])):
                try:
                    build(spec.encoding, self.shape, spec.options)
                except (TypeError, ValueError) as error:
                    raise OptionError(str(error)) from error

    @classmethod
    def _refuse_strangers(cls, kwargs: dict[str, Any]) -> None:
        """An error for a keyword that was meant for a field or an encoding: transformers would keep it unread."""
        known = [field.name for field in fields(cls)]
        owners = {option: name for name, encoding in ENCODINGS.items() for option in encoding.options()}
        for name in kwargs.keys() - cls.attribute_map.keys():
            if name in owners:
                raise TypeError(
                    f"{name!r} is not a field of the config; it is an option of the encoding {owners[name]!r}. "
                    f"Put it into encoding_options={{{name!r}: ...}}."
                )
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                raise TypeError(f"unknown field {name!r} of the config. Did you mean {near[0]!r}?")


@strict
class LengthwiseEncoderConfig(LengthwiseConfig):
    """The same for a two-sided model: every token sees those after it too. Of BERT's sizes if none are given.

    Encodings take their two-sided form; those without one are refused. A window reaches as far to either side.

    pooling   how the vectors of a text's tokens become one, "mean" or that of the "first": for retrieval and classes
    """

    model_type = "lengthwise_encoder"
    causal: ClassVar[bool] = False
    presets: ClassVar[dict[str, dict[str, int]]] = ENCODER_PRESETS

    vocab_size: int = 30528
    n_positions: int = 512
    use_cache: bool = False
    pooling: str = "mean"

    def check(self) -> None:
        """An error unless a model can be built."""
        super().check()
        check_choice("pooling", self.pooling, POOLINGS)


def check_two_sided(specs: Sequence[LayerSpec]) -> None:
    """An error for encodings that are defined under causality only, by their names."""
    names = dict.fromkeys(name for spec in specs for name, _ in spec.parts())
    causal_only = [name for name in names if not find(name).two_sided]
    if causal_only:
        known = ", ".join(repr(name) for name, encoding in ENCODINGS.items() if encoding.two_sided)
        raise OptionError(
            f"an encoder needs encodings with a two-sided form, got {', '.join(map(repr, causal_only))}, which is "
            f"causal only; known: {known}"
        )


def current_format(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored config in today's form.

    >>> current_format({"encoding": "dapev2", "encoding_options": {"over": "cable", "hidden": 8}})["encoding"]
    'cable+dapev2'
    """
    options = dict(stored.get("encoding_options") or {})
    if "format" in stored or stored.get("encoding") not in SCORE_NETWORKS:
        return stored
    over, of_over = options.pop("over", "kerple"), options.pop("over_options", None) or {}
    parts = {over: of_over, stored["encoding"]: options}
    return stored | {
        "format": FORMAT,
        "encoding": f"{over}+{stored['encoding']}",
        "encoding_options": {name: own for name, own in parts.items() if own},
    }


def renamed_weights(stored: dict[str, Any]) -> dict[str, str] | None:
    """Patterns of the weights that have another name since version 1, and their names; None if none has."""
    current = current_format(stored)
    if current is stored:
        return None
    over, own = current["encoding"].split("+")
    return {r"encoding\.over\.": f"encoding.parts.{over}.", r"encoding\.(into|out)\.": rf"encoding.parts.{own}.\1."}
