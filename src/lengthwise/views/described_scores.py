"""Scores, and what a network adds to them, described by queries, keys and weights.

Nobody adds these to scores. They are Biases so that a map of them is filled in by tiles and stored as every other: 512
tokens of 12 heads of 16 are 0.4 MB as queries and keys in half precision, and 12 MB as numbers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.reference import of_heads
from lengthwise.bias import ALL, Bias, Index, at_least_float32, described
from lengthwise.errors import check_tensor
from lengthwise.rescore import HeadNetwork


@described
@dataclass(frozen=True, eq=False)
class ContentScores(Bias):
    """scale * q[b, h, i] . k[b, h, j], queries and keys as attention gets them, so rotated where they are."""

    q: Float[Tensor, "batch head query dim"]
    k: Float[Tensor, "batch kv_head key dim"]
    scale: float

    _by_sequence: ClassVar = ("q", "k")

    def __post_init__(self) -> None:
        check_tensor("q", self.q, ("batch", "head", "query", "dim"), "floating-point")
        check_tensor("k", self.k, (self.q.shape[0], "head", "key", self.q.shape[3]), "floating-point")
        if self.q.shape[1] % self.k.shape[1]:
            raise ValueError(f"heads must be a multiple of {self.k.shape[1]}, those of k, got {self.q.shape[1]}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, head, query, key)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def head_keys(self) -> Float[Tensor, "batch head key dim"]:
        """The keys of every head."""
        return of_heads(self.k, self.q.shape[1] // self.k.shape[1])

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "batch head row column"]:
        """A part of the matrix, in float32 or better."""
        return (self.scale * at_least_float32(self.q[:, :, rows])) @ self.head_keys[:, :, columns].transpose(-1, -2)


@described
@dataclass(frozen=True, eq=False)
class NetworkBias(Bias):
    """B + f([A; B]): all that a network along the heads adds to the content A, which DAPE calls its bias."""

    content: ContentScores
    network: HeadNetwork
    bias: Bias | None = None
    causal: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, head, query, key)."""
        return self.content.shape

    def tile(self, rows: Index, columns: Index) -> Float[Tensor, "batch head row column"]:
        """A part of the matrix, from whole rows, since the network sees a key's neighbours; 0 where causality masks."""
        _, _, queries, keys = self.shape
        slots = torch.arange(keys - queries, keys)[rows, None]
        mask = torch.arange(keys) <= slots if self.causal else torch.ones(len(slots), keys, dtype=torch.bool)
        content = self.content.tile(rows, ALL).masked_fill(~mask, 0)
        added = torch.zeros_like(content)
        if self.bias is not None:
            added = self.bias.tile(rows, ALL).expand_as(content).masked_fill(~mask, 0)
        q = at_least_float32(self.content.q[:, :, rows])
        scores = self.network.apply(content, added, q, self.content.head_keys, mask[None, None])
        return (scores - content).masked_fill(~mask, 0)[..., columns]

    def first_sequence(self) -> "NetworkBias":
        """That of its parts."""
        network = self.network.rebuilt({name: x.detach().cpu() for name, x in self.network.tensors().items()})
        bias = None if self.bias is None else self.bias.first_sequence()
        return NetworkBias(self.content.first_sequence(), network, bias, self.causal)
