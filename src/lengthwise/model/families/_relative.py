"""Scores of a token against a vector per distance, the bias of relative encodings that follow the tokens.

    bias[b, h, i, j] = vectors[b, h, i] . profiles[h, query[i] - key[j] - first]      vectors of the queries
    bias[b, h, i, j] = vectors[b, h, j] . profiles[h, query[i] - key[j] - first]      vectors of the keys

Nothing quadratic is kept: a tile multiplies its vectors with the profiles of its distances.
"""

from jaxtyping import Float, Int
from torch import Tensor

from lengthwise.bias import FunctionBias, Index, at_least_float32


def query_distance_bias(
    vectors: Float[Tensor, "batch head query dim"],
    profiles: Float[Tensor, "head dim distance"],
    key: Int[Tensor, " key"],
    query: Int[Tensor, " query"],
    first: Int[Tensor, ""],
) -> FunctionBias:
    """The queries' vectors against the profile of each distance; `first` is the distance of the first profile."""
    return FunctionBias(_of_queries, (vectors.transpose(-1, -2), key, query, profiles, first), "qkq")


def key_distance_bias(
    vectors: Float[Tensor, "batch head key dim"],
    profiles: Float[Tensor, "head dim distance"],
    key: Int[Tensor, " key"],
    query: Int[Tensor, " query"],
    first: Int[Tensor, ""],
) -> FunctionBias:
    """The same with the keys' vectors."""
    return FunctionBias(_of_keys, (query, vectors.transpose(-1, -2), key, profiles, first), "qkk")


def _of_queries(
    rows: Index, columns: Index, vectors: Tensor, key: Tensor, query: Tensor, profiles: Tensor, first: Tensor
) -> Float[Tensor, "batch head row column"]:
    column, used = _used_profiles(query[rows], key[columns], profiles, first)
    products = at_least_float32(vectors[..., rows]).transpose(-1, -2) @ used
    return products.gather(-1, column.expand(*products.shape[:3], -1))


def _of_keys(
    rows: Index, columns: Index, query: Tensor, vectors: Tensor, key: Tensor, profiles: Tensor, first: Tensor
) -> Float[Tensor, "batch head row column"]:
    column, used = _used_profiles(query[rows], key[columns], profiles, first)
    products = at_least_float32(vectors[..., columns]).transpose(-1, -2) @ used
    column = column.transpose(-1, -2)
    return products.gather(-1, column.expand(*products.shape[:3], -1)).transpose(-1, -2)


def _used_profiles(
    query: Int[Tensor, " row"], key: Int[Tensor, " column"], profiles: Tensor, first: Tensor
) -> tuple[Int[Tensor, "row column"], Float[Tensor, "head dim used"]]:
    """The column of every pair among the profiles that a tile uses, and these."""
    column = (query[:, None] - key - first).clamp(0, profiles.shape[-1] - 1)
    if not column.numel():
        return column, at_least_float32(profiles[..., :1])
    least, most = int(column.min()), int(column.max())
    return column - least, at_least_float32(profiles[..., least : most + 1])
