"""Tiny random models of every family, and what each itself computes: scores and weights out of its own code."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

VOCABULARY, LENGTH = 97, 23

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 8, "d_ff": 64, "num_heads": 6}
T5 |= {"num_layers": 2, "num_decoder_layers": 2}

DEBERTA = {
    "intermediate_size": 64,
    "relative_attention": True,
    "position_buckets": 8,
    "max_position_embeddings": 64,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
XLNET = {"vocab_size": VOCABULARY, "d_model": 48, "n_layer": 2, "n_head": 6, "d_inner": 64}

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=6, n_positions=64)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**SMALL, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=48)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=7)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**LLAMA, head_dim=8, pad_token_id=0)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**LLAMA, head_dim=8, pad_token_id=0, attn_logit_softcapping=3.0, sliding_window=9)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**LLAMA, head_dim=8, num_local_experts=4, pad_token_id=0)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**LLAMA | {"num_key_value_heads": 6}, partial_rotary_factor=0.5)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLAMA, pad_token_id=0)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**SMALL, intermediate_size=64, max_position_embeddings=64, rotary_pct=0.25)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6)),
    "mpt": lambda: hf.MptForCausalLM(
        hf.MptConfig(vocab_size=VOCABULARY, d_model=48, n_layers=2, n_heads=6, max_seq_len=64)
    ),
    "falcon-alibi": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**SMALL, alibi=True, multi_query=False, new_decoder_architecture=False)
    ),
    "falcon-rope": lambda: hf.FalconForCausalLM(hf.FalconConfig(**SMALL, alibi=False, multi_query=True)),
    "falcon-new": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**SMALL, alibi=False, new_decoder_architecture=True, num_kv_heads=3)
    ),
    "gptj": lambda: hf.GPTJForCausalLM(
        hf.GPTJConfig(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=6, n_positions=64, rotary_dim=4)
    ),
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            num_layers=2,
            num_heads=6,
            attention_types=[[["global", "local"], 1]],
            window_size=7,
            max_position_embeddings=64,
        )
    ),
    "mpnet": lambda: hf.MPNetForMaskedLM(hf.MPNetConfig(**SMALL, intermediate_size=64, max_position_embeddings=66)),
    "deberta-v2": lambda: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**SMALL, **DEBERTA)),
    "deberta-v2-absolute": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**SMALL, **DEBERTA | {"relative_attention": False, "position_biased_input": True})
    ),
    "deberta-v2-c2p": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**SMALL, **DEBERTA | {"pos_att_type": ["c2p"], "share_att_key": False})
    ),
    "deberta-v2-p2c": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**SMALL, **DEBERTA | {"pos_att_type": ["p2c"], "share_att_key": False})
    ),
    "xlnet": lambda: hf.XLNetModel(hf.XLNetConfig(**XLNET)),
    "xlnet-uni": lambda: hf.XLNetModel(hf.XLNetConfig(**XLNET, attn_type="uni", clamp_len=9)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**T5)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**T5)),
    "longt5": lambda: hf.LongT5ForConditionalGeneration(hf.LongT5Config(**T5)),
    "switch": lambda: hf.SwitchTransformersForConditionalGeneration(
        hf.SwitchTransformersConfig(**T5, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
    ),
}
ADDITIVE = ["bloom", "mpt", "falcon-alibi", "mpnet", "t5", "mt5", "umt5", "longt5", "switch"]
CONTEXTUAL = ["deberta-v2", "deberta-v2-c2p", "deberta-v2-p2c", "xlnet", "xlnet-uni"]
OWN_ATTENTION = ("bloom", "mpt", "falcon", "gptj", "gpt_neo", "mpnet", "deberta", "xlnet")
CHOOSABLE = [family for family in MODELS if not family.startswith(OWN_ATTENTION)]
ENCODER_DECODER = ["t5", "mt5", "umt5", "longt5", "switch"]


def make_model(family: str, attention: str | None = None) -> hf.PreTrainedModel:
    """A small model with weights loud enough that scores matter, under an attention of its own choice or by name."""
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    if attention is not None:
        model.set_attn_implementation(attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # XLNet has projections of three axes, and its three biases begin at 0.
            matrix = parameter.ndim >= 2 and "embed" not in name and "norm" not in name
            if matrix or "rel_embeddings" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def ids(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Own:
    """What one call of a model's own attention had before and after its softmax."""

    scores: Tensor
    weights: Tensor


def own_attention(model: hf.PreTrainedModel, input_ids: Tensor, **inputs: Tensor) -> list[Own]:
    """Every call of attention in order, caught inside torch: no code of ours is in the way."""
    seen: list[Own] = []
    softmax, fused, method = F.softmax, F.scaled_dot_product_attention, Tensor.softmax

    def caught(scores: Tensor, *args: object, **kwargs: object) -> Tensor:
        weights = softmax(scores, *args, **kwargs)
        if scores.ndim == 4:
            seen.append(Own(scores, weights))
        return weights

    def caught_fused(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        scale = kwargs.get("scale") or q.shape[-1] ** -0.5
        scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
        if kwargs.get("is_causal"):
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            added = attn_mask.dtype != torch.bool
            scores = scores + attn_mask if added else scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        attn_mask = None if kwargs.get("is_causal") else attn_mask
        seen.append(Own(scores, method(scores, -1)))
        return fused(q, k, v, attn_mask, **kwargs)

    with (
        torch.no_grad(),
        patch.object(F, "softmax", caught),
        patch.object(F, "scaled_dot_product_attention", caught_fused),
    ):
        options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
        model(input_ids, **options, **inputs)
    return seen
