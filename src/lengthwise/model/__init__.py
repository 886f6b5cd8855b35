"""GPT-2 and its two-sided twin with any positional encoding, models of transformers: its Auto classes know them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from lengthwise.model.configuration import ENCODER_PRESETS, PRESETS, LengthwiseConfig, LengthwiseEncoderConfig
from lengthwise.model.conversion import convert_gpt2
from lengthwise.model.encoder import LengthwiseEncoder, LengthwiseForMaskedLM, LengthwiseForSequenceClassification
from lengthwise.model.modeling import LengthwiseForCausalLM, LengthwiseModel

__all__ = [
    "ENCODER_PRESETS",
    "PRESETS",
    "LengthwiseConfig",
    "LengthwiseEncoder",
    "LengthwiseEncoderConfig",
    "LengthwiseForCausalLM",
    "LengthwiseForMaskedLM",
    "LengthwiseForSequenceClassification",
    "LengthwiseModel",
    "convert_gpt2",
]

AutoConfig.register(LengthwiseConfig.model_type, LengthwiseConfig)
AutoModel.register(LengthwiseConfig, LengthwiseModel)
AutoModelForCausalLM.register(LengthwiseConfig, LengthwiseForCausalLM)

AutoConfig.register(LengthwiseEncoderConfig.model_type, LengthwiseEncoderConfig)
AutoModel.register(LengthwiseEncoderConfig, LengthwiseEncoder)
AutoModelForMaskedLM.register(LengthwiseEncoderConfig, LengthwiseForMaskedLM)
AutoModelForSequenceClassification.register(LengthwiseEncoderConfig, LengthwiseForSequenceClassification)
