"""PaTH: position by accumulated Householder-like products (Yang et al. 2025, section 3).

    score[i, j] = scale * k[j]^T (product over j < s <= i of (I - beta[s] w[s] w[s]^T)) q[i]
    w = norm(silu(conv(W_2 W_1 x)))  unit vectors, one per head         beta = 2 sigmoid(W x + b)

W_1 has `rank` rows, the convolution three taps. A query walks back over the keys and every token reflects it, in
blocks of keys: the products of a block are one triangular system. It is a rescore of whole rows in float64: slow, with
the cost of attention itself several times over. A contraction cannot be undone, so no rotation of q and k gives it.

The state is what enters the convolution and beta, head_dim + 1 numbers per token and head; keys are cached as they are,
where the authors rewrite all cached keys at every new token. scale is 1 / sqrt(head_dim), whatever the model's. Causal
only. With a forget gate it is `path+fox`.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn

from lengthwise.bias import has_float64, registered
from lengthwise.encodings._convolution import convolved, reset_convolution
from lengthwise.encodings.base import (
    AttentionShape,
    Encoding,
    State,
    Tokens,
    checked_state,
    checked_tokens,
    masked_tokens,
    project,
    reset_linear,
)
from lengthwise.errors import check_int
from lengthwise.rescore import ScoreFunction
from lengthwise.token_layout import TokenLayout

BLOCK = 64
"""How many keys a query walks over at once."""


class Path(Encoding):
    """Tokens that reflect what looks past them."""

    paper = "Yang et al. 2025, arXiv 2505.16381"
    by_head = ("up.weight", "taps", "to_beta.weight", "to_beta.bias")
    rescores_qk = True
    replaces_content = True
    two_sided = False
    windowed = False
    tables = ("taps",)

    def __init__(self, shape: AttentionShape, *, rank: int = 32) -> None:
        super().__init__(shape)
        check_int("rank", rank, "The authors have 32.")
        self.down = nn.Linear(shape.width, rank, bias=False)
        self.up = nn.Linear(rank, shape.heads * shape.head_dim, bias=False)
        self.taps = nn.Parameter(torch.empty(shape.heads, shape.head_dim, 3))
        self.to_beta = nn.Linear(shape.width, shape.heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the rest of GPT-2, the convolution as torch's own."""
        for layer in (self.down, self.up, self.to_beta):
            reset_linear(layer)
        reset_convolution(self.taps)

    def state(self, x: Tokens, key_mask: Bool[Tensor, "#batch position"] | None = None) -> State:
        """What enters the convolution, and beta; 0 for masked tokens."""
        checked_tokens(x, self.shape.width)
        vector = project(self.up, project(self.down, x).transpose(1, 2)).unflatten(1, (self.shape.heads, -1))
        beta = 2 * project(self.to_beta, x).sigmoid()
        return {"vector": masked_tokens(vector.transpose(2, 3), key_mask), "beta": masked_tokens(beta, key_mask)}

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> ScoreFunction:
        """The product over the tokens between, in the place of q.k."""
        shape, own = self.shape, self.state(x, layout.key_mask) if state is None else state
        vector = checked_state(own, "vector", x.shape[0], shape.heads, layout.key_count, shape.head_dim)
        beta = checked_state(own, "beta", x.shape[0], shape.heads, layout.key_count)
        w = F.silu(convolved(vector, self.taps, layout))
        w = w * (w.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        # A token that is not finite has no finite key either, which is what its queries notice; others must not.
        w, beta = (numbers.where(numbers.isfinite(), 0) for numbers in (w, beta))
        scale = w.new_tensor(shape.head_dim**-0.5)
        return ScoreFunction(path_scores, (layout.query_slots(), w, beta, scale))


@registered
def path_scores(
    content: Tensor,
    bias: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    rows: slice,
    slots: Tensor,
    w: Tensor,
    beta: Tensor,
    scale: Tensor,
) -> Tensor:
    """Scores of keys and rows, from the last key backwards.

    Within a block u[s] = beta[s] w[s] . (q after all tokens behind s), so (I + triu(beta w w^T)) u = beta w q, with 0
    on the right for tokens that come after the query; and q after token s is q - sum of u[t] w[t] over t >= s.
    """
    # The rows may see the first keys alone.
    w, beta = w[:, :, : k.shape[2]], beta[:, :, : k.shape[2]]
    if has_float64(q.device):
        q, k, w, beta = (x.double() for x in (q, k, w, beta))
    keys = torch.arange(k.shape[2], device=k.device)
    scores = []
    for first in reversed(range(0, k.shape[2], BLOCK)):
        own_k, own_w, own_beta = (x[:, :, first : first + BLOCK] for x in (k, w, beta))
        reached = keys[first : first + BLOCK] <= slots[rows, None]
        right = (own_beta[..., None] * (own_w @ q.mT)).where(reached.mT, 0)
        # The diagonal is not read: it is 1.
        system = own_beta[..., None] * (own_w @ own_w.mT)
        u = torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True).mT
        scores.append(q @ own_k.mT - u @ (own_k @ own_w.mT).triu(1).mT)
        q = q - u @ own_w
    return (scale * torch.cat(scores[::-1], -1)).to(content.dtype) + bias if scores else content + bias
