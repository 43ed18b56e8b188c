"""What rounding a target's weights costs, on held-out text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.runtime.backends.step import Target
from speccompile.runtime.text import Text

HELD_OUT = Path(__file__).with_name("held_out.jsonl")
LONGEST = 256  # tokens of each text that are looked at


def held_out(text: Text, limit: int) -> list[list[int]]:
    """Token ids of the texts that ship with the compiler (GSM8K and HumanEval, see NOTICE.md), at most `limit` each."""
    lines = HELD_OUT.read_text("utf-8").splitlines()
    return [ids for line in lines if len(ids := text.encode(json.loads(line)["text"])[: min(LONGEST, limit)]) > 1]


Logits = Callable[[list[int]], npt.NDArray[np.float32]]
"""Of a text, its logits [T,V]."""


def logits_of(target: Target) -> Logits:
    """What a graph says."""

    def run(ids: list[int]) -> npt.NDArray[np.float32]:
        count = np.arange(len(ids))
        return target.open(len(ids)).run(np.array(ids), count, np.tri(len(ids), dtype=np.bool_), count).logits[0]

    return run


def compare(exact: Logits, rounded: Logits, texts: list[list[int]]) -> dict[str, Any]:
    """Hold a rounded model against the exact one.

    Returns:
        perplexity and exact_perplexity, exp of the mean negative log-likelihood of each next token; top1_agreement,
        the share of places where both think the same token likeliest; kl_per_token, the mean of KL(exact || rounded) in
        nats; tokens, how many places these are means of.
    """
    losses, exact_losses, agree, divergence = 0.0, 0.0, 0, 0.0
    count = 0
    for ids in texts:
        ours, theirs = (_log_probabilities(logits(ids)[:-1]) for logits in (rounded, exact))
        places, following = np.arange(len(ids) - 1), ids[1:]
        losses -= float(ours[places, following].sum())
        exact_losses -= float(theirs[places, following].sum())
        agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        count += len(places)
    return {
        "perplexity": float(np.exp(losses / count)),
        "exact_perplexity": float(np.exp(exact_losses / count)),
        "top1_agreement": agree / count,
        "kl_per_token": divergence / count,
        "tokens": count,
    }


def _log_probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide
