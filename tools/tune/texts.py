"""Calibration text: prompts, none of them a benchmark's, and what the model itself answers to them greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speccompile.graphs.errors import SpecCompileError
from speccompile.runtime import Decoder, Stats
from speccompile.tools.prompts import read_questions
from speccompile.tools.tune.costs import Report

PROMPTS_FILE = Path(__file__).with_name("prompts.txt")
"""Eight kinds of requests, four of each in a row: two to tune on, and two to measure on, every other one."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its greedy answer.

    Args:
        prompt, answer: token ids.
        limit: most tokens that the answer could have had; near it less is drafted.
        stats: of plain decoding.
    """

    prompt: list[int]
    answer: list[int]
    limit: int
    stats: Stats


def read_prompts(decoder: Decoder, file: Path | None, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of at most `count` prompts to tune on, and of as many to measure on: they take turns in the file.

    Args:
        file: prompts of one's own, as `tools.prompts` reads them; None takes ours.

    Raises:
        SpecCompileError: when there are fewer than two, or the file cannot be read.
    """
    file = file or PROMPTS_FILE
    texts = [question.text for question in read_questions(file)]
    chat = decoder.text.chat_template is not None
    prompts = [decoder.text.chat([{"role": "user", "content": t}]) if chat else decoder.text.encode(t) for t in texts]
    # A cache of a hundred tokens has no room for a long prompt, but its end is a prompt too.
    prompts = [ids[-(decoder.capacity // 2) :] for ids in prompts if ids]
    if len(prompts) < 2 or count < 1:
        raise SpecCompileError(
            f"{file}: it has {len(prompts)} prompts and {count} are to tune on, which leaves none to tune or to "
            "measure on; give two prompts or more, and --prompts of 1 or more."
        )
    return prompts[::2][:count], prompts[1::2][:count]


def answer(decoder: Decoder, prompts: Sequence[list[int]], max_new_tokens: int, report: Report) -> list[Sample]:
    """Plain greedy answers, those of a single token left out: they have no round.

    Raises:
        SpecCompileError: when nothing is left.
    """
    samples = []
    for number, ids in enumerate(prompts, 1):
        report(f"answering prompt {number} of {len(prompts)}")
        done = decoder.generate(ids, max_new_tokens=max_new_tokens, speculate=False, sequence=decoder.new_sequence())
        if len(done.token_ids) > 1:
            samples.append(Sample(ids, done.token_ids, max_new_tokens, done.stats))
    if not samples:
        raise SpecCompileError(
            f"{decoder.bundle.path}: none of {len(prompts)} prompts has an answer of two tokens or more; give other "
            "ones (--text), and --max-new-tokens of 2 or more."
        )
    return samples
