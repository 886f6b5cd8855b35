"""The optimizers of a run: AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest.

All follow one schedule, each group by its own highest rate: an encoding's parameters have one of their own, since a
table of biases must travel much further than a weight of a matrix.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from transformers import PreTrainedModel

from lengthwise.model.modeling import LengthwisePreTrainedModel, weight_decay_groups
from lengthwise.train.config import ResolvedTrainConfig
from lengthwise.train.distributed import encoding_parameters, split_by_sharding

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""What each optimizer remembers of a parameter, beside the step."""


FUSED = ("cuda",)
"""Devices on which AdamW is one kernel for all parameters; on a CPU it would round otherwise than it always did."""


class StackedMuon(Muon):
    """torch's Muon; a weight that holds several matrices side by side is stepped as these, not as one wide matrix.

    Their widths are the group's `widths`, or None for a weight that is one matrix.
    """

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        has_complex = super()._init_group(group, params_with_grad, grads, muon_momentum_bufs)
        if group["widths"] is not None:
            for tensors in (params_with_grad, grads, muon_momentum_bufs):
                # Views: Muon steps in place.
                tensors[:] = [part for tensor in tensors for part in tensor.split(group["widths"], dim=1)]
        return has_complex


class Optimizers:
    """All optimizers of a run as one."""

    def __init__(self, config: ResolvedTrainConfig, model: PreTrainedModel) -> None:
        self.learning_rate = config.learning_rate
        stacked: dict[nn.Parameter, list[int] | None] = {}
        if config.optimizer == "muon" and isinstance(model, LengthwisePreTrainedModel):
            stacked = model.block_matrices()
        if config.optimizer == "muon" and not stacked:
            raise ValueError("the optimizer muon needs matrices in the model's blocks, got none; use adamw")
        own = set(encoding_parameters(model))
        adamw: list[dict[str, Any]] = []
        muon: list[dict[str, Any]] = []
        for group in weight_decay_groups(model, config.weight_decay):
            decay = group["weight_decay"]
            for rate, of_encoding in ((config.learning_rate, False), (config.encoding_learning_rate, True)):
                rest = [p for p in group["params"] if p not in stacked and (p in own) == of_encoding]
                for parameters in split_by_sharding(rest):
                    adamw.append({"params": parameters, "weight_decay": decay, "lr": rate, "highest": rate})
            for parameter in group["params"]:
                if parameter in stacked:
                    rate, widths = config.learning_rate, stacked[parameter]
                    muon.append(
                        {"params": [parameter], "weight_decay": decay, "lr": rate, "highest": rate, "widths": widths}
                    )
        self.fused = all(parameter.device.type in FUSED for parameter in model.parameters())
        self.by_name: dict[str, torch.optim.Optimizer] = {
            "adamw": AdamW(adamw, betas=(config.beta1, config.beta2), eps=1e-8, fused=self.fused or None)
        }
        if muon:
            self.by_name["muon"] = StackedMuon(muon, adjust_lr_fn="match_rms_adamw")

    def step(self, rate: float) -> None:
        """One step at a rate of the schedule, and no gradients after it."""
        for optimizer in self.by_name.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * (group["highest"] / self.learning_rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def start_moments(self, step: int) -> None:
        """Moments of zero for every parameter, as they are after a step, for a checkpoint to be read into."""
        for name, optimizer in self.by_name.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS[name]}
                    device = parameter.device if self.fused else None
                    optimizer.state[parameter] = moments | (
                        {"step": torch.tensor(float(step), device=device)} if name == "adamw" else {}
                    )

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments of a parameter by name; none before the first step."""
        return {
            moment: optimizer.state[parameter][moment]
            for name, optimizer in self.by_name.items()
            if parameter in optimizer.state
            for moment in MOMENTS[name]
        }
