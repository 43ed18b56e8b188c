"""The comparison as tables for a person."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from speccompile.runtime.stats import STAGES

STEPS = [stage for stage in STAGES if stage != "prefill"]


def show(result: dict[str, Any], out: Console | None = None) -> None:
    """Print what `compete` found, with the `settings` and `costs` that the command added."""
    out = out or Console()
    rows = result["contestants"]
    several = len({facts["plain"] for facts in rows}) > 1
    out.print(_speeds(rows, several))
    settings = result["settings"]
    drawn = settings["temperature"] > 0
    how = f"drawn at temperature {settings['temperature']:g}" if drawn else "greedy"
    behind = f", behind {settings['past']} other tokens" if settings["past"] else ""
    out.print(
        f"{result['prompts']} prompts, {settings['repeats']} times each, the median time counts; {how}, at most "
        f"{settings['max_new_tokens']} tokens{behind}. In brackets the quartiles over prompts and repeats.",
        style="dim",
    )
    out.print(_rounds(rows))
    out.print(
        "Decoding is what follows the prefill. * mean tokens a round, bonus included: plain decoding has 1. Drafted: "
        "guesses a round. Outside: share of the time that is spent outside the backend.",
        style="dim",
    )
    out.print(_stages(rows))
    if result["tasks"]:
        out.print(_tasks(result["tasks"]))
    for facts in rows:
        if facts.get("plain_rounds"):
            out.print(
                f"{facts['name']}: drafting lost, so {facts['plain_rounds']} of {facts['rounds']} rounds did not draft "
                f"(stepped back {facts['stepped_back']} times)"
            )
        if (expected := facts.get("expected")) is not None:
            speed = f", {expected['speedup']:.2f}x" if "speedup" in expected else ""
            out.print(f"{facts['name']}: theory expects {expected['mean_accepted_tokens']:.2f} tokens a round{speed}")
    for name, costs in result["costs"].items():
        table = Table(f"{name}: ms of a call, tokens", *map(str, costs["tokens"]), box=SIMPLE_HEAD)
        for past, row in zip(costs["pasts"], costs["target"], strict=True):
            table.add_row(f"behind {past}", *(f"{value:.1f}" for value in row))
        out.print(table)
    if drawn:
        out.print("drawn answers differ by chance where guesses are drawn too, so words are not compared")
    for row in result["identity"]:
        plain, name = row["names"]
        again = f"{name} = {plain}" if name != plain else f"{name}, again and again"
        out.print(
            f"{again}: {row['equal']} answers equal, {row['ties']} part at a tie (gap < {row['tie_gap']:g}), "
            f"{len(row['different'])} differ {row['different'] or ''}"
        )
    for row in result["compared"]:
        parting = ""
        if row["parted"]:
            parting = f", {row['parted']} part, at token {row['mean_token_of_parting']:.0f} on average"
        out.print(f"{row['names'][1]} beside {row['names'][0]}: {row['equal']} answers equal{parting} (not judged)")


def _speeds(rows: list[dict[str, Any]], several: bool) -> Table:
    own = ["its plain"] if several else []
    table = _table(rows, "", "tokens/s", "ms/token", f"against {rows[0]['name']}", *own)
    for facts in rows:
        low, _, high = facts["first_plain_quartiles"]
        speed = f"{facts['speedup_over_first_plain']:.2f}x ({low:.2f} .. {high:.2f})"
        own = [_times(facts["speedup_over_plain"])] if several else []
        pace = f"{facts['tokens_per_second']:.1f}", f"{facts['ms_per_token']:.1f}"
        table.add_row(facts["name"], *pace, speed, *own)
    return table


def _rounds(rows: list[dict[str, Any]]) -> Table:
    table = _table(rows, "decoding", "speed-up", "accepted*", "drafted", "outside", "prefill, s")
    for facts in rows:
        if "rounds" in facts:
            table.add_row(
                facts["name"],
                _times(facts["decode_speedup_over_plain"]),
                f"{facts['mean_accepted_tokens']:.2f}",
                f"{facts['drafted_per_round']:.1f}",
                f"{100 * facts['outside_backend']:.1f} %",
                f"{facts['prefill_seconds']:.2f}",
            )
    return table


def _stages(rows: list[dict[str, Any]]) -> Table:
    table = _table(rows, "milliseconds a round", *STEPS)
    for facts in rows:
        if "rounds" in facts:
            table.add_row(facts["name"], *(f"{facts['ms_per_round'][stage]:.2f}" for stage in STEPS))
    return table


def _tasks(tasks: dict[str, list[dict[str, Any]]]) -> Table:
    """One row a task; plain decoding, which is what the others are measured by, is left out."""
    names = [facts["name"] for facts in next(iter(tasks.values())) if facts["name"] != facts["plain"]]
    table = Table("against plain (accepted*)", *names, box=SIMPLE_HEAD)
    for task, row in tasks.items():
        of = {facts["name"]: facts for facts in row}
        table.add_row(task, *(_task_cell(of[name]) for name in names))
    return table


def _table(rows: list[dict[str, Any]], first: str, *columns: str) -> Table:
    """A row per contestant, whose name is not cut short."""
    longest = max(len(facts["name"]) for facts in rows)
    others = [Column(column, no_wrap=True) for column in columns]
    name = Column(first, min_width=min(longest, 30))
    return Table(name, *others, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _task_cell(facts: dict[str, Any]) -> str:
    accepted = f" ({facts['mean_accepted_tokens']:.2f})" if "rounds" in facts else ""
    return f"{_times(facts['speedup_over_plain'])}{accepted}"


def _times(speed: float | None) -> str:
    return "" if speed is None else f"{speed:.2f}x"
