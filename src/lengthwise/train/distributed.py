"""One process or many: which part of a batch each has, and how gradients and values are brought together.

Under torchrun the loss is wrapped in DDP, or in FSDP2 if it is sharded. The loss of a batch is the sum over its tokens
divided by their number, whatever the parts of the processes: the number of processes changes only the order of
additions. Where processes share sequences (`--context-parallel`), those with consecutive numbers share the same ones;
gradients are averaged, or shards made, over all processes alike.
"""

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lengthwise.distributed import joined
from lengthwise.encodings import Encoding
from lengthwise.files import appears
from lengthwise.loading import local_device
from lengthwise.train.config import ResolvedTrainConfig

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    sharded: bool
    ring: ProcessGroup | None = None
    """The processes that share each sequence with this one; None where each has its own."""

    @property
    def is_distributed(self) -> bool:
        """Whether torchrun started it, even if as the only process."""
        return dist.is_initialized()

    @property
    def is_first(self) -> bool:
        """Whether this process writes and logs."""
        return self.rank == 0

    @property
    def context(self) -> int:
        """How many processes share each sequence."""
        return 1 if self.ring is None else dist.get_world_size(self.ring)

    @property
    def readers(self) -> int:
        """How many processes, or rings of them, have sequences of their own."""
        return self.size // self.context

    @property
    def reader(self) -> int:
        """Which of them this process is, or belongs to."""
        return self.rank // self.context

    @property
    def reads_for_free(self) -> bool:
        """Whether numbers can be read at any time; a device is waited for, and has nothing to do after."""
        return self.device.type == "cpu"

    @property
    def is_first_of_ring(self) -> bool:
        """Whether it is the first of those that share its sequences."""
        return self.rank % self.context == 0

    def own_part(self, count: int) -> range:
        """Which of `count` sequences belong to this process, or to those that share them with it."""
        return range(self.reader * count // self.readers, (self.reader + 1) * count // self.readers)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process; by way of the hosts, so that no device is waited for."""
        return bool(self.sum(torch.tensor(int(flag)))) if self.size > 1 else flag

    def put(self, x: Tensor | None) -> Tensor | None:
        """A tensor of the host on the device; to CUDA from pinned memory, which is copied while the device computes."""
        if x is None or self.device.type != "cuda":
            return None if x is None else x.to(self.device)
        return x.pin_memory().to(self.device, non_blocking=True)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Around what multiplies matrices in a dtype."""
        return torch.autocast(self.device.type, dtype) if dtype == torch.bfloat16 else nullcontext()

    def gather_rows(self, rows: Float[Tensor, "row width"]) -> tuple[Float[Tensor, "every width"], int]:
        """The rows of all processes, which may have different numbers of them, and where this one's begin.

        Gradients flow back to the process whose row it is, from all processes.
        """
        return (rows, 0) if self.size == 1 else _gather_rows(rows, self.rank, self.size)

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Call a function in the first process only: its result there, None in the others, its error in all."""
        result: T | None = None
        fault: list[Exception | None] = [None]
        if self.is_first:
            try:
                result = function()
            except Exception as error:
                fault = [error]
        (error_of_first,) = self._broadcast(fault)
        if error_of_first is not None:
            raise error_of_first
        return result

    def from_first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process only: its result, or its error, in all of them."""
        return cast(T, self._broadcast([self.on_first(function)])[0])

    def check_shared(self, folder: Path) -> None:
        """An error in all processes unless all of them read what the first one writes into a folder."""
        if self.size == 1:
            return
        question = folder / self.from_first(lambda: f".shared-{secrets.token_hex(8)}")
        self.on_first(lambda: question.write_text(question.name))
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, "" if appears(question) else f"{self.rank} on {socket.gethostname()}")
        self.on_first(lambda: question.unlink())
        if others := [name for name in every if name]:
            raise OSError(
                f"--out must be on a disk that all machines share, got {folder}, where processes {', '.join(others)} "
                "do not read what process 0 writes; give another --out"
            )

    def _broadcast(self, message: list[Any]) -> list[Any]:
        if self.size > 1:
            dist.broadcast_object_list(message)
        return message

    def wrap(self, loss: nn.Module, layers: nn.ModuleList, dtype: torch.dtype) -> nn.Module:
        """The loss as a module whose gradients are averaged over the processes; `layers` are sharded one by one."""
        if self.sharded:
            return self._shard(loss, layers, dtype)
        loss.to(self.device)
        return loss if self.size == 1 else DistributedDataParallel(loss)

    def _shard(self, loss: nn.Module, layers: nn.ModuleList, dtype: torch.dtype) -> nn.Module:
        """Layers and the rest in shards. Encodings are small, called by their hooks and must stay float32: whole."""
        policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
        whole = set(encoding_parameters(loss))
        for parameter in whole:
            parameter.data = parameter.data.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.size,))
        # The root too goes back into shards after a forward pass: a validation has no backward pass that would do it,
        # and a checkpoint after one would hold the rounded weights of the forward pass.
        for module in [*layers, loss]:
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=True)
        return loss

    def sync_gradients(self, module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch: gradients are averaged only with the last."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        return nullcontext()

    def average_unsharded_gradients(self, parameters: list[nn.Parameter]) -> None:
        """FSDP2 averages the gradients of shards only; this does it for the parameters that stay whole."""
        gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
        if self.sharded and gradients:
            flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.size
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_rows(rows: Tensor, rank: int, size: int) -> tuple[Tensor, int]:
    # By way of the hosts, so that no device is waited for.
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    sizes = [int(count) for count in counts]
    return cast(Tensor, _GatheredRows.apply(rows, sizes, rank)), sum(sizes[:rank])


class _GatheredRows(torch.autograd.Function):
    """Rows of all processes, one after another."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], rank: int) -> Tensor:
        ctx.first, ctx.count = sum(sizes[:rank]), sizes[rank]
        parts = [rows.new_empty(max(sizes), *rows.shape[1:]) for _ in sizes]
        parts[rank][: ctx.count] = rows
        dist.all_gather(parts, parts[rank].clone())
        return torch.cat([part[:count] for part, count in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient[ctx.first : ctx.first + ctx.count], None, None


def encoding_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of all encodings."""
    every = (p for part in module.modules() if isinstance(part, Encoding) for p in part.parameters())
    return list(dict.fromkeys(every))  # parts of a composition are encodings too


def split_by_sharding(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Whole and sharded parameters apart: torch's operations on lists do not mix them."""
    both = [[p for p in parameters if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
    return [group for group in both if group]


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`; the norm before."""
    groups = split_by_sharding(parameters)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


@contextmanager
def join_processes(config: ResolvedTrainConfig) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = local_device(config.device)
    for option, needs in (("--sharded", config.sharded), ("--context-parallel", config.context_parallel > 1)):
        if needs and "RANK" not in os.environ:
            raise ValueError(f"{option} needs several processes, got one; start them with torchrun")
    if "RANK" not in os.environ:
        yield World(rank, size, device, sharded=False)
        return
    together = config.context_parallel
    if size % together:
        raise ValueError(
            f"--context-parallel must divide the processes, got {together} and {size} processes; start another number"
        )
    readers, name = size // together, "processes" if together == 1 else f"rings of {together} processes"
    if config.sequences < readers:
        raise ValueError(
            f"every process must have a sequence of each batch, got {config.sequences} sequences and {readers} {name}; "
            "raise --batch-tokens, or start fewer processes"
        )
    if config.sharded and config.sequences % readers:
        raise ValueError(
            f"with --sharded the processes must divide the sequences of a batch, got {config.sequences} sequences and "
            f"{readers} {name}; change --batch-tokens, or start another number"
        )
    with joined(device, again="start all of them again with --resume"):
        yield World(rank, size, device, sharded=config.sharded, ring=_ring(device, size, together))


def _ring(device: torch.device, size: int, together: int) -> ProcessGroup | None:
    if together == 1:
        return None
    mesh = init_device_mesh(device.type, (size // together, together), mesh_dim_names=("sequences", "ring"))
    return mesh.get_group("ring")
