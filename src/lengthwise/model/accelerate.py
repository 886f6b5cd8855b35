"""Described biases in the place of filled-in ones, in models that fill theirs in: the same numbers, faster and smaller.

    lw.accelerate(t5)           T5, mT5, UMT5, BLOOM, MPT, Falcon with ALiBi, MPNet, DeBERTa-v2 and -v3
    lw.unfit(t5)                as it was

The classes of attention modules are swapped, so weights, names and files stay what they are. MPT goes on beyond its
configured length. Falcon rounds slope times position to bfloat16: that is reproduced as it runs by default; its eager
attention, which adds the bias twice, is not.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lengthwise.errors import check_choice, describe
from lengthwise.model.families import family_of
from lengthwise.model.families.base import (
    ACCELERATED,
    Implementations,
    check_configs,
    restore_implementations,
    set_implementation,
)
from lengthwise.model.families.modules import restore_classes, swap_classes
from lengthwise.model.families.swap import swap_of
from lengthwise.model.fit import Dropout, fit_of


@dataclass(eq=False)
class Acceleration:
    """What was swapped in a model, and how to take it back."""

    model: PreTrainedModel
    modules: list[tuple[Any, type[nn.Module]]]
    """With the classes that they had."""
    implementations: Implementations

    def undo(self) -> None:
        """Leave the model as it was."""
        for module, _ in self.modules:
            for name in ("table", "leaves_out_dropout"):
                module.__dict__.pop(name, None)
        restore_classes(self.modules)
        restore_implementations(self.implementations)
        del self.model._lengthwise_fit


def accelerate(model: PreTrainedModel, *, attention_dropout: Dropout = "refuse") -> PreTrainedModel:
    """Swap the attention of a model that fills in its bias for one that describes it, in place; return the model.

    attention_dropout   a model that trains with it is refused; "leave out" trains without it
    """
    check_choice("attention_dropout", attention_dropout, ("refuse", "leave out"))
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a model of transformers, got {describe(model)}")
    if fit_of(model) is not None:
        raise ValueError(f"{name} is fitted or accelerated already; take that out first: lw.unfit(model)")
    if swap_of(model) is not None:
        raise ValueError(f"{name} is stretched; take that out first: lw.unstretch(model)")
    family = family_of(model)
    reason = family.undescribed
    if reason is not None or not any(type(module) in family.described for module in model.modules()):
        raise NotImplementedError(f"{name} has no bias that could be described: {reason or 'none is filled in'}")
    check_configs(model)
    swapped = swap_classes(model, family.described)
    model._lengthwise_fit = Acceleration(model, swapped, set_implementation(model, ACCELERATED))  # type: ignore[assignment]
    for module, _ in swapped:
        module.__dict__["leaves_out_dropout"] = attention_dropout == "leave out"
    family.prepare([module for module, _ in swapped])
    return model
