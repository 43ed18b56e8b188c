"""The probes decide by numbers whether a model's own code is what an operator computes."""

from __future__ import annotations

import pytest
import torch

from speccompile.graphs.single_ops import probe_rms_norm


class ToyRMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + epsilon) * weight, in one of several readings of that line."""

    def __init__(self, reading: str, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(16, generator=torch.Generator().manual_seed(0)))
        self.eps, self.reading = eps, reading

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        readings = {
            "plain": lambda: x * torch.rsqrt(square + self.eps) * self.weight,
            "one more": lambda: x * torch.rsqrt(square + self.eps) * (1 + self.weight),
            "outside": lambda: x / (square.sqrt() + self.eps) * self.weight,
            "forgotten": lambda: x * torch.rsqrt(square) * self.weight,
            "ten times": lambda: x * torch.rsqrt(square + 10 * self.eps) * self.weight,
            "centred": lambda: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(square + self.eps) * self.weight,
        }
        return readings[self.reading]()


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("reading", ["plain", "one more"])
def test_rms_norms_are_recognised(reading: str, eps: float) -> None:
    module = ToyRMSNorm(reading, eps)
    found = probe_rms_norm(module)
    assert found is not None
    scale, epsilon = found
    torch.testing.assert_close(scale, module.weight + (reading == "one more"))
    assert epsilon == eps


@pytest.mark.parametrize("reading", ["outside", "forgotten", "ten times", "centred"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norms_of_another_formula_are_not(reading: str, eps: float) -> None:
    """Where epsilon stands shows only on small activations, which real models have in their first layers."""
    assert probe_rms_norm(ToyRMSNorm(reading, eps)) is None
