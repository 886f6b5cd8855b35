"""DAPE v2: attention scores as a feature map (Zheng et al. 2024b, equation 4), over any additive encoding.

    scores = A + B + f([A; B])         f sees each key's two neighbours in its row

f is Conv2d(2 heads, 32, (1, 3)) - LeakyReLU - Conv2d(32, heads, (1, 3)). What the mask forbids is 0 before either
layer. The authors zero only the first one's input, so that theirs sees one column past the diagonal, which a cached
decoder does not have, and would differ from itself there.
"""

from lengthwise.encodings._head_network import ScoreNetwork


class DapeV2(ScoreNetwork):
    """DAPE whose network also sees the keys next to each key."""

    paper = "Zheng et al. 2024, arXiv 2410.04798"
    kernel = (1, 3)
