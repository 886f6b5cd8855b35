"""What Shaw's encoding and its heirs share: their bias is a product of the layer's own queries and something else."""

from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import at_least_float32
from lengthwise.encodings.base import Encoding, State, Tokens, checked_heads
from lengthwise.token_layout import TokenLayout


class QueryEncoding(Encoding):
    """An encoding that takes the layer's queries, and of most keys nothing."""

    uses_qk = True

    def state(
        self,
        x: Tokens,
        key_mask: Bool[Tensor, "#batch position"] | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> State | None:
        """Nothing, unless keys are more than keys."""
        return None

    def queries(self, q: Tensor | None, layout: TokenLayout) -> Float[Tensor, "batch head query dim"]:
        """The layer's queries in float32 or better."""
        return at_least_float32(checked_heads("q", q, self.shape, layout.query_count))
