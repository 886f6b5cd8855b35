"""Cross entropy of a language model's head without its logits.

    loss = mean over tokens of -log softmax(x W^T)[label]

Logits of 32,768 tokens and 50,304 words are 6.6 GB, and their gradient as much again. Here a chunk of tokens goes
through the head at a time, and its gradients are taken at once, since they need the same logits:

    d x = (softmax - onehot) W            d W = (softmax - onehot)^T x

so backward has nothing to compute any more but a product with the gradient of the loss.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

CHUNK = 512
"""Tokens at a time: 103 MB of float32 logits with GPT-2's vocabulary."""

IGNORED = -100
"""The label of a token that does not count, as everywhere in torch."""


def head_loss(
    x: Float[Tensor, "batch position width"],
    weight: Float[Tensor, "word width"],
    labels: Int[Tensor, "batch position"],
    *,
    reduction: str = "mean",
) -> Float[Tensor, ""] | Float[Tensor, "batch position"]:
    """The loss of predicting labels from x through a head without a bias; float32."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if labels.shape != x.shape[:2]:
        raise ValueError(
            f"labels must have the shape of the input; they are {labels.shape[1] + 1} tokens long and it is "
            f"{x.shape[1] + 1}, in batches of {labels.shape[0]} and {x.shape[0]}. Give one label per token."
        )
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    flat, wanted = x.flatten(0, 1), labels.flatten().to(x.device)
    if reduction == "none":
        if learns:
            raise ValueError("losses of single tokens have no gradient here; one was wanted. Use torch.no_grad().")
        return _losses(flat, weight, wanted).view(labels.shape)
    count = (wanted != IGNORED).sum() if reduction == "mean" else torch.ones((), device=x.device)
    if not learns:
        return _losses(flat, weight, wanted).sum() / count
    total: Tensor = _HeadLoss.apply(flat, weight, wanted, 1 / count.float())
    return total


def head_weight(head: nn.Module) -> Tensor:
    """The matrix of a model's head, which is all of it; an error where the head was wrapped, as PEFT does."""
    if not isinstance(head, nn.Linear):
        raise NotImplementedError(
            f"model.loss works through the weight of a plain head, got a {type(head).__name__}; use "
            "model(ids, labels=labels).loss"
        )
    return head.weight


def _losses(x: Tensor, weight: Tensor, labels: Tensor) -> Float[Tensor, " token"]:
    parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
    found = [F.cross_entropy(F.linear(a, weight).float(), b, ignore_index=IGNORED, reduction="none") for a, b in parts]
    return torch.cat(found) if found else x.new_zeros(0, dtype=torch.float32)


class _HeadLoss(torch.autograd.Function):
    """factor * sum of losses, with the gradients of x and weight taken on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, factor: Tensor) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        d_x = torch.empty_like(x) if wants_x else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for first in range(0, x.shape[0], CHUNK):
            rows = slice(first, first + CHUNK)
            counts = labels[rows] != IGNORED
            words = labels[rows].where(counts, 0)[:, None]
            logits = F.linear(x[rows], weight).float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            losses = (normaliser - logits.gather(-1, words)).squeeze(-1)
            total += losses.where(counts, 0).sum()
            # From here on the logits' own storage holds their gradient.
            logits.sub_(normaliser).exp_()
            logits.scatter_add_(-1, words, -torch.ones_like(words, dtype=logits.dtype))
            gradient = logits.to(weight.dtype)
            scale = torch.where(counts, factor, 0)[:, None]
            if d_x is not None:
                d_x[rows] = (gradient @ weight) * scale
            if d_weight is not None:
                d_weight.addmm_(gradient.T.to(d_weight.dtype), (x[rows] * scale).to(d_weight.dtype))
        ctx.save_for_backward(*(t for t in (d_x, d_weight) if t is not None))
        ctx.dtype = weight.dtype
        return total * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        # Gradients are recorded here only for a second derivative, in which d_x and d_weight would count as constants.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "model.loss has no second derivative, got create_graph=True. Use model(ids, labels=labels).loss, which "
                "keeps the logits."
            )
        saved = list(ctx.saved_tensors)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        d_x = saved.pop(0) * gradient if wants_x else None
        d_weight = (saved.pop(0) * gradient).to(ctx.dtype) if wants_weight else None
        return d_x, d_weight, None, None
