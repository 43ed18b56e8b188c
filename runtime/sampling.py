"""The target distribution: what temperature, top-k, top-p, penalties, biases and hooks make of logits.

A token is drawn with one uniform number, so that plain and speculative decoding with the same seed consume
the same numbers and emit the same tokens.

Order and meaning follow transformers (`generation/utils.py` `_get_logits_processor`,
`generation/logits_process.py`): logit bias, repetition penalty, hook, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import GenerationError

FloatArray = npt.NDArray[np.floating[Any]]
LogitsProcessor = Callable[[Sequence[int], FloatArray], FloatArray]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 is greedy; top_k, top_p and min_p then change nothing.
        top_k: keep the k best tokens, and all that tie with the k-th; 0 is off.
        top_p: keep the fewest best tokens whose probabilities add up to top_p; 1 is off.
        min_p: keep tokens at least min_p times as probable as the best; 0 is off.
        repetition_penalty: CTRL's rule (arXiv 1909.05858) over prompt and answer; 1 is off.
        logit_bias: added to the logits of these token ids; -inf bans a token.
        processor: called with the token ids so far and the logits [V], which it may change in place; returns
            the logits [V] to use, with -inf for forbidden tokens. It must depend on its arguments alone: a
            speculative round asks about several continuations.

    Raises:
        GenerationError: when a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        # Written so that NaN fails: every comparison with it is false.
        for name, allowed, range_text in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite"),
            ("top_k", self.top_k >= 0 and self.top_k % 1 == 0, "a whole number, at least 0 (0 is off)"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1 (1 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1 (0 is off)"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite (1 is off)"),
        ):
            if not allowed:
                raise GenerationError(f"sampling: {name} is {getattr(self, name)}; it must be {range_text}.")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not bias < math.inf:
                raise GenerationError(
                    f"sampling: logit_bias gives token {token} the bias {bias}; "
                    "token ids start at 0 and a bias is finite or -inf."
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_logits(self) -> bool:
        """False when the graph's own argmax is enough."""
        changes = self.repetition_penalty != 1 or bool(self.logit_bias) or self.processor is not None
        return changes or not self.greedy


def process(logits: FloatArray, context: Sequence[int], sampling: Sampling) -> FloatArray:
    """Everything that comes before temperature, so greedy decoding too: logit bias, repetition penalty, hook.

    Args:
        logits: float [V], not changed.
        context: the token ids before this position: prompt, answer so far, and the drafted path.

    Returns:
        float [V], of the input's precision; the input itself when there is nothing to do.

    Raises:
        GenerationError: when a logit is NaN or +inf or all are -inf, when a bias names a token the model
            lacks, or when the hook returns another shape.
    """
    processed = logits
    if sampling.logit_bias:
        tokens = np.fromiter(sampling.logit_bias, np.int64)
        if tokens.max() >= len(logits):
            raise GenerationError(
                f"sampling: logit_bias names token {tokens.max()}, but the model has {len(logits)} tokens."
            )
        processed = processed.copy()
        processed[tokens] += np.fromiter(sampling.logit_bias.values(), np.float64)
    if sampling.repetition_penalty != 1 and len(context):
        seen = np.asarray(context, np.int64)
        seen = seen[seen < len(logits)]
        scores = processed[seen]
        penalty = sampling.repetition_penalty
        processed = processed.copy()
        processed[seen] = np.where(scores < 0, scores * penalty, scores / penalty)
    if sampling.processor is not None:
        processed = np.asarray(sampling.processor(context, processed.copy()))
        if processed.shape != logits.shape:
            raise GenerationError(
                f"sampling: the processor returned shape {processed.shape}; it must return the logits, "
                f"shape {logits.shape}."
            )
    peak = processed.max()  # NaN if there is one, +inf if there is one, -inf only if all are
    if not np.isfinite(peak):
        found = "all are -inf" if peak == -np.inf else f"{peak} at token {int(processed.argmax())}"
        raise GenerationError(
            f"logits are not finite ({found}): the model overflowed, or logit_bias or processor is wrong; "
            "run `speccompile verify` on the bundle."
        )
    return processed


def distribution(logits: FloatArray, context: Sequence[int], sampling: Sampling) -> npt.NDArray[np.float64]:
    """Probabilities float64 [V] of the next token; all on one token (the first best) when greedy.

    Arguments and errors as in `process`. Cost: no sort of the whole row.
    """
    processed = process(logits, context, sampling)
    weights = processed.astype(np.float64)
    if sampling.greedy:
        weights[:] = 0
        weights[processed.argmax()] = 1
        return weights
    # In place: at a vocabulary's width, the memory of fresh arrays costs more than the arithmetic.
    weights -= weights.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        weights /= sampling.temperature
    np.exp(weights, out=weights)  # the best weighs 1 from here on
    if 0 < sampling.top_k < len(weights):
        rank = len(weights) - sampling.top_k
        weights *= processed >= np.partition(processed, rank)[rank]
    if sampling.top_p < 1:
        _keep_top_p(weights, sampling.top_p)
    if sampling.min_p > 0:
        weights *= weights >= sampling.min_p
    weights *= 1 / weights.sum()
    return weights


def _keep_top_p(weights: npt.NDArray[np.float64], top_p: float) -> None:
    """Zero all but the fewest best of `weights` that make up `top_p` of their sum; lower ids win ties."""
    target = top_p * weights.sum()
    for floor in (1e-3, 1e-6, 0.0):  # the best weighs 1; most rows have few tokens above the first floor
        ordered = np.sort(weights[weights >= floor])[::-1]
        running = np.cumsum(ordered)
        if running[-1] >= target:
            break
    last = min(int(np.searchsorted(running, target)), len(ordered) - 1)
    edge = ordered[last]
    ties_kept = int(np.count_nonzero(ordered[: last + 1] == edge))
    weights *= weights >= edge
    weights[np.flatnonzero(weights == edge)[ties_kept:]] = 0


def draw(probabilities: npt.NDArray[np.float64], uniform: float) -> int:
    """The token at `uniform` (in [0, 1)) of the cumulative distribution; never one of probability zero."""
    cumulative = np.cumsum(probabilities)
    # Scaled by the sum, which rounding leaves near 1. A token of probability zero spans nothing, so it could
    # be found only where the product rounds up to the sum itself.
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return token if token < len(probabilities) else int(np.flatnonzero(probabilities)[-1])


def next_token(logits: FloatArray, context: Sequence[int], sampling: Sampling, uniform: Callable[[], float]) -> int:
    """Choose the token after `context`: the argmax when greedy, else one draw with one call of `uniform`."""
    if sampling.greedy:
        return int(process(logits, context, sampling).argmax())
    return draw(distribution(logits, context, sampling), uniform())
