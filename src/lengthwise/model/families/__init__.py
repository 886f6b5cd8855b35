"""What is known of families of models, one file each: the encoding, the layers, the length, how attention is captured.

`lengthwise.inspect` captures through these files; `lw.fit` and `lw.accelerate` get into models by them. swap.py puts
functions of ours into all that follow transformers' attention interface (modules.py finds where, layer_call.py is what
such a function gets, layers.py what each layer did before), described.py into those that do not. A family with
attention code of its own needs a file of the kind that `bloom.py` is; most models need none.
"""

from collections.abc import Mapping
from importlib import import_module

from torch import nn
from transformers import PreTrainedModel

from lengthwise.model.families.accelerated import AcceleratedFamily
from lengthwise.model.families.base import AttentionRecord, Family, table_length
from lengthwise.model.families.swapped import SwappedFamily
from lengthwise.token_layout import PositionError

__all__ = [
    "AttentionRecord",
    "Family",
    "check_length",
    "classes_that_take_runs",
    "family_of",
    "find_family",
    "max_length",
]

FAMILIES = {
    "LengthwisePreTrainedModel": ("lengthwise", "LengthwiseFamily"),
    "BloomPreTrainedModel": ("bloom", "BloomFamily"),
    "DebertaV2PreTrainedModel": ("deberta_v2", "DebertaV2Family"),
    "FalconPreTrainedModel": ("falcon", "FalconFamily"),
    "GPTJPreTrainedModel": ("gptj", "GPTJFamily"),
    "GPTNeoPreTrainedModel": ("gpt_neo", "GPTNeoFamily"),
    "MPNetPreTrainedModel": ("mpnet", "MPNetFamily"),
    "MptPreTrainedModel": ("mpt", "MptFamily"),
    "MT5PreTrainedModel": ("t5", "T5Family"),
    "T5PreTrainedModel": ("t5", "T5Family"),
    "UMT5PreTrainedModel": ("t5", "T5Family"),
    "XLNetPreTrainedModel": ("xlnet", "XLNetFamily"),
    # Last, since every model of transformers is one.
    "PreTrainedModel": ("interface", "InterfaceFamily"),
}
"""Files and classes by the name of a model's base class: a family's modeling code is imported where it is needed."""


def find_family(model: nn.Module) -> Family | None:
    """What is known of a model's family; None if nothing is."""
    if SwappedFamily.accepts(model):
        return SwappedFamily(model)
    bases = {base.__name__ for base in type(model).__mro__}
    for base, (file, name) in FAMILIES.items():
        if base in bases:
            kind: type[Family] = getattr(import_module(f"{__name__}.{file}"), name)
            if kind.accepts(model):
                family = kind(model)
                return AcceleratedFamily(family) if AcceleratedFamily.accepts(model) else family
    return None


def classes_that_take_runs(model: nn.Module) -> Mapping[type[nn.Module], type[nn.Module]]:
    """The classes to swap before functions of ours can be in the place of a model's attention; none on the interface,
    and none where nobody has written them."""
    family = find_family(model)
    described = {} if family is None else family.described
    return described if any(getattr(kind, "takes_runs", False) for kind in described.values()) else {}


def family_of(model: nn.Module) -> Family:
    """What is known of a model's family, or an error that names what is in the way."""
    family = find_family(model)
    if family is not None:
        return family
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise NotImplementedError(f"expected a model of transformers, got {name}")
    raise NotImplementedError(
        f"{name} has attention code of its own, which transformers' attention interface does not reach; it needs a "
        "file in lengthwise/model/families, of the kind that bloom.py is"
    )


def max_length(model: nn.Module) -> int | None:
    """The longest sequence that a model has positions for, or None if there is no end."""
    family = find_family(model)
    return table_length(model) if family is None else family.max_length


def check_length(model: nn.Module, length: int) -> None:
    """An error if the model's positions end before `length`, which torch would tell by an IndexError."""
    longest = max_length(model)
    if longest is not None and length > longest:
        raise PositionError(f"this model's table of positions ends at {longest:,}, got length {length:,}")
