"""One process or many: who does what part of a batch, and how gradients and numbers are brought together.

Under torchrun the model is wrapped in DDP, or in FSDP2 if it is sharded. The loss of a batch is the sum over its tokens
by their number, whatever the shares of the processes: so their number changes nothing but the order of additions.
"""

import gc
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lengthwise.encodings import Encoding
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.train.config import Settings

T = TypeVar("T")
LOST = re.compile("connection|closed by peer|broken pipe|timed out|NCCL|gloo", re.IGNORECASE)
"""How torch's errors sound when another process is gone."""


class Objective(nn.Module):
    """The sum of the losses of some sequences, as a forward pass: DDP and FSDP2 watch no other method."""

    def __init__(self, model: LengthwiseForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Int[Tensor, "batch position"], positions: Int[Tensor, "batch position"] | None = None
    ) -> Float[Tensor, ""]:
        """Not the mean: the shares of a batch may differ in size."""
        return self.model.loss(tokens, tokens, position_ids=positions, reduction="sum")


@dataclass(frozen=True)
class World:
    """The processes of a run, as one of them sees them."""

    rank: int
    size: int
    device: torch.device
    sharded: bool

    @property
    def is_many(self) -> bool:
        """Whether torchrun started it, be it alone."""
        return dist.is_initialized()

    @property
    def is_first(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of so many things are this process's."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def alone(self, do: Callable[[], T]) -> T | None:
        """Do something in the first process only: its result there, None in the others, its error in all."""
        result: T | None = None
        fault: list[Exception | None] = [None]
        if self.is_first:
            try:
                result = do()
            except Exception as error:
                fault = [error]
        (told,) = self._told(fault)
        if told is not None:
            raise told
        return result

    def first(self, do: Callable[[], T]) -> T:
        """Do something in the first process only: its result, or its error, in all of them."""
        return cast(T, self._told([self.alone(do)])[0])

    def _told(self, message: list[Any]) -> list[Any]:
        if self.size > 1:
            dist.broadcast_object_list(message)
        return message

    def wrap(self, objective: Objective, precision: torch.dtype) -> nn.Module:
        """The objective, with gradients averaged over the processes."""
        if self.sharded:
            return self._sharded(objective, precision)
        objective.to(self.device)
        if self.size == 1:
            return objective
        return DistributedDataParallel(objective)

    def _sharded(self, objective: Objective, precision: torch.dtype) -> nn.Module:
        """Layers and the rest in shards. Encodings are small, called by their hooks and must stay float32: whole."""
        policy = MixedPrecisionPolicy(
            param_dtype=None if precision == torch.float32 else precision, reduce_dtype=torch.float32
        )
        whole = set(encoding_parameters(objective))
        for parameter in whole:
            parameter.data = parameter.data.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.size,))
        # The root too goes back into shards after a forward pass: a measurement has no backward pass that would do it,
        # and a checkpoint after one would hold the rounded weights of the forward pass.
        for part in [*objective.model.transformer.h, objective]:
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=True)
        return objective

    def gathering(self, module: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one part of a batch: gradients meet only with the last."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        return nullcontext()

    def gather_whole(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of what is not sharded where the rest is."""
        gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
        if self.sharded and gradients:
            flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.size
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def encoding_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Everything that encodings learn."""
    return [p for part in module.modules() if isinstance(part, Encoding) for p in part.parameters()]


def families(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that may be worked on together: sharded ones and whole ones do not mix."""
    both = [[p for p in parameters if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
    return [family for family in both if family]


def clip(parameters: list[nn.Parameter], most: float) -> Tensor:
    """Scale all gradients so that their norm together is at most `most`; the norm before."""
    parts = [
        torch.nn.utils.get_total_norm([p.grad for p in family if p.grad is not None]) for family in families(parameters)
    ]
    parts = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    norm = parts[0] if len(parts) == 1 else torch.stack(parts).norm()
    for family in families(parameters):
        torch.nn.utils.clip_grads_with_norm_(family, most, norm)
    return norm


@contextmanager
def processes(config: Settings) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = _device(config.device)
    if config.sharded and "RANK" not in os.environ:
        raise ValueError("--sharded spreads a model over processes; there is one. Start several with torchrun.")
    if "RANK" not in os.environ:
        yield World(rank, size, device, sharded=False)
        return
    if config.sequences < size:
        raise ValueError(
            f"every process must have a sequence of each batch; there are {config.sequences} sequences and {size} "
            "processes. Raise --batch_tokens, or start fewer."
        )
    if config.sharded and config.sequences % size:
        raise ValueError(
            "with --sharded every process must have as many sequences as every other; there are "
            f"{config.sequences} and {size} processes. Change --batch_tokens, or start another number."
        )
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(rank, size, device, sharded=config.sharded)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, RuntimeError) and size > 1 and LOST.search(str(error)):
            raise ConnectionError(
                f"all processes of a run must go on together; process {rank} cannot reach another any more. See what "
                "that one said, then start all of them again with --resume."
            ) from error
        raise
    finally:
        # The wrapped model must go before the group: else the group's last reference is dropped inside DDP, which then
        # waits, with Python's lock in hand, for a thread that waits for that lock.
        gc.collect()
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    return device
