"""T5 and its relatives: a learned bias by bucket of the distance, one table for a stack, in UMT5 one a layer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from lengthwise.bias import Bias
from lengthwise.model.cache import make_room
from lengthwise.model.families.described import BY_LAYER, Described, by_distance, shared
from lengthwise.model.families.interface import InterfaceFamily
from lengthwise.model.families.layer_call import Placed


class DescribedT5(Described):
    """T5's attention whose bias is described; across two sequences it has none."""

    table: Any
    """The layer that has the table of this one; None where there is no bias."""

    @property
    def has_relative_attention_bias(self) -> bool:
        """Else zeros would be filled in."""
        return True

    @has_relative_attention_bias.setter
    def has_relative_attention_bias(self, value: bool) -> None:
        self.__dict__["has_relative_attention_bias"] = value

    def compute_bias(self, *args: Any, **kwargs: Any) -> object:
        """Described where the tokens of a pass are known."""
        return BY_LAYER

    def described_bias(self, placed: Placed) -> Bias | None:
        """By distance in slots: T5 counts padding."""
        if self.table is None:
            return None
        return shared(placed, self.table, lambda: self.table.bias_by_distance(placed))

    def bias_by_distance(self, placed: Placed) -> Bias:
        """From this layer's own table."""
        layer: Any = self
        own: dict[str, Any] = {} if isinstance(self, UMT5Attention) else self._bucket_options()
        return by_distance(
            lambda distance: layer._relative_position_bucket(distance, **own),
            layer.relative_attention_bias.weight,
            layer.relative_attention_max_distance,
            placed,
        )

    def _bucket_options(self) -> dict[str, Any]:
        layer: Any = self
        return {
            "bidirectional": not layer.is_decoder,
            "num_buckets": layer.relative_attention_num_buckets,
            "max_distance": layer.relative_attention_max_distance,
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As it was, without the bias of the layer before: its gradient would not survive checkpointing."""
        if "position_bias" in kwargs:
            kwargs["position_bias"] = None
        cache = kwargs.get("past_key_values")
        if cache is not None:
            layer: Any = self
            make_room(getattr(cache, "self_attention_cache", cache), layer.layer_idx)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class DescribedT5Attention(DescribedT5, T5Attention):
    """T5's."""


class DescribedMT5Attention(DescribedT5, MT5Attention):
    """mT5's."""


class DescribedUMT5Attention(DescribedT5, UMT5Attention):
    """UMT5's."""


class T5Family(InterfaceFamily):
    """T5, mT5 and UMT5."""

    described: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {
        T5Attention: DescribedT5Attention,
        MT5Attention: DescribedMT5Attention,
        UMT5Attention: DescribedUMT5Attention,
    }

    def prepare(self, modules: list[Any]) -> None:
        """Tell every layer which one has its table: itself, or the first of its stack."""
        first: dict[int, Any] = {}
        for module in modules:
            if "relative_attention_bias" in module._modules:
                module.__dict__["table"] = first[id(module.config)] = module
            else:
                module.__dict__["table"] = first.get(id(module.config)) if self._sees_itself(module) else None

    def _sees_itself(self, module: nn.Module) -> bool:
        name = next(name for name, own in self.model.named_modules() if own is module)
        return not name.endswith("EncDecAttention")
