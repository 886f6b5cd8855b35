"""How much of attention's work a model leaves out: keys that its bias makes provably irrelevant."""

from torch import Tensor, nn

from lengthwise.attention import skipped_share
from lengthwise.inspect.capture import run_captured
from lengthwise.model.families.base import AttentionRecord


def skipped_shares(model: nn.Module, ids: Tensor) -> list[float]:
    """By layer, 0 to 1, as the model reads this text; nothing of layers whose attention is not ours."""
    shares: list[float] = []

    def add(record: AttentionRecord) -> None:
        if record.call is not None:
            shares.append(skipped_share(record.call))

    run_captured(model, {"input_ids": ids}, add)
    return shares
