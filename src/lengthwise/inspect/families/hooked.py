"""What families outside transformers' attention interface share: hooks on a layer and on its last projection."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn

from lengthwise.inspect.families.route import See
from lengthwise.inspect.record import Record

Read = Callable[[nn.Module, int, Mapping[str, Any], Tensor], Record]
"""A record from an attention module, its layer, its arguments by name, and its output before the last projection."""


@contextmanager
def watch_modules(modules: Mapping[int, nn.Module], projection: str, read: Read, see: See) -> Iterator[None]:
    """Record every call of some attention modules."""
    merged: dict[int, Tensor] = {}
    hooks = []
    for layer, module in modules.items():

        def keep(_: nn.Module, args: tuple[Any, ...], layer: int = layer) -> None:
            merged[layer] = args[0]

        def after(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object, layer: int = layer
        ) -> None:
            given = signature(module.forward).bind(*args, **kwargs).arguments
            see(read(module, layer, given, merged.pop(layer)), "")

        hooks.append(getattr(module, projection).register_forward_pre_hook(keep))
        hooks.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
