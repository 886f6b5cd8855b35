"""Models with attention of ours in place, as `fit` puts it there: captured where that attention is called."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from torch import Tensor, nn

from lengthwise.attention import checked_call
from lengthwise.encodings import Encoding
from lengthwise.model.families.base import Family, OnRecord, Rotary, Selected, record_of, table_length
from lengthwise.model.families.layer_call import LayerCall, observed
from lengthwise.model.families.modules import attention_modules
from lengthwise.model.families.swap import swap_of
from lengthwise.token_layout import layout

OWN = "own"
"""What `fit` calls the encoding that a model had."""


class SwappedFamily(Family):
    """Any model on transformers' attention interface, fitted."""

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether attention of ours is in place."""
        return swap_of(model) is not None

    @property
    def encoding(self) -> str:
        """As it was fitted; a name per layer where some have what they had."""
        fits = [module._lengthwise_fit for module in self.model.modules() if hasattr(module, "_lengthwise_fit")]
        if not fits:
            return OWN
        label, fitted = str(fits[0].label), fits[0].encodings
        depth = self.depths[""]
        if not fitted or len(fitted) == depth:
            return label
        names = cycle(label.split(","))
        return ",".join(next(names) if number in fitted else OWN for number in range(depth))

    @property
    def depths(self) -> Mapping[str, int]:
        """One part."""
        return {"": len(attention_modules(self.model))}

    @property
    def max_length(self) -> int | None:
        """The least limit of its encodings and of its own table, where that is still read."""
        limits = [part.limit for part in self.model.modules() if isinstance(part, Encoding)]
        replaced = any("forward" in vars(module) for module in self.model.modules() if isinstance(module, nn.Embedding))
        limits.append(None if replaced else table_length(self.model))
        return min((limit for limit in limits if limit is not None), default=None)

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Observe the calls of our attention."""

        def report(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: Any) -> None:
            if not selected(call.number, ""):
                return
            checked = checked_call(q, k, v, layout=call.layout, **options)
            held = getattr(call.module, "lengthwise", None)
            encoding: Encoding | None = None if held is None else held.encoding
            on_record(
                record_of(
                    checked,
                    call.number,
                    out,
                    causal=call.layout.causal,
                    context_free=encoding is None or encoding.context_free,
                    rotary=_rotary(call, encoding),
                )
            )

        with observed(report):
            yield


def _rotary(call: LayerCall, encoding: Encoding | None) -> Rotary | None:
    if encoding is None or not encoding.overrides("rotate") or encoding.turns_by_state:
        return None
    counted = layout(call.x, causal=call.layout.causal)
    return Rotary(lambda: (call.q, call.k), lambda q, k: encoding.rotate(q, k, counted), call.layout.query_mask)
