"""GPT-2 with any positional encoding, a model of transformers: AutoConfig and AutoModelForCausalLM know it."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lengthwise.model.configuration import PRESETS, LengthwiseConfig
from lengthwise.model.conversion import convert_gpt2
from lengthwise.model.modeling import LengthwiseForCausalLM, LengthwiseModel

__all__ = ["PRESETS", "LengthwiseConfig", "LengthwiseForCausalLM", "LengthwiseModel", "convert_gpt2"]

AutoConfig.register(LengthwiseConfig.model_type, LengthwiseConfig)
AutoModel.register(LengthwiseConfig, LengthwiseModel)
AutoModelForCausalLM.register(LengthwiseConfig, LengthwiseForCausalLM)
