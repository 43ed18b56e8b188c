"""Benchmark prompts: Spec-Bench-format JSONL, or one prompt a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from speccompile.graphs.errors import SpecCompileError

MT_BENCH = Path(__file__).with_name("data") / "mt_bench.jsonl"
# Spec-Bench counts MT-bench's eight subjects as one of its six tasks (hemingkx/Spec-Bench, evaluation/speed.py).
MT_BENCH_SUBJECTS = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True)
class Question:
    """The first user turn of a benchmark's question, and the task it belongs to ("" when the file names none)."""

    text: str
    task: str = ""


def read_questions(path: Path = MT_BENCH) -> list[Question]:
    """All questions of a file.

    Raises:
        SpecCompileError: when the file is missing, or a line is not JSON or has neither `turns` nor `prompt`.
    """
    if not path.is_file():
        raise SpecCompileError(f"{path}: no such prompt file; give a JSONL file with 'turns', or a text file.")
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return [Question(line) for line in lines]
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SpecCompileError(f"{path}: line {number} is not JSON ({error}); give one object a line.") from error
        text = (row.get("turns") or [row.get("prompt")])[0] if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise SpecCompileError(f"{path}: line {number} has neither 'turns' nor 'prompt'.")
        subject = str(row.get("category", ""))
        questions.append(Question(text, "mt_bench" if subject in MT_BENCH_SUBJECTS else subject))
    return questions


def first_turns(path: Path = MT_BENCH, limit: int | None = None) -> list[str]:
    """First user turns, as `read_questions` finds them."""
    return [question.text for question in read_questions(path)[:limit]]


def spread(questions: list[Question], per_task: int) -> list[Question]:
    """`per_task` questions of each task, evenly spaced over what there is of it, in the file's order."""
    chosen: list[Question] = []
    for task in dict.fromkeys(question.task for question in questions):
        of_task = [question for question in questions if question.task == task]
        count = min(per_task, len(of_task))
        chosen += [of_task[index * len(of_task) // count] for index in range(count)]
    return chosen
