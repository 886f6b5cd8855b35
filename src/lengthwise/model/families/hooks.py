"""What families with attention code of their own share: hooks on an attention layer and on its last projection."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

from torch import Tensor, nn

from lengthwise.model.families.base import AttentionRecord, Family, OnRecord, Selected

Read = Callable[[Any, int, Mapping[str, Any], Tensor], AttentionRecord]
"""A record from an attention module, its layer, its arguments by name, and its output before the last projection."""


class HookedFamily(Family):
    """A family whose attention layers are modules of one class, which every layer of the model has once."""

    attention: type[nn.Module]
    projection: str | None = None
    """The name of the last projection; None where the layer's output is what goes into it."""

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether the model has such layers."""
        return any(isinstance(module, cls.attention) for module in model.modules())

    @property
    def layers(self) -> list[nn.Module]:
        """The attention layers in order."""
        return [module for module in self.model.modules() if isinstance(module, self.attention)]

    @property
    def depths(self) -> Mapping[str, int]:
        """One part."""
        return {"": len(self.layers)}

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """A record of one call: `arguments` of the layer by name, `merged` its output before the last projection."""
        raise NotImplementedError

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers."""
        with ExitStack() as stack:
            for layer, module in enumerate(self.layers):
                if selected(layer, ""):
                    stack.enter_context(captured_module(module, layer, self.projection, self.read, on_record))
            yield


@contextmanager
def captured_module(
    module: nn.Module, layer: int, projection: str | None, read: Read, on_record: OnRecord
) -> Iterator[None]:
    """Record every call of one attention module."""
    merged: list[Tensor] = []

    def before_projection(_: nn.Module, args: tuple[Any, ...]) -> None:
        merged[:] = args[:1]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        arguments = signature(module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        out = output[0] if projection is None else merged.pop()
        _refuse_cached_keys(module, arguments.arguments, queries=out.shape[1])
        on_record(read(module, layer, arguments.arguments, out))

    with ExitStack() as stack:
        if projection is not None:
            hook = getattr(module, projection).register_forward_pre_hook(before_projection)
            stack.callback(hook.remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _refuse_cached_keys(module: nn.Module, arguments: Mapping[str, Any], *, queries: int) -> None:
    """An error where keys come out of a cache: a record is made from the tokens of this call."""
    for name in ("past_key_values", "layer_past"):
        cache = arguments.get(name)
        if cache is not None and cache.get_seq_length() > queries:
            raise NotImplementedError(
                f"{type(module).__name__} can be captured without cached keys only, got {cache.get_seq_length()} keys "
                f"for {queries} queries; pass the whole text with use_cache=False"
            )
