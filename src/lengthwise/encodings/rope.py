"""RoPE: rotary positions (Su et al. 2021, section 3.2).

    pair k of q and of k turns by  position * frequency[k],  frequency[k] = base ** (-2k / turning)

so that their product depends on the distance alone. `turning` is head_dim, or the first `part` of it: the channels
behind do not turn (GPT-J, GPT-NeoX). That is not the rule "proportional", whose exponents run over all of head_dim.

`scaling` stretches the frequencies beyond the training length, e.g. {"type": "yarn", "factor": 8}; its rules are in
_rope_scaling.py. `resonance` then rounds every wavelength, 2 pi / frequency, to whole tokens (Wang et al. 2024, arXiv
2403.00071), so that each pair repeats its angles exactly. Angles are float32 whatever the dtype of q and k.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from lengthwise.encodings._rope_scaling import Frequencies, RopeBase, make_scaling
from lengthwise.encodings._rotary import PAIR_LAYOUTS, PairLayout, Waves, check_even, check_turned, turn
from lengthwise.encodings.base import AttentionShape, Encoding, Keys, Queries, State
from lengthwise.errors import check_choice, check_flag, check_number
from lengthwise.token_layout import Positions, TokenLayout


class Rope(Encoding):
    """Queries and keys turned by their positions."""

    paper = "Su et al. 2021, arXiv 2104.09864"
    by_head = ()

    def __init__(
        self,
        shape: AttentionShape,
        *,
        base: float = 10000.0,
        layout: PairLayout = "half",
        part: float = 1.0,
        resonance: bool = False,
        scaling: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(shape)
        check_even("rope", shape)
        check_choice("layout", layout, PAIR_LAYOUTS, "LLaMA has 'half'.")
        check_number("base", base, "10000 is usual.")
        check_number("part", part, "GPT-NeoX has 0.25.", most=1.0)
        check_flag("resonance", resonance)
        turning = int(shape.head_dim * part)
        if turning < 2 or turning % 2:
            raise ValueError(
                f"part of head_dim must be an even number of channels, got {part} of {shape.head_dim}: {turning}"
            )
        self.layout = layout
        self.resonance = resonance
        self.scaling = make_scaling(scaling, RopeBase(base, turning, shape.train_length))
        self.length_dependent = self.scaling.length_dependent

    def frequencies(self, length: Positions) -> Frequencies:
        """Radians per position, per pair; `length` is that of each token's document."""
        stretched = self.scaling.frequencies(length)
        return 2 * math.pi / (2 * math.pi / stretched).round() if self.resonance else stretched

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by their positions.

        Where angles depend on the length, it is that of each token's own document; for keys, at most as far as the
        queries have come, since the slots of a static cache run on behind them.
        """
        check_turned(q, k, layout, self.shape)
        query, key = layout.query, layout.key
        ends = layout.document_ends() if self.length_dependent else (query, key)
        waves = self.waves(query, ends[0])
        return turn(q, waves, self.layout), turn(k, waves if key is query else self.waves(key, ends[1]), self.layout)

    def waves(self, positions: Tensor, ends: Tensor) -> Waves:
        """Cosine and sine of the angles of some positions, with an axis for heads; documents have these ends."""
        angles = (positions[..., None].float() * self.frequencies(ends + 1))[:, None]
        return self.scaling.factor * angles.cos(), self.scaling.factor * angles.sin()
