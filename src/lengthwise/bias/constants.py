"""Fixed numbers as tensors, on a device made once: copying them there waits for it, and a CUDA graph cannot."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

Numbers = tuple[int | float, ...] | tuple[tuple[int | float, ...], ...]


class Constants:
    """Tensors by device and whatever else tells them apart; nobody may write to them."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "Constants":
        """Empty: they are made again."""
        return Constants()

    def __reduce__(self) -> tuple[type["Constants"], tuple[()]]:
        """Empty in files too."""
        return Constants, ()

    def get(self, device: torch.device, make: Callable[[], Tensor], *names: Hashable) -> Tensor:
        """make(), or what it gave for this device and these names before."""
        if device.type == "cpu" or torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None:
            return make()
        if (key := (device, *names)) not in self._made:
            with torch.inference_mode(False):  # else no later backward pass could keep it
                self._made[key] = make()
        return self._made[key]


_constants = Constants()


def constant(values: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers; on a device all callers have the same."""
    return _constants.get(device, lambda: torch.tensor(values, dtype=dtype, device=device), values, dtype)
