"""DeBERTa's disentangled attention (He et al. 2021, section 3.1), with the buckets of its second version.

    scores[i, j] = (q[i] . k[j] + q[i] . K[bucket(i - j)] + k[j] . Q[bucket(j - i)]) / sqrt(3 head_dim)
    K = W_k table + b_k,  Q = W_q table + b_q                       in every head, with a row of the table per bucket

Distances up to half of the buckets have one each; beyond, buckets grow in geometric steps up to `max_distance`, to both
sides. The released code, and with it transformers', looks up Q at bucket(i - j) instead: `order="released"` does so.
Where the model is given, its own W_k and W_q may serve (`share_att_key`); here the projections are the encoding's own,
as is the table, which the models share among their layers.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import QueryDistanceBias, SumBias
from lengthwise.bias.constants import constant
from lengthwise.encodings._table_cache import TableCache, is_decoding
from lengthwise.encodings.base import (
    AttentionShape,
    Keys,
    Queries,
    QueryEncoding,
    State,
    Tokens,
    checked_state,
    every_head,
    project,
    reset_linear,
)
from lengthwise.errors import check_choice, check_int
from lengthwise.token_layout import TokenLayout


class Deberta(QueryEncoding):
    """Queries meet a vector of the distance, and so do keys."""

    paper = "He et al. 2021, arXiv 2006.03654"
    by_head = ("to_key.weight", "to_key.bias", "to_query.weight", "to_query.bias")
    kind = SumBias
    uses_qk = ("state", "bias")
    tables = ("table",)

    def __init__(
        self,
        shape: AttentionShape,
        *,
        buckets: int = 256,
        max_distance: int = 512,
        order: Literal["paper", "released"] = "paper",
    ) -> None:
        super().__init__(shape)
        check_int("buckets", buckets, "DeBERTa has 256.")
        check_int("max_distance", max_distance, "DeBERTa has 512.")
        check_choice("order", order, ("paper", "released"))
        if buckets < 4 or buckets % 2 or max_distance <= buckets // 2 + 1:
            raise ValueError(
                "buckets must be an even number, 4 or more, and max_distance more than one beyond half of them, got "
                f"buckets={buckets}, max_distance={max_distance}; DeBERTa has 256 and 512"
            )
        past = signed_buckets(buckets, max_distance)
        both = [-bucket for bucket in past[:0:-1]] + past
        self.first = -max_distance
        self.of_query, self.of_key = (
            [min(max(sign * bucket + buckets, 0), 2 * buckets - 1) for bucket in both]
            for sign in (1, -1 if order == "paper" else 1)
        )
        inner = shape.heads * shape.head_dim
        self.table = nn.Parameter(torch.empty(2 * buckets, shape.width))
        self.to_key, self.to_query = nn.Linear(shape.width, inner), nn.Linear(shape.width, inner)
        self._tables = TableCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), biases 0."""
        nn.init.normal_(self.table, std=0.02)
        reset_linear(self.to_key)
        reset_linear(self.to_query)

    def state(
        self,
        x: Tokens,
        key_mask: Bool[Tensor, "#batch position"] | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> State:
        """The keys, of every head of the queries: later queries see how they meet the table."""
        return {"key": every_head("k", k, self.shape, x.shape[1])}

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Queries over sqrt(3): there are three products."""
        return q * 3**-0.5, k

    def bias(
        self,
        x: Tokens,
        layout: TokenLayout,
        state: State | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> SumBias:
        """Queries that meet K, and keys that meet Q."""
        own = self.state(x, k=k) if state is None else state
        key = checked_state(own, "key", x.shape[0], self.shape.heads, layout.key_count, self.shape.head_dim)
        scale, places = (3 * self.shape.head_dim) ** -0.5, (layout.query, layout.key, self.first)
        keys, queries = self._tables.table(self._profiles, 1, *self.parameters(), decoding=is_decoding(layout))
        of_query = QueryDistanceBias(self.queries(q, layout) * scale, keys, *places)
        return SumBias((of_query, QueryDistanceBias(key * scale, queries, *places, side="key")))

    def _profiles(self, _: int) -> list[Float[Tensor, "head dim distance"]]:
        """K and Q, one vector for every distance that differs, however far there is to look."""
        profiles = []
        for layer, buckets in ((self.to_key, self.of_query), (self.to_query, self.of_key)):
            by_bucket = project(layer, self.table[None])[0]
            index = constant(tuple(buckets), by_bucket.device)
            # Not by gather, whose gradient is added up in any order on CUDA.
            profiles.append(F.embedding(index, by_bucket.T).T.unflatten(0, (self.shape.heads, -1)))
        return profiles


def signed_buckets(buckets: int, max_distance: int) -> list[int]:
    """The bucket of each distance from 0 to max_distance, in whole numbers, so that no border depends on rounding.

    Beyond half of the buckets, the middle, bucket middle + n is the first with ((max_distance - 1) / middle) ** n >=
    (distance / middle) ** (middle - 1).
    """
    middle = buckets // 2
    by_distance = list(range(middle + 1))
    n = 1
    for distance in range(middle + 1, max_distance + 1):
        while (max_distance - 1) ** n * middle ** (middle - 1) < distance ** (middle - 1) * middle**n:
            n += 1
        by_distance.append(middle + n)
    return by_distance
