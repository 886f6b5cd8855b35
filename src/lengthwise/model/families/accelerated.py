"""Accelerated models, whose bias is described and not filled in: captured where our attention is called."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lengthwise.attention import checked_call
from lengthwise.bias import DistanceBias, LevelBias
from lengthwise.model.families.base import Family, HookedFamily, OnRecord, Selected, record_of
from lengthwise.model.families.described import Described
from lengthwise.model.families.interface import part_of
from lengthwise.model.families.layer_call import LayerCall, observed


class AcceleratedFamily(Family):
    """Any model that `lw.accelerate` has changed; what else is known of it is known of its own family."""

    def __init__(self, own: Family) -> None:
        super().__init__(own.model)
        self.own = own

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether classes were swapped."""
        return any(isinstance(module, Described) for module in model.modules())

    @property
    def encoding(self) -> str:
        """As before."""
        return self.own.encoding

    @property
    def depths(self) -> Mapping[str, int]:
        """As before."""
        return self.own.depths

    @property
    def max_length(self) -> int | None:
        """MPT has no end any more."""
        return self.own.max_length

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Observe the calls of our attention."""
        places = self._places()

        def report(call: LayerCall, q: Tensor, k: Tensor, v: Tensor, out: Tensor, options: Any) -> None:
            layer, part = places[id(call.module)]
            if not selected(layer, part):
                return
            checked = checked_call(q, k, v, layout=call.layout, **options)
            by_position = isinstance(checked.bias, DistanceBias | LevelBias | None)
            causal = call.layout.causal
            record = record_of(checked, layer, out, causal=causal, context_free=by_position, rotary=None)
            on_record(replace(record, part=part))

        with observed(report):
            yield

    def _places(self) -> dict[int, tuple[int, str]]:
        """The number and the part of every attention layer."""
        several = self.model.config.is_encoder_decoder
        every = self.own.layers if isinstance(self.own, HookedFamily) else list(self.model.modules())
        own = {id(module) for module in every if isinstance(module, Described)}
        places: dict[int, tuple[int, str]] = {}
        count: Counter[str] = Counter()
        for name, module in self.model.named_modules():
            if id(module) in own:
                part = part_of(name, several=several)
                places[id(module)] = count[part], part
                count[part] += 1
        return places
