"""Make Triton's interpreter strict: poison around every tensor, and programs in another order.

    TRITON_INTERPRET=1; with poisoned(): ... ; with shuffled(seed): ...

The interpreter reads and writes raw memory and runs programs one after the other, so it hides what a GPU would not
forgive. Under `poisoned` every tensor of a launch lies amid NaN (or a strange number): a read outside spoils the
result, a write outside raises. Under `shuffled` a result that depends on the order of programs changes.
"""

import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

RIM = 4096
STRANGE = {torch.int8: 77, torch.int32: -7777777, torch.int64: -7777777}


@contextmanager
def _called(function: Callable[..., Any]) -> Iterator[None]:
    plain = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = function
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = plain


@contextmanager
def poisoned() -> Iterator[None]:
    """Every launch with its tensors amid poison; an error if a kernel wrote there."""
    plain = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        held: list[tuple[Tensor, Tensor, Tensor]] = []

        def amid(x: Any) -> Any:
            if isinstance(x, tuple):
                return type(x)(*map(amid, x)) if hasattr(x, "_fields") else tuple(map(amid, x))
            if not isinstance(x, Tensor):
                return x
            # Everything that its strides reach, and nothing else.
            reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            reach = reach if x.numel() else 0
            poison = torch.nan if x.is_floating_point() else STRANGE[x.dtype]
            whole = torch.full((reach + 2 * RIM,), poison, dtype=x.dtype)
            inner = whole.as_strided(x.shape, x.stride(), RIM)
            inner.copy_(x)
            held.append((x, whole, inner))
            return inner

        # Flags are plain numbers; copying them would do no harm.
        plain(self, *map(amid, args), **{name: amid(x) for name, x in kwargs.items()})
        for x, whole, inner in held:
            rim = torch.cat([whole[:RIM], whole[-RIM:]])
            if not (rim.isnan() if x.is_floating_point() else rim == STRANGE[x.dtype]).all():
                raise AssertionError(f"{self.fn.__name__} wrote outside a tensor of shape {tuple(x.shape)}")
            x.copy_(inner)

    with _called(call):
        yield


@contextmanager
def shuffled(seed: int = 0) -> Iterator[None]:
    """Every launch with its programs in another order."""
    source = textwrap.dedent(inspect.getsource(interpreter.GridExecutor.__call__))
    for axis in range(3):
        source = source.replace(f"in range(grid[{axis}])", f"in _in_disorder(grid[{axis}])")
    if source.count("_in_disorder") != 3:
        raise NotImplementedError("this Triton's interpreter loops over programs in another way; look at GridExecutor")
    chance = random.Random(seed)
    interpreter._in_disorder = lambda count: chance.sample(range(count), count)
    space: dict[str, Any] = {}
    exec(compile(source.replace("def __call__", "def call"), "shuffled", "exec"), vars(interpreter), space)
    with _called(space["call"]):
        yield
