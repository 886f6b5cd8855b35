"""GPT-2 (Radford et al. 2019) with any positional encoding, as a model of transformers.

    x = wte[token]                                   encoding.embed(x, layout), once
    x = x + attn(ln_1(x))                            the other hooks, in every layer, each with its own encoding
    x = x + mlp(ln_2(x))
    logits = ln_f(x) wte^T

Weights have GPT-2's names, so its checkpoints load; `learned` is `transformer.wpe`.
"""

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from lengthwise.bias import Bias, DenseBias
from lengthwise.encodings import Encoding
from lengthwise.encodings.registry import build, find
from lengthwise.model.attention import NAME, eager_attention
from lengthwise.model.cache import cached_layout, cached_length, fit_windows
from lengthwise.model.checkpoint_checks import checked_checkpoint, checked_loading
from lengthwise.model.configuration import LengthwiseConfig
from lengthwise.model.encoded import encoded_attention, key_copies
from lengthwise.model.layout import added_by, make_layout, with_mask
from lengthwise.model.losses import head_loss, head_weight
from lengthwise.model.schedule import LayerSpec, parse_layer
from lengthwise.token_layout import Slot, TokenLayout, Window

logger = logging.get_logger(__name__)

UNSUPPORTED = ("flash", "paged", "lengthwise_")
"""Attention functions that take no bias, and those by which `lengthwise.inspect` captures others."""


def make_encoding(config: LengthwiseConfig, spec: LayerSpec) -> Encoding:
    """A new encoding; one that is not double is float32 whatever the model's dtype."""
    encoding = build(spec.encoding, config.shape, spec.options)
    return encoding if torch.get_default_dtype() == torch.float64 else encoding.float()


def key_copies_of(config: LengthwiseConfig, spec: LayerSpec) -> int:
    """How many copies of a key a layer's encoding needs; see `key_copies`."""
    kv_heads = config.n_kv_head or config.n_head
    if kv_heads == config.n_head:
        return 1
    # Apart from the model: its weights may be on no device yet, and its random numbers stay as they were.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        return key_copies(make_encoding(config, spec), kv_heads=kv_heads)


def windows_of(config: LengthwiseConfig) -> list[Window | None]:
    """The window of every layer.

    Read again from plain values: transformers loads the config of an exported model apart from its code, with a copy of
    every class.
    """
    return [parse_layer(spec.stored()).window for spec in config.schedule]


class Projection(Conv1D):
    """GPT-2's linear layer, whose bias may be left out."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool = True) -> None:
        super().__init__(outputs, inputs)
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, x: Float[Tensor, "batch query inner"]) -> Float[Tensor, "batch query outer"]:
        """x W + b."""
        return x @ self.weight if self.bias is None else super().forward(x)


class ResidualConv1D(Projection):
    """A projection whose output is added to the tokens: it starts smaller, the more of them there are."""


def make_norm(config: LengthwiseConfig) -> nn.Module:
    """The norm of queries or of keys, head by head."""
    eps = config.layer_norm_epsilon
    if config.qk_norm == "layer":
        return nn.LayerNorm(config.head_dim, eps=eps)
    return nn.RMSNorm(config.head_dim, eps=eps, elementwise_affine=config.qk_norm == "rms")


class LengthwiseAttention(nn.Module):
    """Self-attention, causal or two-sided as the config is, with the encoding's hooks around it."""

    def __init__(self, config: LengthwiseConfig, layer_idx: int) -> None:
        super().__init__()
        spec = config.schedule[layer_idx]
        dim, heads, kv_heads = config.shape.head_dim, config.n_head, config.n_kv_head or config.n_head
        self.config, self.layer_idx, self.window = config, layer_idx, windows_of(config)[layer_idx]
        self.scaling = dim**-0.5 if config.scale is None else float(config.scale)
        self.is_causal = config.causal
        self.heads, self.key_copies = (heads, kv_heads, kv_heads), key_copies_of(config, spec)
        self.num_key_value_groups = heads // kv_heads // self.key_copies
        self.c_attn = Projection(sum(self.heads) * dim, config.n_embd, bias=config.qkv_bias)
        self.c_proj = ResidualConv1D(config.n_embd, heads * dim, bias=config.out_bias)
        rotates = find(spec.encoding).overrides("rotate")
        self.norm_place = (
            config.qk_norm_place if config.qk_norm and (config.qk_norm_place == "before" or rotates) else None
        )
        if self.norm_place is not None:
            self.q_norm, self.k_norm = make_norm(config), make_norm(config)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        if not config.share_encoding:
            self.encoding = make_encoding(config, spec)

    def project(self, x: Float[Tensor, "batch query width"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, head, query, dim), before they are turned."""
        every = self.c_attn(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        q, k, v = every.split(self.heads, 1)
        return (*(self.norm(q, k) if self.norm_place == "before" else (q, k)), v)

    def turn(self, encoding: Encoding, q: Tensor, k: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Queries and keys as they meet."""
        q, k = encoding.rotate(q, k, layout)
        return self.norm(q, k) if self.norm_place == "after" else (q, k)

    def norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, each head normed."""
        return self.q_norm(q), self.k_norm(k)

    def forward(
        self,
        x: Float[Tensor, "batch query width"],
        layout: TokenLayout,
        *,
        encoding: Encoding | None = None,
        bias: Bias | None = None,
        added: Bias | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What attention adds to the tokens, and its weights if they were asked for."""
        q, k, v = self.project(x)
        implementation = self.config._attn_implementation
        # By finding this call in the file transformers knows that the implementation can be chosen.
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        out, weights = encoded_attention(
            encoding or self.encoding,
            x,
            q,
            k,
            v,
            module=self,
            attention=attention,
            implementation=implementation,
            layout=layout,
            new_tokens=layout.new_tokens,
            cache=past_key_values,
            layer=self.layer_idx,
            window=self.window,
            scale=self.scaling,
            softcap=self.config.softcap,
            bias=bias,
            added=added,
            norm=self.norm if self.norm_place == "after" else None,
            spread=self.key_copies,
            **kwargs,
        )
        out = self.c_proj(out.to(x.dtype).flatten(2))
        return self.resid_dropout(out), weights


class LengthwiseMLP(nn.Module):
    """Two layers with GELU in its tanh form between."""

    def __init__(self, config: LengthwiseConfig) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = ResidualConv1D(config.n_embd, inner)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Float[Tensor, "batch query width"]) -> Float[Tensor, "batch query width"]:
        """What it adds to the tokens."""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class LengthwiseBlock(GradientCheckpointingLayer):
    """One layer."""

    def __init__(self, config: LengthwiseConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = LengthwiseAttention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = LengthwiseMLP(config)

    def forward(self, x: Float[Tensor, "batch query width"], layout: TokenLayout, **kwargs: Any) -> Tensor:
        """The tokens after this layer."""
        x = x + self.attn(self.ln_1(x), layout, **kwargs)[0]
        return x + self.mlp(self.ln_2(x))


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW of what a model learns: matrices decay, but for what its encodings spare; the rest does not."""
    spared = {id(p) for part in model.modules() if isinstance(part, Encoding) for p in part.no_weight_decay()}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim >= 2 and id(parameter) not in spared].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


class LengthwisePreTrainedModel(PreTrainedModel):
    """What transformers asks of every model."""

    config: LengthwiseConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LengthwiseBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LengthwiseBlock, "attentions": LengthwiseAttention}

    def __init__(self, config: LengthwiseConfig, *args: Any, **kwargs: Any) -> None:
        config.check()
        self._supports_sdpa = self._supports_flex_attn = config.stock_attention is None
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """As in transformers; what an encoding learns stays in float32, under the name that it has here."""
        parts = {part for name in self.state_dict() for part in name.split(".")}
        self._keep_in_fp32_modules_strict = parts & {"encoding", "wpe"}
        super().post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in transformers, but a checkpoint that does not fit, or is a pickle, is refused and the reason given.

        Who asks for the loading info gets it in place of a refusal.
        """
        name = pretrained_model_name_or_path
        checked_checkpoint(name, kwargs, cls.config_class or LengthwiseConfig)
        loaded: Any = super().from_pretrained(name, *model_args, output_loading_info=True, **kwargs)
        if "key_mapping" in kwargs:
            # Else it would be saved under the old names, with the new config.
            loaded[0]._weight_conversions = None
        if output_loading_info:
            return loaded
        if name is not None:
            checked_loading(name, loaded[1])
        return loaded[0]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Ours if none is asked for; a refusal by name of those that take no bias, or would drop a rescore."""
        if attn_implementation in (None, NAME):
            return NAME
        names = ALL_ATTENTION_FUNCTIONS.valid_keys()
        known = ["eager", *(name for name in names if not any(word in name for word in UNSUPPORTED))]
        if attn_implementation not in known:
            why = "it takes no bias" if "flash" in attn_implementation else f"known are {', '.join(map(repr, known))}"
            raise ValueError(f'Specified `attn_implementation="{attn_implementation}"` is not supported: {why}.')
        if self.config.stock_attention is not None and attn_implementation != "eager":
            raise ValueError(
                f'Specified `attn_implementation="{attn_implementation}"` is not supported by a model with '
                f"{self.config.stock_attention}, here {self.config.label!r}: expected {NAME!r} or 'eager'."
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, 0.02), residual projections by 1/sqrt(2 layers) less; encodings as they say themselves."""
        std = self.config.initializer_range
        if isinstance(module, Encoding):
            if not any(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
                module.reset_parameters()
            return
        super()._init_weights(module)
        if isinstance(module, Conv1D):
            # Asked of each module itself: of code outside it transformers passes over modules without own parameters.
            residual = isinstance(module, ResidualConv1D)
            init.normal_(module.weight, std=std / math.sqrt(2 * self.config.n_layer) if residual else std)
            if module.bias is not None:
                init.zeros_(module.bias)

    def parameter_groups(self, weight_decay: float = 0.1) -> list[dict[str, Any]]:
        """Groups for AdamW: matrices decay; biases, norms and what an encoding says must not do not."""
        return weight_decay_groups(self, weight_decay)

    def block_matrices(self) -> dict[nn.Parameter, list[int] | None]:
        """The matrices of the blocks, without encodings; with its widths one that holds several side by side."""
        matrices: dict[nn.Parameter, list[int] | None] = {}
        for block in (module for module in self.modules() if isinstance(module, LengthwiseBlock)):
            own = {p for part in block.modules() if isinstance(part, Encoding) for p in part.parameters()}
            widths = [heads * (block.attn.config.head_dim or 0) for heads in block.attn.heads]
            for parameter in block.parameters():
                if parameter.ndim == 2 and parameter not in own:
                    matrices[parameter] = widths if parameter is block.attn.c_attn.weight else None
        return matrices


class LengthwiseTransformer(LengthwisePreTrainedModel):
    """What the causal model and the encoder share: everything but how tokens are given to it."""

    def __init__(self, config: LengthwiseConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.embedding is not None:
            self.wpe = make_encoding(config, config.embedding)
        if config.share_encoding:
            self.encoding = make_encoding(config, config.schedule[0])
        self.drop = nn.Dropout(config.embd_pdrop)
        self.windows = windows_of(config)
        self.reaches = [spec.reach for spec in config.schedule]
        self.h = nn.ModuleList([LengthwiseBlock(config, layer) for layer in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def run_layers(
        self,
        x: Float[Tensor, "batch query width"],
        layouts: dict[Window | None, TokenLayout],
        masks: dict[Window | None, DenseBias],
        *,
        cache: Cache | None = None,
        output_attentions: bool = False,
    ) -> Any:
        """Tokens (batch, query, width) as they enter, through all layers and the last norm; layouts from `_layouts`."""
        x = self.drop(self.wpe.embed(x, layouts[None]) if hasattr(self, "wpe") else x)
        shared = self.encoding if self.config.share_encoding else None
        biases: dict[Window | None, Bias | None] = {}
        # A checkpointed layer makes its own, or no gradient would flow through it.
        if shared is not None and shared.context_free and not self.is_checkpointing:
            biases = {window: shared.bias(x, layout) for window, layout in layouts.items()}
        for block, window in zip(self.h, self.windows, strict=True):
            x = block(
                x,
                layouts[window],
                encoding=shared,
                bias=biases.get(window),
                added=masks.get(window),
                past_key_values=cache,
                output_attentions=output_attentions,
            )
        return self.ln_f(x)

    @property
    def is_checkpointing(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return self.gradient_checkpointing and self.training

    def _layouts(
        self, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> tuple[dict[Window | None, TokenLayout], dict[Window | None, DenseBias]]:
        """Where the tokens stand, by the window of layers, and what an explicit mask of numbers adds to their scores.

        Under None all tokens; layers whose cache holds the nearest keys alone have a part of them.
        """
        explicit = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(
                f"past_key_values must be a Cache of transformers, e.g. DynamicCache(), got a {type(cache).__name__}"
            )
        past: Slot = 0
        capacity: int | None = None
        if cache is not None:
            fit_windows(cache, self.reaches)
            past, capacity = cached_length(cache, self.reaches)
        layout = make_layout(
            tokens,
            attention_mask=attention_mask if explicit is None else None,
            position_ids=position_ids,
            past=past,
            capacity=capacity,
            cached=cache is not None,
            causal=self.config.causal,
        )
        if explicit is not None:
            layout = with_mask(layout, explicit, tokens.shape[0], self.config.n_head, capacity)
        layouts: dict[Window | None, TokenLayout] = {None: layout}
        for number, window in enumerate(self.windows):
            if window not in layouts:
                layouts[window] = layout if cache is None else cached_layout(cache, number, layout, window)
        added = None if explicit is None else added_by(explicit, layout)
        if added is None:
            return layouts, {}
        return layouts, {
            window: DenseBias(added.value[..., own.key_start : own.key_start + own.key_count])
            for window, own in layouts.items()
        }


class LengthwiseModel(LengthwiseTransformer):
    """The causal transformer without its head."""

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(  # type: ignore[misc]
        self,
        input_ids: Int[Tensor, "batch query"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch query"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch query width"] | None = None,
        use_cache: bool | None = None,
        layout: TokenLayout | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """The tokens after the last layer, and the cache if there is one.

        `layout` is in the place of a mask, positions and a cache: for tokens that are a part of a sequence that several
        processes share (`lengthwise.distributed`).
        """
        tokens = checked_input(input_ids, inputs_embeds)
        if use_cache is None:
            wanted = past_key_values is not None or not self.training
            use_cache = self.config.use_cache and wanted and layout is None
        if use_cache and self.is_checkpointing:
            logger.warning_once("a cache is of no use under gradient checkpointing and is left out")
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        masks: dict[Window | None, DenseBias] = {}
        if layout is None:
            layouts, masks = self._layouts(tokens, attention_mask, position_ids, past_key_values)
        elif attention_mask is not None or position_ids is not None or past_key_values is not None:
            raise ValueError(
                "a layout must be without attention_mask, position_ids and past_key_values, got one of them"
            )
        else:
            layouts = dict.fromkeys((None, *self.windows), layout)
        weights = kwargs.get("output_attentions", self.config.output_attentions)
        x = self.run_layers(
            self.wte(input_ids) if inputs_embeds is None else inputs_embeds,
            layouts,
            masks,
            cache=past_key_values,
            output_attentions=bool(weights),
        )
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values if use_cache else None)


class LengthwiseForCausalLM(LengthwisePreTrainedModel, GenerationMixin):
    """The transformer with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: LengthwiseConfig) -> None:
        super().__init__(config)
        self.transformer = LengthwiseModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(  # type: ignore[misc]
        self,
        input_ids: Int[Tensor, "batch query"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch query"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch query width"] | None = None,
        labels: Int[Tensor, "batch query"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss of predicting each label from the tokens before it, as in transformers."""
        out = self.transformer(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def loss(
        self,
        input_ids: Int[Tensor, "batch query"],
        labels: Int[Tensor, "batch query"],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch query"] | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """The loss of `forward`, worked through the head chunk by chunk: no logits are kept, at any length.

        Label i is predicted from the tokens before i; -100 is left out. reduction is "mean", "sum", or, where no
        gradient is wanted, "none": (batch, query - 1) losses, 0 where left out.
        """
        x = self.transformer(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        return head_loss(x.last_hidden_state[:, :-1], head_weight(self.lm_head), labels[:, 1:], reduction=reduction)

    @staticmethod
    def create_masks_for_generate(*, attention_mask: Tensor | None, past_key_values: Cache, **kwargs: Any) -> Any:
        """The padding mask itself, as long as the static cache, so that its shape does not change while decoding."""
        if attention_mask is None or attention_mask.ndim == 4:
            return attention_mask
        capacity = cached_length(past_key_values)[1]
        return attention_mask if capacity is None else F.pad(attention_mask, (0, capacity - attention_mask.shape[1]))


def checked_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The one of the two that was given, or an error."""
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"expected either input_ids or inputs_embeds, got {got}")
    tokens, axes = (
        (input_ids, "(batch, tokens)") if inputs_embeds is None else (inputs_embeds, "(batch, tokens, width)")
    )
    assert tokens is not None
    if tokens.ndim != len(axes.split(",")) or 0 in tokens.shape:
        raise ValueError(
            f"the input must be {axes}, with a token at least; its shape is {tuple(tokens.shape)}. Pad it."
        )
    return tokens
