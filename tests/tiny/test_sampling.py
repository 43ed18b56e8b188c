"""The target distribution against transformers' own warpers and processors, and one draw from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speccompile.graphs.errors import GenerationError
from speccompile.runtime.sampling import Sampling, distribution, draw, next_token, process

torch.set_num_threads(1)

CONTEXT = [3, 7, 7, 1, 20]


def reference(logits: np.ndarray, context: list[int], sampling: Sampling) -> np.ndarray:
    """What transformers samples from: its processors, in the order of `_get_logits_processor`, in float64."""
    steps = LogitsProcessorList()
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores = steps(torch.tensor([context]), torch.tensor(logits, dtype=torch.float64)[None])
    return scores.softmax(-1)[0].numpy()


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.7, top_k=5),
    Sampling(temperature=0.8, top_k=1),
    Sampling(temperature=0.8, top_k=5000),
    Sampling(temperature=0.9, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.999999),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.2, min_p=0.05),
    Sampling(temperature=0.7, min_p=1.0),
    Sampling(temperature=0.9, top_k=40, top_p=0.8, min_p=0.02),
    Sampling(temperature=0.9, repetition_penalty=1.3),
    Sampling(temperature=0.9, repetition_penalty=0.6, top_p=0.7),
    Sampling(temperature=0.8, logit_bias={3: 2.5, 20: -4.0, 5: 1.0}, repetition_penalty=1.4, top_k=30),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize(("vocabulary", "spread"), [(30, 0.1), (30, 4.0), (3000, 0.1), (3000, 3.0)])
def test_distribution_is_that_of_transformers(sampling: Sampling, vocabulary: int, spread: float) -> None:
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, spread, vocabulary)
        before = logits.copy()
        ours = distribution(logits, CONTEXT, sampling)
        theirs = reference(logits, CONTEXT, sampling)
        np.testing.assert_array_equal(ours > 0, theirs > 0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-15)
        np.testing.assert_array_equal(logits, before)


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    sampling = Sampling(temperature=1.0, top_k=2)
    ours = distribution(logits, [], sampling)
    assert list(np.flatnonzero(ours)) == [1, 2, 3, 4]
    np.testing.assert_allclose(ours, reference(logits, [0], sampling), rtol=1e-12)


def test_top_p_cuts_ties_at_the_edge_as_transformers_counts_them() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.1, 0.1, 0.2, 0.1]))
    sampling = Sampling(temperature=1.0, top_p=0.75)
    ours = distribution(logits, [], sampling)
    assert list(np.flatnonzero(ours)) == [0, 1, 2, 4]  # 0.4 + 0.2 + two of the four tied; the lower ids
    assert np.count_nonzero(reference(logits, [0], sampling)) == 4
    assert np.count_nonzero(distribution(np.zeros(8), [], Sampling(temperature=1.0, top_p=0.5))) == 4


def test_masked_tokens_stay_at_zero_whatever_the_filters() -> None:
    logits = np.array([-np.inf, 1.0, -np.inf, 0.5])
    for sampling in SETTINGS:
        if not sampling.logit_bias:
            assert not distribution(logits, [3], sampling)[[0, 2]].any()
    banned = distribution(np.zeros(4), [], Sampling(temperature=1.0, logit_bias={2: -math.inf}))
    np.testing.assert_allclose(banned, [1 / 3, 1 / 3, 0, 1 / 3])


def test_extreme_temperatures_stay_finite() -> None:
    logits = np.array([5.0, 1000.0, 999.0, -1000.0], np.float32)
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(distribution(logits, [], Sampling(temperature=1e-320)), [0, 1, 0, 0])
        np.testing.assert_allclose(distribution(logits, [], Sampling(temperature=1e9)), [0.25] * 4, rtol=1e-5)


def test_greedy_is_the_processed_argmax() -> None:
    logits = np.array([1.0, 4.0, 3.9, 4.0], np.float32)
    assert next_token(logits, [], Sampling(), lambda: pytest.fail("greedy draws nothing")) == 1
    assert next_token(logits, [1], Sampling(repetition_penalty=1.2), lambda: 0.0) == 3
    assert next_token(logits, [], Sampling(logit_bias={2: 1.0}), lambda: 0.0) == 2
    np.testing.assert_array_equal(distribution(logits, [1], Sampling(repetition_penalty=1.2)), [0, 0, 0, 1])


def test_repetition_penalty_ignores_tokens_the_model_cannot_emit() -> None:
    """The tokenizer may know more ids than the model has rows."""
    logits = np.array([1.0, -1.0, 2.0])
    np.testing.assert_allclose(process(logits, [1, 9, 1], Sampling(repetition_penalty=2.0)), [1.0, -2.0, 2.0])


def test_processor_sees_the_context_and_may_write_in_place() -> None:
    seen = []

    def forbid_repeats(context: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(list(context))
        logits[list(context)] = -np.inf
        return logits

    logits = np.array([0.0, 9.0, 1.0, 2.0])
    assert next_token(logits, [1, 3], Sampling(processor=forbid_repeats), lambda: 0.0) == 2
    assert seen == [[1, 3]]
    assert logits[1] == 9.0


def test_needs_logits_only_when_the_argmax_of_the_graph_is_not_enough() -> None:
    assert not Sampling().needs_logits
    assert not Sampling(top_k=5, top_p=0.5, min_p=0.1).needs_logits
    for sampling in (
        Sampling(temperature=0.1),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias={0: 1.0}),
        Sampling(processor=lambda context, logits: logits),
    ):
        assert sampling.needs_logits


@pytest.mark.parametrize(
    ("logits", "found"),
    [
        ([0.0, math.nan, 1.0], "nan at token 1"),
        ([0.0, 1.0, math.inf], "inf at token 2"),
        ([-math.inf] * 3, "all are -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_refused(logits: list[float], found: str, temperature: float) -> None:
    with pytest.raises(GenerationError, match=rf"logits are not finite \({found}\)"):
        distribution(np.array(logits), [], Sampling(temperature=temperature))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(GenerationError, match=f"sampling: {field} "):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_bias_and_processor_must_fit_the_model() -> None:
    with pytest.raises(GenerationError, match="token 3, but the model has 3 tokens"):
        process(np.zeros(3), [], Sampling(logit_bias={3: 1.0}))
    with pytest.raises(GenerationError, match=r"shape \(2,\).*shape \(3,\)"):
        process(np.zeros(3), [], Sampling(processor=lambda context, logits: logits[:2]))


# ---- draw ----


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    probabilities = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    expected = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, 1 - 2**-53: 4}
    assert {uniform: draw(probabilities, uniform) for uniform in expected} == expected


def test_draw_never_returns_an_impossible_token() -> None:
    """Sums that round below and above 1, subnormal tails, and the largest number below 1."""
    rng = np.random.default_rng(0)
    uniforms = [0.0, 5e-324, 0.5, 1 - 2**-53, *rng.random(20)]
    for _ in range(300):
        probabilities = rng.random(50) * (rng.random(50) < 0.3)
        probabilities[25] = 1e-310
        probabilities *= rng.choice([1.0, 1 - 1e-12, 1 + 1e-12]) / probabilities.sum()
        for uniform in uniforms:
            assert probabilities[draw(probabilities, uniform)] > 0
    assert draw(np.array([5e-324, 0.0]), 1 - 2**-53) == 0  # the product rounds up to the sum


def test_draws_follow_the_distribution() -> None:
    from scipy.stats import chisquare

    probabilities = np.array([0.05, 0.0, 0.5, 0.25, 0.2])
    rng = np.random.default_rng(1)
    counts = np.bincount([draw(probabilities, rng.random()) for _ in range(20_000)], minlength=5)
    assert counts[1] == 0
    possible = probabilities > 0
    assert chisquare(counts[possible], 20_000 * probabilities[possible]).pvalue > 1e-3
