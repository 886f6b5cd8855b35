"""One call of ring attention: its tensors by name, and how they are cut into blocks of scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lengthwise.attention import attend
from lengthwise.bias import Axes, Bias
from lengthwise.distributed.sequence import SharedSequence
from lengthwise.token_layout import Window


@dataclass(frozen=True)
class Block:
    """A block of scores: slots of an own segment of queries with slots of a segment of keys."""

    query: int
    rows: slice
    key: int
    keys: slice
    heads: tuple[int, ...] | None = None
    """Heads of the keys; None for all."""


@dataclass(frozen=True, eq=False)
class RingCall:
    """One call but for its tensors, which are named "q", "k", "v", "logit_scale", "sink" and "bias.table"."""

    sequence: SharedSequence
    axes: dict[str, Axes]
    bias: Bias | None
    positions: dict[str, str]
    """The bias's tensors that are the layout's own positions, of queries or of keys."""
    window: Window | None
    scale: float
    softcap: float | None
    backend: str
    heads_per_key: int
    """How many heads of the queries share one of the keys."""
    skips: bool

    @property
    def of_keys(self) -> list[str]:
        """The names of what travels."""
        return [name for name, axes in self.axes.items() if "key" in axes]

    def index(
        self,
        name: str,
        x: Tensor,
        *,
        query: slice | None = None,
        key: slice | None = None,
        heads: tuple[int, ...] | None = None,
    ) -> tuple[Any, ...]:
        """Where the numbers of some queries, keys and heads of keys lie; an axis of 1 is for all of them."""
        index: list[Any] = [slice(None)] * x.ndim
        axes = self.axes[name]
        for role, part in (("query", query), ("key", key)):
            axis = axes.get(role)  # type: ignore[call-overload]
            if part is not None and axis is not None and x.shape[axis] > 1:
                index[axis] = part
        axis = axes.get("head")
        if heads is not None and axis is not None and x.shape[axis] > 1:
            shared = 1 if name in ("k", "v") else self.heads_per_key
            every = [head * shared + i for head in heads for i in range(shared)]
            run = range(every[0], every[-1] + 1)
            # Neighbours are a view, not a copy.
            index[axis] = slice(run.start, run.stop) if len(run) == len(every) else torch.tensor(every, device=x.device)
        return tuple(index)

    def indices(self, named: Mapping[str, Tensor], block: Block, keys: slice) -> dict[str, tuple[Any, ...]]:
        """Where a block's numbers lie in each tensor, if its keys lie at `keys`."""
        query = self.sequence.segments[block.query].local(block.rows)
        return {name: self.index(name, x, query=query, key=keys, heads=block.heads) for name, x in named.items()}

    def described(self, named: Mapping[str, Tensor], query: Tensor, key: Tensor) -> Bias | None:
        """The bias of some tensors, and of these positions where it has the layout's."""
        if self.bias is None:
            return None
        tensors = {name.removeprefix("bias."): x for name, x in named.items() if name.startswith("bias.")}
        own = {"query": query, "key": key}
        return self.bias.rebuilt(tensors | {name: own[side] for name, side in self.positions.items()})

    def attend(self, picked: Mapping[str, Tensor], block: Block, *, sink: bool) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of one block, from its own tensors."""
        layout = self.sequence.whole.block(block.rows, block.keys)
        return attend(
            picked["q"],
            picked["k"],
            picked["v"],
            layout=layout,
            bias=self.described(picked, layout.query, layout.key),
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            logit_scale=picked.get("logit_scale"),
            sink=picked.get("sink") if sink else None,
            return_lse=True,
            backend=self.backend,
        )
