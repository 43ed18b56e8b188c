"""Benchmark prompts: Spec-Bench-format JSONL, or one prompt a line."""

from __future__ import annotations

import json
from pathlib import Path

from speccompile.graphs.errors import SpecCompileError

MT_BENCH = Path(__file__).with_name("data") / "mt_bench.jsonl"


def first_turns(path: Path = MT_BENCH, limit: int | None = None) -> list[str]:
    """First user turn of every question.

    Raises:
        SpecCompileError: when the file is missing or a line has neither `turns` nor `prompt`.
    """
    if not path.is_file():
        raise SpecCompileError(f"{path}: no such prompt file; give a JSONL file with 'turns', or a text file.")
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()][:limit]
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        row = json.loads(line)
        text = (row.get("turns") or [row.get("prompt")])[0]
        if not isinstance(text, str):
            raise SpecCompileError(f"{path}: line {number} has neither 'turns' nor 'prompt'.")
        prompts.append(text)
    return prompts
