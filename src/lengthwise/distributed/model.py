"""The loss of a model whose sequences several processes share, and the processes that torchrun starts."""

import gc
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from torch.distributed import ProcessGroup

from lengthwise.distributed.collectives import check_alike
from lengthwise.distributed.layout import gather, spread, take
from lengthwise.encodings.registry import find
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.model.layout import make_layout
from lengthwise.model.losses import IGNORED, head_loss, head_weight

CONNECTION_LOST = re.compile("connection|closed by peer|broken pipe|timed out|NCCL|gloo", re.IGNORECASE)
"""In torch's errors when another process is gone."""


@contextmanager
def joined(device: torch.device, *, again: str = "start all of them again") -> Iterator[bool]:
    """The processes that torchrun started as one group, or this one alone; whether this is the first.

    Where another process is gone the error says so, and what to do: `again`.
    """
    if "RANK" not in os.environ:
        yield True
        return
    # Hosts talk to each other without waiting for their devices.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        yield rank == 0
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, RuntimeError) and size > 1 and CONNECTION_LOST.search(str(error)):
            raise ConnectionError(
                f"process {rank} lost the connection to another process of the run; see the error of that one, then "
                f"{again}"
            ) from error
        raise
    finally:
        # A wrapped model must go before the group: else the group's last reference is dropped inside DDP, which then
        # waits, with Python's lock in hand, for a thread that waits for that lock.
        gc.collect()
        dist.destroy_process_group()


def sharing_processes() -> int:
    """How many processes were joined, by torchrun and `joined`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def check_spreadable(config: LengthwiseConfig) -> None:
    """An error for a model with an encoding that ring attention cannot serve, by its name."""
    for spec in config.schedule:
        for name, _ in spec.parts():
            if find(name).overrides("rescore"):
                raise NotImplementedError(
                    f"{name!r} replaces the scores, for which it needs all keys of a row at once: its sequences cannot "
                    "be spread over processes; use another encoding, or no context parallelism"
                )


def ring_loss(
    model: LengthwiseForCausalLM,
    input_ids: Int[Tensor, "batch token"],
    labels: Int[Tensor, "batch token"] | None = None,
    *,
    attention_mask: Int[Tensor, "batch token"] | None = None,
    position_ids: Int[Tensor, "#batch token"] | None = None,
    group: ProcessGroup | None = None,
    reduction: str = "sum",
) -> Tensor:
    """This process's part of the loss of sequences that all processes of the group are given whole.

    The parts add up to `model.loss(..., reduction="sum")`, and so do their gradients. With reduction="none", and no
    gradients, all processes get the losses of all tokens, as from `model.loss`. Labels are the tokens themselves if not
    given, and may be one more than the tokens: what follows the last one.
    """
    if reduction not in ("sum", "none"):
        raise ValueError(
            f"reduction must be 'sum' or 'none', got {reduction!r}: a mean needs the tokens of all processes"
        )
    check_spreadable(model.config)
    whole = make_layout(input_ids, attention_mask=attention_mask, position_ids=position_ids)
    part = spread(whole, group)
    own = take(input_ids, part)
    following = (input_ids if labels is None else labels)[:, 1:]
    count = following.shape[1]
    if count not in (input_ids.shape[1] - 1, input_ids.shape[1]):
        raise ValueError(f"labels must be {input_ids.shape[1]} tokens, or one more, got {count + 1}")
    contents = {"input_ids": input_ids, "labels": following}
    check_alike("have the same sequences", {"labels' length": count}, contents, group)
    following = F.pad(following, (0, input_ids.shape[1] - count), value=IGNORED)
    x = model.transformer(own, layout=part, use_cache=False).last_hidden_state
    losses = head_loss(x, head_weight(model.lm_head), take(following, part), reduction=reduction)
    return losses if reduction == "sum" else gather(losses, part)[:, :count]
