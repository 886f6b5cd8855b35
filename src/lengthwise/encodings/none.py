"""No positional encoding (NoPE): nothing but the causal mask tells tokens apart (Kazemnejad et al. 2023)."""

from lengthwise.encodings.base import Encoding


class NoPosition(Encoding):
    """Changes nothing; under causality a model can still count, because early tokens see fewer keys."""

    paper = "Kazemnejad et al. 2023, arXiv 2305.19466"
    by_head = ()
    symmetric = True
