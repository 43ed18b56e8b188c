"""Training in steps that are a share of each tensor's size, and can be interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from speccompile.tools.training import checkpoint as checkpoints
from speccompile.tools.training.checkpoint import product_dtype

GRADIENT_CLIP = 1.0
SMALLEST_SIZE = 1e-3

L = TypeVar("L")


def relative_size(weight: torch.Tensor) -> float:
    """Root of the mean square, with Adafactor's floor."""
    return max(float(weight.detach().float().square().mean().sqrt()), SMALLEST_SIZE)


class RelativeSteps(Generic[L]):
    """Weights, optimiser and progress: what a checkpoint holds.

    Norms and matrices differ in size by a factor of 50 (SmolLM2). A step is a share of a tensor's own size, as in
    Adafactor (arXiv 1804.04235), or the final norm would never come down to what an unsure draft needs.

    Args:
        trained: by name, the weights to train; they are on `device`.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], device: str) -> None:
        self.trained, self.device, self.dtype = dict(trained), torch.device(device), product_dtype(device)
        groups = [{"params": [weight], "size": relative_size(weight)} for weight in self.trained.values()]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.losses: list[L] = []  # one per step

    @property
    def step(self) -> int:
        return len(self.losses)

    def measure_sizes(self) -> None:
        """The weights were set by other means than a step: take their sizes anew."""
        for group in self.optimizer.param_groups:
            group["size"] = relative_size(group["params"][0])

    def begin(self, rate: float) -> None:
        """Before the gradients of a step, in which each tensor moves by about `rate` of its size."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["size"]
        self.optimizer.zero_grad()

    def finish(self, loss: L) -> L:
        """The gradients are there: take the step, and remember its loss."""
        torch.nn.utils.clip_grad_norm_(self.trained.values(), GRADIENT_CLIP)
        self.optimizer.step()
        self.losses.append(loss)
        return loss

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def save(self, file: Path, made_of: dict[str, Any]) -> None:
        """Write the checkpoint."""
        weights = {name: weight.detach() for name, weight in self.trained.items()}
        state = {"weights": weights, "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        checkpoints.save(file, state, made_of)

    def resume(self, file: Path, made_of: dict[str, Any]) -> None:
        """Go on from the checkpoint, if there is one. Errors as in `checkpoint.resume`."""
        if (state := checkpoints.resume(file, made_of)) is None:
            return
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]
