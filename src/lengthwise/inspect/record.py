"""What one layer of attention was given and what it made of it: the same for every model, whoever wrote it.

    content = scale q k^T
    scores  = content + bias, or what a rescore makes of both, or softcap tanh(content / softcap)
    weights = softmax(scores) over the keys that may be seen, and a sink where the model has one

Everything is asked for by blocks of rows. `prove` holds these lines against the layer's own output, so that a model
which does something else is found out and not drawn wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention.reference import of_heads, softmax
from lengthwise.bias import Bias, at_least_float32
from lengthwise.rescore import Rescore
from lengthwise.views.tiles import fill

Mask = Callable[[slice, slice], Bool[Tensor, "#batch 1 row column"]]
"""Which keys some rows may see."""

CHECKED = 4
"""How many of the first and of the last rows are held against the layer's own output."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows; everything is 0 where the mask forbids, and `bias` None where there is none."""

    may: Bool[Tensor, "#batch 1 row column"]
    content: Float[Tensor, "batch head row column"]
    bias: Float[Tensor, "batch head row column"] | None
    scores: Float[Tensor, "batch head row column"]


@dataclass(frozen=True, eq=False)
class Record:
    """One call of one layer. `out` is what the layer itself made, before its last projection."""

    layer: int
    q: Float[Tensor, "batch head query dim"]
    k: Float[Tensor, "batch kv_head key dim"]
    v: Float[Tensor, "batch kv_head key value"]
    out: Float[Tensor, "batch head query value"]
    scale: float
    mask: Mask
    causal: bool
    bias: Bias | None = None
    context_free: bool = False
    """Whether the bias is known to come from positions alone."""
    rescore: Rescore | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    rotated: Callable[[], Float[Tensor, "head distance"] | None] | None = None
    """For rotary encodings: the kernel of the mean query and key."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, head, query, key)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def adds(self) -> bool:
        """Whether there is a positional term: an additive bias, or what a rescore adds to the content."""
        return self.bias is not None or self.rescore is not None

    @property
    def versions(self) -> list[int]:
        """How often what belongs to the model was written to: torch counts that, and looking must not add to it."""
        first = slice(0, 1)
        tensors = [self.q, self.k, self.v, self.out, self.mask(first, first)]
        if self.bias is not None:
            tensors += self.bias.tensors().values()
        return [x._version for x in tensors]

    def bias_rows(self, rows: slice, columns: slice) -> Float[Tensor, "batch head row column"]:
        """Some rows of the additive term, 0 where the mask forbids; a copy, since a tile may be the model's own."""
        assert self.bias is not None
        tile = self.bias.tile(rows, columns)
        whole = torch.empty(*self.shape[:2], *tile.shape[2:], dtype=tile.dtype, device=tile.device).copy_(tile)
        return fill(whole, self.mask(rows, columns), 0)

    def block(self, rows: slice, columns: slice) -> Block:
        """Some whole rows; the columns must be all that they may see."""
        may = self.mask(rows, columns)
        q, k = at_least_float32(self.q[:, :, rows]), at_least_float32(self.k[:, :, columns])
        # Heads that share keys are rows of one product.
        grouped = (self.scale * q).unflatten(1, (k.shape[1], -1))
        products = grouped.flatten(2, 3) @ k.transpose(-1, -2)
        content = fill(products.unflatten(2, grouped.shape[2:4]).flatten(1, 2), may, 0)
        bias = None if self.bias is None else self.bias_rows(rows, columns)
        if self.rescore is not None:
            added = torch.zeros_like(content) if bias is None else bias
            keys = of_heads(self.k[:, :, columns], self.q.shape[1] // self.k.shape[1])
            scores = fill(self.rescore.scores(content, added, q, keys, may, rows), may, 0)
            # What is added in the end is the positional part, whatever it was made from.
            bias = scores - content
        else:
            scores = content if bias is None else content + bias
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return Block(may, content, bias, scores)

    def weights(self, block: Block) -> Float[Tensor, "batch head row column"]:
        """The softmax; a sink takes its share and is left out."""
        scores = fill(block.scores.clone(), block.may, -torch.inf)
        sink = None if self.sinks is None else at_least_float32(self.sinks)[None, :, None].expand(scores.shape[:3])
        return softmax(scores, sink)[0]

    def prove(self, name: str) -> None:
        """An error unless weights times values is the layer's own output, on its first and last rows."""
        queries, keys = self.shape[2:]
        for rows in {(0, min(CHECKED, queries)), (max(0, queries - CHECKED), queries)}:
            block = self.block(slice(*rows), slice(0, keys))
            seen = block.may.any(-1)[..., None]
            v = at_least_float32(self.v).repeat_interleave(self.q.shape[1] // self.v.shape[1], 1)
            expected = self.weights(block) @ v
            difference = (expected - at_least_float32(self.out[:, :, slice(*rows)])).masked_fill(~seen, 0).abs().max()
            # A score's rounding is relative to the score, and a weight's to that; inside, float32 is usual everywhere.
            loudest = block.scores.abs().max()
            eps = max(torch.finfo(dtype).eps for dtype in (self.out.dtype, torch.float32))
            allowed = 16 * eps * (1 + loudest) * v.abs().max()
            if not difference <= allowed:
                raise NotImplementedError(
                    f"layer {self.layer} of {name} must be softmax(scores) v of what it was given, to {allowed:.1e}; "
                    f"its own output differs by {difference:.1e}, so it does more. It needs an adapter in "
                    "lengthwise.inspect that says what."
                )
