"""The two-sided twin of the causal model, as a model of transformers: every token sees those after it too.

    x = wte[token]                                   encoding.embed(x, layout), once
    x = x + attn(ln_1(x))                            the blocks of modeling.py; attention in the two-sided form
    x = x + mlp(ln_2(x))
    logits = ln_f(x) wte^T                           of the tokens that are masked, for LengthwiseForMaskedLM

Padding costs nothing: the tokens that are not padding go through the layers as one row in which every sequence is a
document. Where the layers themselves are looked at (hidden states, weights), under other attention functions, in
compiled graphs and in training on a device, which would have to wait for the number of tokens, they go padded; both
give the same vectors. At padding the unpadded way gives 0.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from lengthwise.errors import check_choice
from lengthwise.model.attention import NAME
from lengthwise.model.configuration import POOLINGS, LengthwiseEncoderConfig
from lengthwise.model.layout import is_in_one_piece, packed_layout
from lengthwise.model.losses import IGNORED, head_loss, head_weight
from lengthwise.model.modeling import LengthwisePreTrainedModel, LengthwiseTransformer, checked_input
from lengthwise.token_layout import TokenLayout, Window


class LengthwiseEncoder(LengthwiseTransformer):
    """The two-sided transformer without a head."""

    config: LengthwiseEncoderConfig

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(  # type: ignore[misc]
        self,
        input_ids: Int[Tensor, "batch token"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch token"] | None = None,
        inputs_embeds: Float[Tensor, "batch token width"] | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """The tokens after the last layer.

        attention_mask  1 for tokens, 0 for padding, or (batch, heads or 1, token, token) with what each token sees
        position_ids    positions that restart begin a new document, which sees nothing of the others
        """
        tokens = checked_input(input_ids, inputs_embeds)
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        weights = bool(kwargs.get("output_attentions", self.config.output_attentions))
        looked_at = weights or bool(kwargs.get("output_hidden_states", self.config.output_hidden_states))
        if not looked_at and self._can_unpad(tokens, attention_mask, position_ids):
            assert attention_mask is not None
            real = attention_mask.to(device=x.device, dtype=torch.bool)
            layouts: dict[Window | None, TokenLayout] = dict.fromkeys([None, *self.windows], packed_layout(real))
            packed: Tensor = self.run_layers(x[real][None], layouts, {})
            padded = packed.new_zeros(*real.shape, packed.shape[-1])
            restored: Any = padded.masked_scatter(real[..., None], packed)
            return BaseModelOutput(last_hidden_state=restored)
        layouts, masks = self._layouts(tokens, attention_mask, position_ids, None)
        return BaseModelOutput(last_hidden_state=self.run_layers(x, layouts, masks, output_attentions=weights))

    def _can_unpad(self, tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> bool:
        """Whether there is padding that can be left out."""
        if mask is None or position_ids is not None or mask.shape != tokens.shape[:2]:
            return False
        if self.config._attn_implementation != NAME or torch.compiler.is_compiling():
            return False
        if self.training and tokens.device.type != "cpu":
            return False
        real = mask.bool()
        return not bool(real.all()) and is_in_one_piece(real)


class EncoderWithHead(LengthwisePreTrainedModel):
    """The two-sided transformer under a head; a subclass says what its logits and their loss are."""

    config: LengthwiseEncoderConfig
    output_class: ClassVar[type[MaskedLMOutput | SequenceClassifierOutput]]

    def __init__(self, config: LengthwiseEncoderConfig) -> None:
        super().__init__(config)
        self.transformer = LengthwiseEncoder(config)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(  # type: ignore[misc]
        self,
        input_ids: Int[Tensor, "batch token"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch token"] | None = None,
        inputs_embeds: Float[Tensor, "batch token width"] | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput | SequenceClassifierOutput:
        """Logits, and the loss of labels if there are any; masks and positions are LengthwiseEncoder's."""
        options = {"attention_mask": attention_mask, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        out = self.transformer(input_ids, **options, **kwargs)
        logits = self._logits(out.last_hidden_state, attention_mask)
        loss = None if labels is None else self._loss(logits, labels, **kwargs)
        return self.output_class(loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)

    @abstractmethod
    def _logits(self, x: Float[Tensor, "batch token width"], attention_mask: Tensor | None) -> Any:
        """Logits of the tokens after the last layer."""

    @abstractmethod
    def _loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        """The loss of the logits."""


class LengthwiseForMaskedLM(EncoderWithHead):
    """The two-sided transformer with a head that predicts masked tokens from those around them.

    Labels are (batch, token), each predicted in its own place; -100 is left out.
    """

    output_class = MaskedLMOutput
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: LengthwiseEncoderConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def _logits(self, x: Float[Tensor, "batch token width"], attention_mask: Tensor | None) -> Any:
        """Of every token, (batch, token, vocabulary)."""
        return self.lm_head(x)

    def _loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        """The mean over the labels."""
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)

    def loss(
        self,
        input_ids: Int[Tensor, "batch token"],
        labels: Int[Tensor, "batch token"],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch token"] | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """The loss of `forward`, with logits for the labelled tokens alone, which are few.

        reduction is "mean", "sum", or, where no gradient is wanted, "none": (batch, token) losses, 0 where left out.
        """
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels must have the input's shape, {tuple(input_ids.shape)}, got {tuple(labels.shape)}")
        x = self.transformer(input_ids, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
        # How many are labelled is not known in a graph, and a device would have to be waited for.
        if torch.compiler.is_compiling() or not x.is_cpu:
            return head_loss(x, head_weight(self.lm_head), labels, reduction=reduction)
        labels = labels.to(x.device)
        labelled = labels != IGNORED
        losses = head_loss(x[labelled][None], head_weight(self.lm_head), labels[labelled][None], reduction=reduction)
        if reduction != "none":
            return losses
        return losses.new_zeros(labels.shape).masked_scatter(labelled, losses)


class LengthwiseForSequenceClassification(EncoderWithHead):
    """The two-sided transformer with a head that gives a text one of `num_labels` classes, or a number."""

    output_class = SequenceClassifierOutput

    def __init__(self, config: LengthwiseEncoderConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.n_embd, int(config.num_labels or 2))
        self.post_init()

    def _logits(self, x: Float[Tensor, "batch token width"], attention_mask: Tensor | None) -> Any:
        """Of every text, (batch, num_labels), from its pooled tokens."""
        real = None if attention_mask is None or attention_mask.ndim != 2 else attention_mask.to(x.device).bool()
        return self.score(pool_tokens(x, real, self.config.pooling))

    def _loss(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        """Of classes, of several classes at once, or of numbers, as the config has it."""
        scores = {"logits": logits, "pooled_logits": logits}
        return self.loss_function(labels=labels, config=self.config, **scores, **kwargs)


def pool_tokens(
    x: Float[Tensor, "batch token width"], mask: Bool[Tensor, "batch token"] | None, pooling: str = "mean"
) -> Float[Tensor, "batch width"]:
    """One vector a text, of the vectors of its tokens: their mean, or that of the first; padding does not count."""
    check_choice("pooling", pooling, POOLINGS)
    if mask is None:
        return x.mean(1) if pooling == "mean" else x[:, 0]
    if pooling == "mean":
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    first: Any = mask.int().argmax(1)
    return x[torch.arange(x.shape[0], device=x.device), first]
