"""A description: tensors and plain values by name, and a class, which takes itself apart and is put together again.

Operators, files, the page and pictures all use that one form of a Bias or a Rescore. It is a pytree.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from torch.utils import _pytree

Static = str | int | float | bool
"""A plain value of a description; it can be written to JSON."""

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of biases and rescores by name, so that a graph or a file can name one; `registered` adds to it."""


def registered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function known by name, which `torch.compile`, `torch.export` and files need. A decorator."""
    FUNCTIONS[f"{function.__module__}.{function.__qualname__}"] = function
    return function


def registered_name(function: Callable[..., Any]) -> str:
    """The name under which a function is registered, or nothing; by identity, which Dynamo can follow."""
    for name, known in FUNCTIONS.items():
        if known is function:
            return name
    return ""


D = TypeVar("D", bound="Description")
"""Not Self, which beartype does not know in methods that are checked one by one."""


class Description:
    """Tensors and plain values by name, and the class: what a Bias and a Rescore are made of.

    A subclass is a frozen dataclass under `described`. Its fields are tensors, descriptions, tuples of either,
    functions or plain values; names of nested ones are joined by dots: a LineBias has "curve.table".
    """

    field_defaults: ClassVar[dict[str, Any]]
    """Its fields by name, in order, with their defaults, None where there is none; set by `described`."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything a gradient or a file needs, by name."""
        return {name: value for name, value in _parts(self) if isinstance(value, Tensor)}

    def static(self) -> dict[str, Static]:
        """The rest by name, functions by their registered names: JSON can hold it."""
        return {name: _named(value) if callable(value) else value for name, value in self.plain().items()}

    def plain(self) -> dict[str, Any]:
        """The same with functions as they are, which need no name."""
        return {name: value for name, value in _parts(self) if not isinstance(value, Tensor)}

    def rebuilt(self: D, tensors: Mapping[str, Tensor]) -> D:
        """The same description with other tensors under the same names."""
        parts = dict(_parts(self)) | dict(tensors)
        made: D = _build(type(self), parts, "", _unchecked)
        return made

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that a gradient may flow to."""
        return tuple(tensor for tensor in self.tensors().values() if tensor.is_floating_point())

    @property
    def needs_grad(self) -> bool:
        """Whether something in it is learned."""
        return any(source.requires_grad for source in self.sources)

    def detached(self: D) -> D:
        """The same without gradients."""
        return self.rebuilt({name: tensor.detach() for name, tensor in self.tensors().items()})


KINDS: dict[str, type[Description]] = {}
"""Kinds of bias and of rescore by the name of their class; `described` adds to it."""


def described(cls: type[Any]) -> type[Any]:
    """Register a dataclass as a Description: by name, and as a pytree. A decorator."""
    cls.field_defaults = {part.name: None if part.default is MISSING else part.default for part in fields(cls)}
    KINDS[cls.__name__] = cls

    def flatten(x: Any) -> tuple[list[Tensor], tuple[tuple[str, Any], ...]]:
        # Where a tensor stands is part of the structure: its name with nothing beside it.
        parts = list(_parts(x))
        return (
            [value for _, value in parts if isinstance(value, Tensor)],
            tuple((name, None if isinstance(value, Tensor) else value) for name, value in parts),
        )

    def unflatten(leaves: Any, context: tuple[tuple[str, Any], ...]) -> Any:
        remaining = iter(leaves)
        parts = {name: next(remaining) if value is None else value for name, value in context}
        return _build(cls, parts, "", _unchecked)

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__name__}")
    return cls


def rebuild(kind: str, tensors: Mapping[str, Tensor], static: Mapping[str, Static]) -> Any:
    """A description from what `tensors()` and `static()` gave, checked: it may come from a file."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    return _build(KINDS[kind], {**tensors, **static}, "", lambda cls, values: cls(**(cls.field_defaults | values)))


def _parts(x: Description, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values by name; a nested description's kind is a plain value of its own."""
    for field_name in x.field_defaults:
        value, name = getattr(x, field_name), prefix + field_name
        several = isinstance(value, tuple)
        for i, single in enumerate(value if several else (value,)):
            path = f"{name}.{i}" if several else name
            if isinstance(single, Description):
                yield f"{path}.kind", type(single).__name__
                yield from _parts(single, f"{path}.")
            elif single is not None:
                yield path, single


def _build(
    cls: type[Any], parts: Mapping[str, Any], prefix: str, make: Callable[[type[Any], dict[str, Any]], Any]
) -> Any:
    values: dict[str, Any] = {}
    for field_name in cls.field_defaults:
        name = prefix + field_name
        if (single := _built_part(name, parts, make)) is not None:
            values[field_name] = single
            continue
        several: list[Any] = []
        while (single := _built_part(f"{name}.{len(several)}", parts, make)) is not None:
            several.append(single)
        if several:
            values[field_name] = tuple(several)
    return make(cls, values)


def _built_part(name: str, parts: Mapping[str, Any], make: Callable[[type[Any], dict[str, Any]], Any]) -> Any:
    if f"{name}.kind" in parts:
        return _build(KINDS[parts[f"{name}.kind"]], parts, f"{name}.", make)
    value = parts.get(name)
    if name.rpartition(".")[2] == "function" and isinstance(value, str):
        if value not in FUNCTIONS:
            raise ValueError(f"unknown function {value!r}; import the module that registers it")
        return FUNCTIONS[value]
    return value


def _unchecked(cls: type[Any], values: dict[str, Any]) -> Any:
    """What comes out of a description that was checked needs no second check, and a pytree's leaves may be anything."""
    made = object.__new__(cls)
    for name, default in cls.field_defaults.items():
        object.__setattr__(made, name, values.get(name, default))
    return made


def _named(function: Callable[..., Any]) -> str:
    name = registered_name(function)
    if not name:
        raise ValueError(f"{function.__qualname__} has no registered name; decorate it with lw.registered")
    return name
