"""The configuration of a GPT-2 with any positional encoding, in GPT-2's field names.

LengthwiseConfig.preset("small", encoding="alibi", encoding_options={"slopes": "geometric"})

Every error is raised here, before a weight is allocated: the encoding is built once without storage to see that it can.
"""

import difflib
from dataclasses import fields
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from lengthwise.encodings import ENCODINGS, AttentionShape
from lengthwise.encodings.registry import build, find
from lengthwise.errors import OptionError

PRESETS = {
    "nano": {"n_layer": 4, "n_head": 12, "n_embd": 192},
    "tiny": {"n_layer": 6, "n_head": 8, "n_embd": 512},
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
}
"""Sizes by name; nano is for two cores, the others are GPT-2's and the CABLE paper's."""


@strict
class LengthwiseConfig(PreTrainedConfig):
    """GPT-2's sizes, an encoding by name, and its options; `n_positions` is the training length.

    `share_encoding` gives all layers one encoding instead of one each. Encodings that act as tokens enter are always
    one. There is no attention dropout.
    """

    model_type = "lengthwise"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
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
    encoding: str = "cable"
    encoding_options: dict[str, Any] | None = None
    share_encoding: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_strangers(kwargs)
        self.encoding_options = dict(self.encoding_options or {})
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "LengthwiseConfig":
        """A size by name, with any field changed.

        >>> LengthwiseConfig.preset("nano", encoding="kerple").head_dim
        16
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; there are {', '.join(map(repr, PRESETS))}. Take one of them.")
        return cls(**(PRESETS[name] | changes))

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.n_embd // self.n_head

    @property
    def geometry(self) -> AttentionShape:
        """The attention that the encoding serves."""
        return AttentionShape(self.n_head, self.n_embd, self.head_dim, self.n_positions)

    @property
    def embeds(self) -> bool:
        """Whether the encoding acts as tokens enter: then it is one for the model, GPT-2's wpe."""
        return find(self.encoding).overrides("embed")

    @property
    def rescores(self) -> bool:
        """Whether the encoding replaces the scores."""
        return find(self.encoding).overrides("rescore")

    @property
    def is_shared(self) -> bool:
        """Whether all layers have one encoding."""
        return self.share_encoding or self.embeds

    def check(self) -> None:
        """An error unless a model can be built."""
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive int, got {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head must divide n_embd, got n_head={self.n_head} and n_embd={self.n_embd}")
        find(self.encoding)
        with torch.device("meta"):
            try:
                build(self.encoding, self.geometry, self.encoding_options or {})
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
