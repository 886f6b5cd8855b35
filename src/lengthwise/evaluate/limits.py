"""How far a model can go at all: a learned table has an end, which torch would only tell by an IndexError."""

from torch import nn
from transformers import PreTrainedModel

from lengthwise.encodings import Encoding, PositionError
from lengthwise.model import LengthwiseForCausalLM


def limit_of(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model has positions for, or None if there is no end."""
    if isinstance(model, LengthwiseForCausalLM):
        limits = [part.limit for part in model.modules() if isinstance(part, Encoding)]
        return min((limit for limit in limits if limit is not None), default=None)
    config = model.config.get_text_config()
    if config.model_type == "mpt":
        return int(config.max_seq_len)
    most = getattr(config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding) and part is not words]
    # OPT's table has two rows more than positions.
    return most if most is not None and any(0 <= t.num_embeddings - most <= 2 for t in tables) else None


def check_length(model: PreTrainedModel, length: int) -> None:
    """An error if the model's table ends before `length`."""
    limit = limit_of(model)
    if limit is not None and length > limit:
        raise PositionError(
            f"this model's table of positions ends at {limit:,}; length {length:,} came. Leave out that length."
        )
