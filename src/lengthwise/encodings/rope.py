"""RoPE: rotary positions (Su et al. 2021, section 3.2).

    pair k of q and of k turns by  position * frequency[k],  frequency[k] = base ** (-2k / head_dim)

so that their product depends on the distance alone. Two layouts of a pair, the same up to the order of the channels:
    half          channels k and k + head_dim / 2        LLaMA, NeoX
    interleaved   channels 2k and 2k + 1                 GPT-J, the CABLE paper's figures

`scaling` stretches the frequencies beyond the training length, e.g. {"type": "yarn", "factor": 8}; see
rope_scaling.py. Angles are float32 whatever the dtype of q and k.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import at_least_float32
from lengthwise.encodings._rope_scaling import RopeBase, make_scaling
from lengthwise.encodings.base import AttentionShape, Encoding, State
from lengthwise.errors import check_broadcast, check_choice, check_number, check_tensor
from lengthwise.token_layout import TokenLayout, run_ends


class Rope(Encoding):
    """Queries and keys turned by their positions."""

    paper = "Su et al. 2021, arXiv 2104.09864"

    def __init__(
        self,
        geometry: AttentionShape,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        scaling: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(geometry)
        if geometry.head_dim % 2:
            raise ValueError(f"rope turns pairs of channels, so head_dim must be even, got {geometry.head_dim}")
        check_choice("layout", layout, ("half", "interleaved"), "LLaMA has 'half'.")
        check_number("base", base, "10000 is usual.")
        self.layout = layout
        self.scaling = make_scaling(scaling, RopeBase(base, geometry.head_dim, geometry.train_length))
        self.length_dependent = self.scaling.length_dependent

    def rotate(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch kv_head key dim"],
        layout: TokenLayout,
        state: State | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Both turned by their positions.

        Where angles depend on the length, it is that of each token's own document; for keys, at most as far as the
        queries have come, since the slots of a static cache run on behind them.
        """
        query, key = layout.query, layout.key
        for name, tensor, positions in (("query", q, query), ("key", k, key)):
            axes = ("batch", "head", positions.shape[1], self.geometry.head_dim)
            check_tensor(f"what {name} positions turn", tensor, axes, "floating-point", "Give one position each.")
            sizes = (tensor.shape[0], positions.shape[0])
            check_broadcast(f"{name} positions and what they turn", sizes, "batch", "Give one row or one each.")
        waves = self._waves(query, query)
        return self._turn(q, waves), self._turn(k, waves if key is query else self._waves(key, query))

    def _waves(self, positions: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles of some positions, with an axis for heads."""
        length = positions
        if self.length_dependent:
            length = torch.minimum(run_ends(positions), query.amax(1, keepdim=True)) + 1
        angles = (positions[..., None].float() * self.scaling.frequencies(length))[:, None]
        return self.scaling.factor * angles.cos(), self.scaling.factor * angles.sin()

    def _turn(self, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
        wide_x = at_least_float32(x)
        cos, sin = waves
        if self.layout == "half":
            a, b = wide_x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
        a, b = wide_x[..., 0::2], wide_x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
