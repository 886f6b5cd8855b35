"""What Shaw's encoding and its heirs share: their bias is a product of the layer's own queries and something else."""

from typing import ClassVar

from torch import Tensor

from lengthwise.encodings.base import Encoding, Hook, Queries, every_head
from lengthwise.token_layout import TokenLayout


class QueryEncoding(Encoding):
    """An encoding whose bias takes the layer's queries."""

    uses_qk: ClassVar[tuple[Hook, ...]] = ("bias",)

    def queries(self, q: Tensor | None, layout: TokenLayout) -> Queries:
        """The layer's queries in float32 or better."""
        return every_head("q", q, self.shape, layout.query_count)
