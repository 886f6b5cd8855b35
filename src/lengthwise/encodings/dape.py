"""DAPE: data-adaptive positional encoding (Zheng et al. 2024, equation 3), over any additive encoding.

    scores = A + B + f([A; B])         A the content, B the bias, f along the heads at each query and key

f is Linear(2 heads, 32) - LeakyReLU - Linear(32, heads).
"""

from lengthwise.encodings._head_network import ScoreNetwork


class Dape(ScoreNetwork):
    """A network that sees one query and key at a time, across the heads."""

    paper = "Zheng et al. 2024, arXiv 2405.14722"
    kernel = (1, 1)
