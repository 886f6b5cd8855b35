"""xPos: rotary positions whose pairs decay with distance (Sun et al. 2023, section 2).

    score of pair k = RoPE's * zeta[k] ** ((i - j) / decay)         zeta[k] = (2k + 0.4 head_dim) / (1.4 head_dim)

q is multiplied by zeta ** ((i - c) / decay) and k by zeta ** ((c - j) / decay), which gives that for any c. The
authors' c is half the length of the sequence, so that cached keys of another length are off; here c is the middle of
the call's queries and a cache holds keys before either factor. Queries so far apart that a factor would leave the
range of the dtype are refused: 3,966 tokens in one pass in float16, 35,694 in bfloat16 and float32.
"""

import math

import torch
from torch import Tensor

from lengthwise.encodings._rotary import PairLayout, Waves, check_turned, turn
from lengthwise.encodings.base import AttentionShape, Keys, Queries, State
from lengthwise.encodings.rope import Rope
from lengthwise.errors import check_number
from lengthwise.token_layout import PositionError, TokenLayout


class Xpos(Rope):
    """RoPE with a decay per pair, the slowest for the pairs that turn slowest."""

    paper = "Sun et al. 2023, arXiv 2212.10554"
    two_sided = False
    turns_last = True

    def __init__(
        self,
        shape: AttentionShape,
        *,
        base: float = 10000.0,
        layout: PairLayout = "interleaved",
        decay: float = 512.0,
    ) -> None:
        super().__init__(shape, base=base, layout=layout)
        check_number("decay", decay, "The paper has 512.")
        self.decay = decay

    @property
    def rotates_late(self) -> bool:
        """Whether a cache must hold keys that are not yet turned: their factor depends on the queries of the call."""
        return True

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by their positions; the further behind the middle, the smaller queries and the larger keys."""
        check_turned(q, k, layout, self.shape)
        query, key = layout.query, layout.key
        every = layout.whole.query
        self._check_span(every, q.dtype)
        dim = self.shape.head_dim
        pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=query.device)
        rate = ((pairs + 0.4 * dim) / (1.4 * dim)).log() / self.decay
        middle = (every.amin(1, keepdim=True) + every.amax(1, keepdim=True)) // 2 if every.numel() else 0
        decayed, grown = (
            ((distance[..., None].float() * rate)[:, None]).exp() for distance in (query - middle, middle - key)
        )
        return turn(q, self._scaled(query, decayed), self.layout), turn(k, self._scaled(key, grown), self.layout)

    def _scaled(self, positions: Tensor, factor: Tensor) -> Waves:
        cos, sin = self.waves(positions, positions)
        return cos * factor, sin * factor

    def _check_span(self, query: Tensor, dtype: torch.dtype) -> None:
        """An error unless every factor of the queries is within half of the dtype's range, in powers."""
        widest = -math.log(torch.finfo(dtype).tiny) * self.decay / math.log(1.4 / 0.4)
        if query.numel() == 0:
            return
        span = query.amax(1) - query.amin(1)
        message = f"xpos in {dtype} has room for {int(widest)} positions in one pass; pass a long text in chunks"
        if torch.compiler.is_compiling() or not query.is_cpu:
            torch._assert_async((span <= widest).all(), message)
        elif int(span.max()) > widest:
            raise PositionError(f"{message}, got {int(span.max()) + 1}")
