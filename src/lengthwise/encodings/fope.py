"""FoPE: Fourier position embedding (Hua et al. 2024, section 4): every pair turns by a mixture of RoPE's waves.

    cos'[h, m] = C_cos[h]^T cos(m f)       sin'[h, m] = C_sin[h]^T sin(m f)         f: frequencies of 2 pi / L and above
    pair k of q and of k:  (a cos' - b sin', b cos' + a sin'),  for the first min(pairs of f, head_dim / 4) pairs

The other pairs do not turn. The authors' code leaves them cosine 1 and sine 1, which turns both sides by 45 degrees and
counts their content twice; `sine_of_rest=1` gives that. C = identity (every n-th wave) + N(0, gain ** 2) over its
Xavier size; it is drawn once and not learned, from `seed`, or learned from there (`learned`). As cosine and sine have
mixtures of their own, scores are no function of the distance, as published.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32, widest_dtype
from lengthwise.bias.constants import Constants
from lengthwise.encodings._rotary import Waves, check_even, check_turned, plain_frequencies, turn
from lengthwise.encodings.base import AttentionShape, Encoding, Keys, Queries, State
from lengthwise.errors import check_flag, check_int, check_number
from lengthwise.token_layout import Positions, TokenLayout


class Fope(Encoding):
    """RoPE with a Fourier series in the place of each wave."""

    paper = "Hua et al. 2024, arXiv 2412.17739"
    by_head = (("drawn", 1), ("mixture", 1))

    def __init__(
        self,
        shape: AttentionShape,
        *,
        base: float = 10000.0,
        gain: float = 0.3,
        seed: int = 0,
        learned: bool = False,
        sine_of_rest: int = 0,
    ) -> None:
        super().__init__(shape)
        check_even("fope", shape)
        check_number("base", base, "10000 is usual.")
        check_number("gain", gain, "The authors have 0.3 at 60M parameters, 0.4 at 180M, 0.6 at 1.2B.")
        check_int("seed", seed, least=0)
        check_flag("learned", learned)
        if sine_of_rest not in (0, 1):
            raise ValueError(f"sine_of_rest must be 0 or, as in the authors' code, 1, got {sine_of_rest!r}")
        self.base, self.gain, self.seed, self.sine_of_rest = base, gain, seed, sine_of_rest
        pairs = shape.head_dim // 2
        slowest = 2 * math.pi / shape.train_length
        self.waves_in = max(1, sum(base ** (-k / pairs) >= slowest for k in range(pairs)))
        self.waves_out = min(self.waves_in, max(1, shape.head_dim // 4))
        # Neither a buffer, which a model in half precision would round, nor a parameter unless it is learned.
        self.drawn = self._draw()
        self._placed = Constants()
        self.mixture = nn.Parameter(torch.empty(self.drawn.shape)) if learned else None
        self.tables = ("mixture",) if learned else ()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The mixture that belongs to the seed, if it is learned."""
        if self.mixture is not None:
            with torch.no_grad():
                self.mixture.copy_(self.drawn)

    def _draw(self) -> Float[Tensor, "2 head wave pair"]:
        """The mixtures of cosine and sine that belong to the seed, on the CPU whatever the default device."""
        sizes = (2, self.shape.heads, self.waves_in, self.waves_out)
        with torch.device("cpu"):
            noise = torch.randn(sizes, generator=torch.Generator().manual_seed(self.seed))
            step = -(-self.waves_in // self.waves_out)
            identity = torch.zeros(sizes[2:])
            for pair in range(self.waves_out):
                if pair * step < self.waves_in:
                    identity[pair * step, pair] = 1.0
        # Xavier's size as the code takes it, of a tensor (head, wave, pair): fans of wave * pair and head * pair.
        fans = self.waves_in * self.waves_out + self.shape.heads * self.waves_out
        return identity + self.gain * math.sqrt(2 / fans) * noise

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by the mixtures at their positions."""
        check_turned(q, k, layout, self.shape, own_heads=True)
        mixture = self._drawn_on(layout.query.device) if self.mixture is None else at_least_float32(self.mixture)
        query = self._waves(layout.query, mixture)
        key = query if layout.key is layout.query else self._waves(layout.key, mixture)
        return turn(q, query), turn(k, key)

    def _drawn_on(self, device: torch.device) -> Float[Tensor, "2 head wave pair"]:
        return self._placed.get(device, lambda: self.drawn.to(device))

    def _waves(self, positions: Positions, mixture: Tensor) -> Waves:
        """The mixed cosine and sine of some positions, all pairs; those that do not turn behind."""
        frequencies = plain_frequencies(self.base, self.shape, positions.device)[: self.waves_in]
        angles = (positions[..., None].to(mixture.dtype) * frequencies)[:, None]
        # In float64, which neither autocast nor TF32 touches.
        wide = widest_dtype(angles.device)
        waves = zip((angles.cos(), angles.sin()), mixture.to(wide), strict=True)
        cos, sin = ((wave.to(wide) @ own).to(mixture.dtype) for wave, own in waves)
        rest = (*cos.shape[:3], self.shape.head_dim // 2 - self.waves_out)
        return torch.cat([cos, cos.new_ones(rest)], -1), torch.cat([sin, sin.new_full(rest, self.sine_of_rest)], -1)
