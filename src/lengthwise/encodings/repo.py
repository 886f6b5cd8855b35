"""RePo: re-positioning by content (Li et al. 2025, section 3).

    z[h, t] = W_f (silu(W_g x[t]) * W_c x[t])        a real number per token and head, in the place of its position

and RoPE at z: pair k turns by z * base ** (-2k / head_dim). Order enters through x alone: z need not rise. W_g and W_c
have width / 8 rows. The authors use it from some layer on (the sixth of their released model) and RoPE before, which
is a schedule of layers here. The state is z; what is cached beside it are keys that have not turned yet.
"""

import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn

from lengthwise.encodings._rotary import check_even, check_turned, plain_frequencies, turn_both
from lengthwise.encodings.base import (
    AttentionShape,
    Encoding,
    Keys,
    Queries,
    State,
    Tokens,
    checked_state,
    checked_tokens,
    masked_tokens,
    project,
    reset_linear,
)
from lengthwise.errors import check_int, check_number
from lengthwise.token_layout import TokenLayout


class Repo(Encoding):
    """Tokens choose where they stand, in every head anew."""

    paper = "Li et al. 2025, arXiv 2512.14391"
    by_head = ("out.weight",)
    symmetric = True

    def __init__(self, shape: AttentionShape, *, base: float = 10000.0, hidden: int | None = None) -> None:
        super().__init__(shape)
        check_even("repo", shape)
        check_number("base", base, "10000 is usual.")
        hidden = max(1, shape.width // 8) if hidden is None else hidden
        check_int("hidden", hidden, "The paper has an eighth of the width.")
        self.base = base
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.content = nn.Linear(shape.width, hidden, bias=False)
        self.out = nn.Linear(hidden, shape.heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the rest of GPT-2, so that all tokens start near 0."""
        for layer in (self.gate, self.content, self.out):
            reset_linear(layer)

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State:
        """z; 0 for masked tokens."""
        checked_tokens(x, self.shape.width)
        hidden = F.silu(project(self.gate, x)) * project(self.content, x)
        return {"position": masked_tokens(project(self.out, hidden.transpose(1, 2)), key_mask)}

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by their own real positions."""
        check_turned(q, k, layout, self.shape, own_heads=True)
        position = checked_state(state, "position", q.shape[0], self.shape.heads, layout.key_count)
        frequencies = plain_frequencies(self.base, self.shape, position.device)
        return turn_both(q, k, position[..., None] * frequencies.to(position.dtype), layout)
