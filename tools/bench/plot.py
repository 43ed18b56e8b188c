"""The comparison as a picture: speed-up, acceptance by depth, cost curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def save(result: dict[str, Any], path: Path) -> None:
    """Write the picture; the suffix decides the format."""
    figure(result).savefig(path, dpi=150)


def figure(result: dict[str, Any]) -> Figure:
    """Three panels side by side. No pyplot: it would look for a screen, and keep every figure."""
    picture = Figure(figsize=(15, 4.5), layout="constrained")
    bars, depths, costs = picture.subplots(1, 3)
    _speedups(bars, result["contestants"])
    _acceptance(depths, result["contestants"])
    _cost_curves(costs, result["costs"])
    return picture


def _speedups(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [facts["name"] for facts in rows]
    speeds = [facts["speedup_over_first_plain"] for facts in rows]
    # The speed-up is over all tokens, the quartiles over answers, so it may lie outside them.
    below = [max(speed - facts["first_plain_quartiles"][0], 0) for speed, facts in zip(speeds, rows, strict=True)]
    above = [max(facts["first_plain_quartiles"][2] - speed, 0) for speed, facts in zip(speeds, rows, strict=True)]
    axes.barh(names, speeds, xerr=[below, above], capsize=3, color="#4c78a8", ecolor="#333333")
    for place, speed in enumerate(speeds):  # at the foot of the bar, where no whisker is
        axes.text(0, place, f"  {speed:.2f}x", va="center", color="white")
    axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set(xlabel=f"speed against {names[0]}; whiskers: quartiles over answers", title="speed-up")


def _acceptance(axes: Any, rows: list[dict[str, Any]]) -> None:
    for facts in rows:
        if shares := facts.get("acceptance_by_depth"):
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=facts["name"])
    axes.set(
        xlabel="depth d", ylabel="share of rounds with more than d tokens", title="acceptance by depth", ylim=(0, 1)
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes, "no guess was accepted")


def _cost_curves(axes: Any, costs: dict[str, dict[str, Any]]) -> None:
    for name, table in costs.items():
        for past, row in zip(table["pasts"], table["target"], strict=True):
            label = f"{name.removeprefix('plain').strip() or 'target'}, behind {past}"
            axes.plot(table["tokens"], row, marker="o", markersize=3, label=label)
    axes.set(xlabel="tokens in one target call", ylabel="milliseconds", title="cost of a target call")
    axes.set_ylim(bottom=0)
    _legend(axes, "not measured:\nspeccompile tune, or --costs")


def _legend(axes: Any, otherwise: str) -> None:
    if axes.lines:
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, otherwise, ha="center", va="center", transform=axes.transAxes)
