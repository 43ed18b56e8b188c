"""What is asked: questions of a file under the chat template, long contexts, or random tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speccompile.graphs.errors import SpecCompileError
from speccompile.runtime import Decoder
from speccompile.runtime.text import Text
from speccompile.tools.prompts import Question


def question_prompts(text: Text, questions: Sequence[Question], past: int = 0) -> list[list[int]]:
    """Token ids of every question, as a user's turn where there is a chat template.

    Args:
        past: so many tokens stand in front of each: the questions one after another, the next one first and as often
            as it takes, so that no two prompts have the same beginning.
    """
    chat = text.chat_template is not None
    asked = [text.chat([{"role": "user", "content": q.text}]) if chat else text.encode(q.text) for q in questions]
    if not past:
        return asked
    pieces = [list(text.tokenizer.encode(f"{q.text}\n\n", add_special_tokens=False).ids) for q in questions]
    prompts = []
    for number, ids in enumerate(asked, 1):
        filler = [token for piece in (*pieces[number:], *pieces[:number]) for token in piece]
        times = -(-past // len(filler))
        prompts.append([*(filler * times)[:past], *ids])
    return prompts


def random_prompts(count: int, length: int, vocabulary: int, eos_ids: Sequence[int]) -> list[list[int]]:
    """`count` prompts of `length` token ids, always the same ones, for models that have not learned any language."""
    tokens = np.setdiff1d(np.arange(vocabulary), eos_ids)
    return np.random.default_rng(0).choice(tokens, (count, length)).tolist()


def check_room(prompts: Sequence[Sequence[int]], max_new_tokens: int, decoders: Sequence[Decoder]) -> int:
    """Tokens that the longest prompt and its answer take.

    Raises:
        SpecCompileError: when they do not fit a bundle, which would end its answers early.
    """
    needed = max(map(len, prompts)) + max_new_tokens
    for decoder in decoders:
        if needed > decoder.capacity:
            raise SpecCompileError(
                f"{decoder.bundle.path}: it holds {decoder.capacity} tokens, but the longest prompt and its answer "
                f"take {needed}; ask for shorter ones (--past, --max-new-tokens) or build with a larger --max-length."
            )
    return needed
