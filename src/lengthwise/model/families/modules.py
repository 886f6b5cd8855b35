"""Which modules of a model compute attention, which model is around them, and other classes for them."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

Classes = Mapping[type[nn.Module], type[nn.Module]]
"""Classes of modules, and those in their places."""


def attention_modules(model: nn.Module, described: Classes | None = None) -> dict[str, nn.Module]:
    """The modules of a model that call the attention interface, or take functions of ours, by name and in order."""
    others = described or {}
    return {
        name: module
        for name, module in model.named_modules()
        if _takes_runs(others.get(type(module), type(module))) or _calls_interface(type(module))
    }


def _takes_runs(kind: type) -> bool:
    return getattr(kind, "takes_runs", False)


def _calls_interface(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers.models."):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind.forward)


def is_causal(module: Any) -> bool:
    """Whether an attention module, under its config, sees no later tokens."""
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True)) and getattr(config, "is_causal", True) is not False


def owner_of(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> PreTrainedModel:
    """The innermost transformers model around all attention modules: it gets mask, positions and cache as given."""
    name = type(model).__name__
    if not modules:
        raise NotImplementedError(
            f"{name} has attention code of its own, which transformers' attention interface does not reach"
        )
    owners = {}
    for path in modules:
        parts = path.split(".")
        around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        owner = [module for module in around if isinstance(module, PreTrainedModel)][-1]
        owners[id(owner)] = owner
    config = model.config
    if len(owners) > 1 or config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise NotImplementedError(f"{name} has several kinds of attention (an encoder, a decoder, or both across)")
    return next(iter(owners.values()))


def swap_classes(model: nn.Module, others: Classes) -> list[tuple[Any, type[nn.Module]]]:
    """Give modules other classes; the modules, each with the class that it had."""
    before = [(module, type(module)) for module in model.modules() if type(module) in others]
    for module, own in before:
        module.__class__ = others[own]
    return before


def restore_classes(before: list[tuple[Any, type[nn.Module]]]) -> None:
    """Undo `swap_classes`."""
    for module, own in before:
        module.__class__ = own
