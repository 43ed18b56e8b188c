"""Figures of what rounding costs, against sums in float64 over one token at a time."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speccompile.compiler.quality import HELD_OUT, LONGEST, compare, held_out
from tests.tiny.passes import Array, normal

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9]]
VOCAB = 11


def model(seed: int, near: int | None = None, scale: float = 2.0) -> Any:
    """Logits float32 [T,V] for a text; `near` is the seed of a model that this one resembles."""

    def logits(ids: list[int]) -> Array:
        own = normal(len(ids), VOCAB, seed=seed)
        return scale * own if near is None else scale * (normal(len(ids), VOCAB, seed=near) + 0.3 * own)

    return logits


def chances(row: Array) -> list[float]:
    weights = [math.exp(float(logit)) for logit in row]
    return [weight / math.fsum(weights) for weight in weights]


def test_figures_are_those_of_the_definitions() -> None:
    exact, rounded = model(0), model(1, near=0)
    surprise, exact_surprise, divergence, same, places = [], [], [], 0, 0
    for ids in TEXTS:
        for place, following in enumerate(ids[1:]):
            p, q = chances(exact(ids)[place]), chances(rounded(ids)[place])
            surprise.append(-math.log(q[following]))
            exact_surprise.append(-math.log(p[following]))
            divergence.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            same += p.index(max(p)) == q.index(max(q))
            places += 1
    found = compare(exact, rounded, TEXTS)
    assert set(found) == {"perplexity", "exact_perplexity", "top1_agreement", "kl_per_token", "tokens"}
    assert found["tokens"] == places == 12
    assert found["perplexity"] == pytest.approx(math.exp(math.fsum(surprise) / places), rel=1e-9)
    assert found["exact_perplexity"] == pytest.approx(math.exp(math.fsum(exact_surprise) / places), rel=1e-9)
    assert found["kl_per_token"] == pytest.approx(math.fsum(divergence) / places, rel=1e-9)
    assert found["top1_agreement"] == same / places
    assert 0 < same < places  # the data tells the cases apart


def test_the_divergence_is_from_the_exact_model() -> None:
    """KL(p || q) is not KL(q || p): 0.9 log 1.8 + 0.1 log 0.2, and 0.5 log 5/9 + 0.5 log 5."""

    def sure(_ids: list[int]) -> Array:
        return np.log(np.array([[0.9, 0.1]] * 2, np.float32))

    def unsure(_ids: list[int]) -> Array:
        return np.zeros((2, 2), np.float32)

    one, other = compare(sure, unsure, [[0, 1]]), compare(unsure, sure, [[0, 1]])
    assert one["kl_per_token"] == pytest.approx(0.368064, abs=1e-6)
    assert other["kl_per_token"] == pytest.approx(0.510826, abs=1e-6)
    assert (one["perplexity"], one["exact_perplexity"]) == (pytest.approx(2), pytest.approx(10))


def test_a_model_against_itself() -> None:
    found = compare(model(0), model(0), TEXTS)
    assert found["kl_per_token"] == 0 and found["top1_agreement"] == 1
    assert found["perplexity"] == found["exact_perplexity"]


def test_large_logits_and_buffers_that_are_overwritten() -> None:
    """A backend gives views; and exp(1000) is no number."""
    buffer = np.zeros((8, VOCAB), np.float32)

    def view(scale: float, above: float = 0) -> Any:
        def logits(ids: list[int]) -> Array:
            buffer[: len(ids)] = model(0)(ids) * scale + above
            return buffer[: len(ids)]

        return logits

    apart, higher = compare(view(1), view(2), TEXTS), compare(view(1, 2000), view(2, -2000), TEXTS)
    assert apart == pytest.approx(compare(model(0), model(0, scale=4.0), TEXTS), rel=1e-6)
    assert apart["kl_per_token"] > 0.1
    assert higher == pytest.approx(apart, rel=1e-3)


def test_logits_that_are_no_numbers_are_no_good_figure() -> None:
    def broken(ids: list[int]) -> Array:
        return model(0)(ids) * np.float32(np.nan)

    assert not compare(model(0), broken, TEXTS)["kl_per_token"] <= 1e9


def test_held_out_texts() -> None:
    """All of them, cut to what the model can hold; a text of one token has nothing to foretell."""
    lines = [json.loads(line)["text"] for line in HELD_OUT.read_text("utf-8").splitlines()]
    assert len(lines) > 20 and len(set(lines)) == len(lines)
    bytewise: Any = SimpleNamespace(encode=lambda text: list(text.encode()))
    texts = held_out(bytewise, 10_000)
    assert texts == [list(text.encode())[:LONGEST] for text in lines]
    assert [len(ids) for ids in held_out(bytewise, 9)] == [9] * len(lines)
    assert held_out(bytewise, 1) == []
