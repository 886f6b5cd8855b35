"""What processes exchange: the same tensor of each gathered in all, and tensors sent from one to another.

All processes of a group call these in the same order. Sums are in the order of the processes, so that the same
processes give the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class _Gather(torch.autograd.Function):
    """The same tensor of every process; its gradient is the sum of those of all, in the order of the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return gather_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_every: Tensor) -> tuple[Tensor, None]:
        d_every = d_every.contiguous()
        of_own = torch.empty_like(d_every)
        dist.all_to_all_single(of_own, d_every, group=ctx.group)
        total = of_own[0].clone()
        for gradient in of_own[1:]:
            total += gradient
        return total, None


def gathered(x: Shaped[Tensor, "*shape"], group: ProcessGroup | None) -> Shaped[Tensor, "process *shape"]:
    """A tensor of every process, by the process; with gradients."""
    every: Tensor = _Gather.apply(x, group)
    return every


def gather_all(x: Shaped[Tensor, "*shape"], group: ProcessGroup | None) -> Shaped[Tensor, "process *shape"]:
    """A tensor of every process, by the process; without gradients."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)


def check_alike(
    wanted: str, sizes: Mapping[str, int], contents: Mapping[str, Tensor | None], group: ProcessGroup | None
) -> None:
    """An error in all processes unless all have the same: else they wait for each other for ever, or compute nonsense.

    `wanted` is what all must do. Of integer tensors a checksum is compared.
    """
    device = next(x.device for x in contents.values() if x is not None)
    checksums = [torch.tensor(0, device=device) if x is None else checksum(x) for x in contents.values()]
    own = torch.stack([*(torch.tensor(size, device=device) for size in sizes.values()), *checksums])
    every = gather_all(own, group).tolist()
    for name, of_all in zip((*sizes, *contents), zip(*every, strict=True), strict=True):
        others = [process for process, number in enumerate(of_all) if number != of_all[0]]
        if others:
            values = f"{name} of {', '.join(map(str, of_all))}"
            got = values if name in sizes else f"other {name} in process {others[0]} than in process 0"
            raise ValueError(f"all processes must {wanted}, got {got}")


def checksum(x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, ""]:
    """An int64 that is the same for the same integers at the same places, and hardly ever for others."""
    # The first binary places of the roots of 2, 3 and 5, made odd; products keep their last 64 bits. Without the shifts
    # it would be a sum of products, in which differences at several places can cancel.
    mixed = x.flatten().long() * 0xD413CCCFE779921 + torch.arange(x.numel(), device=x.device) * 0x176CF5D0B09954E7
    mixed = (mixed ^ (mixed >> 31)) * 0x78DDE6E5FD29F05
    return (mixed ^ (mixed >> 29)).sum()


@dataclass(frozen=True, eq=False)
class Transfer:
    """Tensors on their way."""

    works: list[Any]
    sent: list[Tensor]
    """Held until they are away."""
    received: dict[str, Tensor]

    def wait(self) -> dict[str, Tensor]:
        """What was received, once it is there, and what was sent is away."""
        for work in self.works:
            work.wait()
        # Nothing is held here any more: what was sent is a copy, and who gets what was received decides when it goes.
        received = dict(self.received)
        for own in (self.works, self.sent, self.received):
            own.clear()
        return received


def transfer(
    sent: Sequence[Tensor],
    to: int,
    received: Mapping[str, Tensor],
    source: int,
    *,
    group: ProcessGroup | None,
    tag: int,
) -> Transfer:
    """Begin to send to one process of a group, and to receive from another into tensors of the right shapes.

    `tag` and as many after it as there are tensors are these tensors' own among all that the two processes exchange.
    """
    operations = [
        *(dist.P2POp(dist.isend, x, group=group, group_peer=to, tag=tag + i) for i, x in enumerate(sent)),
        *(
            dist.P2POp(dist.irecv, x, group=group, group_peer=source, tag=tag + i)
            for i, x in enumerate(received.values())
        ),
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(works, list(sent), dict(received))
