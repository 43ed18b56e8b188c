"""Acceptance rules: hand-made trees, and exactness over whole sequences of a toy target.

The toy target is a table p(next | prefix) over 5 tokens and 3 positions. Its sequence probabilities are
enumerated, so nothing here is compared with our own sampling alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from speccompile.graphs.tree import TokenTree
from speccompile.runtime.acceptance import (
    Accepted,
    accept_drawn,
    accept_greedy,
    accept_sampled,
    accept_typical,
    walk,
)
from speccompile.runtime.sampling import Sampling, distribution, draw, next_token
from tests.tiny.chances import outcomes

torch.set_num_threads(1)  # rows of a few numbers

#           0 root
#     1 (A)      2 (B)
#   3 (C) 4 (D)  5 (C)
#   6 (E)
TREE = TokenTree(parents=(-1, 0, 0, 1, 1, 2, 3), ranks=(0, 0, 1, 0, 1, 0, 0))
A, B, C, D, E, OTHER = 11, 12, 13, 14, 15, 99
TOKENS = np.array([10, A, B, C, D, C, E], np.int64)


# ---- greedy ----


@pytest.mark.parametrize(
    ("next_ids", "nodes", "bonus"),
    [
        ([OTHER, C, C, E, 0, 0, 0], (0,), OTHER),  # nothing accepted, though everything below would match
        ([A, C, 0, E, 0, 0, 77], (0, 1, 3, 6), 77),  # down to the leaf
        ([A, D, 0, 0, 44, 0, 0], (0, 1, 4), 44),  # the second child
        ([B, 0, C, 0, 0, 55, 0], (0, 2, 5), 55),
        ([B, 0, D, 0, 0, 0, 0], (0, 2), D),  # D is a child elsewhere only
        ([10, 0, 0, 0, 0, 0, 0], (0,), 10),  # the root's own token is no child
    ],
)
def test_greedy_walks_to_the_child_that_holds_the_argmax(
    next_ids: list[int], nodes: tuple[int, ...], bonus: int
) -> None:
    assert accept_greedy(TREE, TOKENS, np.array(next_ids, np.int64)) == Accepted(nodes, bonus)


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    assert accept_greedy(TokenTree.chain(0), np.array([5]), np.array([8])) == Accepted((0,), 8)


def test_token_zero_matches_only_where_it_was_drafted() -> None:
    """Pitfall 4: Medusa pads paths with token 0, which then matches a target that really says 0."""
    tree = TokenTree.from_paths([[0], [1], [1, 0]])
    tokens = np.array([9, 4, 0, 7])
    assert accept_greedy(tree, tokens, np.array([4, 0, 0, 0])) == Accepted((0, 1), 0)
    assert accept_greedy(tree, tokens, np.array([0, 0, 7, 3])) == Accepted((0, 2, 3), 3)


def test_greedy_agrees_with_the_longest_row_of_medusa() -> None:
    """Against the rows form of `evaluate_posterior` (most leading matches), in torch, on a named tree."""
    tree = TokenTree.named("mc_sim_7b_63")
    rows = torch.tensor(tree.retrieve_rows)
    rng = np.random.default_rng(0)
    lengths = Counter[int]()
    for _ in range(200):
        # Siblings hold different tokens, as top-k drafts do.
        tokens = np.array([0, *(tree.ranks[node] for node in range(1, len(tree)))], np.int64)
        next_ids = rng.choice(4, len(tree), p=[0.6, 0.2, 0.1, 0.1])
        candidates = torch.where(rows >= 0, torch.tensor(tokens)[rows], -1)
        matches = candidates[:, 1:] == torch.tensor(next_ids)[rows][:, :-1]
        run = matches.int().cumprod(1).sum(1)
        best = rows[run.argmax()][: int(run.max()) + 1].tolist()
        accepted = accept_greedy(tree, tokens, next_ids)
        assert accepted == Accepted(tuple(best), int(next_ids[best[-1]]))
        lengths[len(best)] += 1
    assert len(lengths) > 3


# ---- sampling: a toy target and drafts that are functions of the prefix ----

VOCABULARY, LENGTH, PROMPT = 5, 3, 0
Prefix = tuple[int, ...]
LOGITS = {
    prefix: np.random.default_rng([7, *prefix]).normal(0, 1.2, VOCABULARY)
    for length in range(LENGTH)
    for prefix in itertools.product(range(VOCABULARY), repeat=length)
}
SETTINGS = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.3, top_k=3),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "all": Sampling(temperature=0.9, top_k=4, top_p=0.9),
}


def enumerated(sampling: Sampling) -> dict[Prefix, float]:
    """Probability of every sequence of 3 tokens under transformers' warpers."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    table = {
        prefix: steps(torch.empty(1, 0), torch.tensor(logits)[None]).softmax(-1)[0].numpy()
        for prefix, logits in LOGITS.items()
    }
    return {
        sequence: float(np.prod([table[sequence[:i]][token] for i, token in enumerate(sequence)]))
        for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH)
    }


@cache
def draft(prefix: Prefix) -> tuple[TokenTree, npt.NDArray[np.int64]]:
    """A tree and its tokens, fixed by the prefix: several shapes; likely, unlikely and duplicated guesses."""
    if len(prefix) >= LENGTH - 1:
        return TokenTree.chain(0), np.array([PROMPT])
    rng = np.random.default_rng([3, *prefix])
    tree = [
        TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]]),
        TokenTree.chain(2),
        TokenTree.from_paths([[0], [1], [2], [3], [1, 0], [1, 1]]),
    ][rng.integers(3)]
    tree = tree.prune(max_depth=LENGTH - 1 - len(prefix))
    best = np.argsort(LOGITS[prefix])[::-1]
    tokens = rng.choice(best[:4], len(tree))  # from the better ones; siblings may hold the same token
    return tree, tokens.astype(np.int64)


def speculate(
    rule: Callable[..., Accepted],
    probabilities_of: Callable[[Prefix], npt.NDArray[np.float64]],
    uniform: Callable[[], float],
) -> tuple[Prefix, int]:
    """The decoding loop, for sequences of 3 tokens; returns them and the number of rounds."""
    emitted: Prefix = ()
    rounds = 0
    while len(emitted) < LENGTH:
        tree, tokens = draft(emitted)
        prefix = emitted

        def distribution_at(node: int, path: Sequence[int], prefix: Prefix = prefix) -> npt.NDArray[np.float64]:
            return probabilities_of((*prefix, *path))

        accepted = rule(tree, tokens, distribution_at, uniform)
        emitted += (*(int(tokens[node]) for node in accepted.nodes[1:]), accepted.bonus)
        rounds += 1
    return emitted, rounds


def processed(sampling: Sampling) -> Callable[[Prefix], npt.NDArray[np.float64]]:
    return cache(lambda prefix: distribution(LOGITS[prefix], prefix, sampling))


def p_value(sequences: Counter[Prefix], sampling: Sampling) -> float:
    """Chi-square of whole sequences; those expected less than 5 times go into one class."""
    expected = {sequence: p * sequences.total() for sequence, p in enumerated(sampling).items()}
    assert all(expected[sequence] > 0 for sequence in sequences)
    common = [sequence for sequence in expected if expected[sequence] >= 5]
    observed_counts = [sequences[sequence] for sequence in common]
    expected_counts = [expected[sequence] for sequence in common]
    rest = sequences.total() - sum(expected_counts)
    if rest > 1e-6:
        observed_counts.append(sequences.total() - sum(observed_counts))
        expected_counts.append(rest)
    return float(chisquare(observed_counts, expected_counts).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_sequences_have_the_probabilities_of_the_target(name: str) -> None:
    probabilities_of = processed(SETTINGS[name])
    rng = np.random.default_rng(20)
    runs = [speculate(accept_sampled, probabilities_of, rng.random) for _ in range(15_000)]
    assert np.mean([rounds for _, rounds in runs]) < 2.6  # of 3: drafts do get accepted
    assert p_value(Counter(sequence for sequence, _ in runs), SETTINGS[name]) > 1e-3


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_sequences_are_exact_without_chance(name: str) -> None:
    """Each sequence owns a box of uniform numbers whose volume is its probability; its middle emits it."""
    sampling = SETTINGS[name]
    probabilities_of = processed(sampling)
    for sequence, expected in enumerated(sampling).items():
        if expected == 0:
            continue
        middles, volume = [], 1.0
        for i, token in enumerate(sequence):
            upper = np.cumsum(probabilities_of(sequence[:i]))[token]
            width = probabilities_of(sequence[:i])[token]
            middles.append(float(upper - width / 2))
            volume *= float(width)
        assert speculate(accept_sampled, probabilities_of, iter(middles).__next__)[0] == sequence
        assert volume == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_numbers_emit_the_same_tokens_as_plain_sampling(name: str) -> None:
    """One draw per emitted token, in order, so a seed means the same text with and without drafts."""
    probabilities_of = processed(SETTINGS[name])
    for seed in range(1000):
        plain: Prefix = ()
        plain_rng, rng = np.random.default_rng(seed), np.random.default_rng(seed)
        while len(plain) < LENGTH:
            plain += (draw(probabilities_of(plain), plain_rng.random()),)
        assert speculate(accept_sampled, probabilities_of, rng.random)[0] == plain
        assert rng.random() == plain_rng.random()


def accept_top_k_drafts_as_if_sampled(
    tree: TokenTree,
    tokens: npt.NDArray[np.int64],
    distribution_at: Callable[..., npt.NDArray[np.float64]],
    uniform: Callable[[], float],
) -> Accepted:
    """Wrong on purpose: a chosen, not drawn, draft verified with its probability q (SafeAILab/EAGLE #110)."""
    node, nodes, path = 0, [0], list[int]()
    while True:
        p = distribution_at(node, path)
        for child in tree.children[node]:
            token = int(tokens[child])
            q = np.full(VOCABULARY, 0.1)
            q[token] = 0.6
            if uniform() < min(1.0, p[token] / q[token]):
                break
            p = np.maximum(p - q, 0)
            if not p.any():
                p = distribution_at(node, path)
            p = p / p.sum()
        else:
            return Accepted(tuple(nodes), draw(p, uniform()))
        node, path = child, [*path, token]
        nodes.append(node)


def test_the_chi_square_test_finds_a_wrong_rule() -> None:
    probabilities_of = processed(SETTINGS["temperature"])
    rng = np.random.default_rng(20)
    runs = [speculate(accept_top_k_drafts_as_if_sampled, probabilities_of, rng.random)[0] for _ in range(15_000)]
    assert p_value(Counter(runs), SETTINGS["temperature"]) < 1e-9


def test_the_chi_square_test_finds_typical_acceptance() -> None:
    """Typical acceptance is not lossless; were it to pass, the test would be too weak."""
    probabilities_of = processed(SETTINGS["temperature"])
    rng = np.random.default_rng(20)
    runs = [speculate(accept_typical, probabilities_of, rng.random)[0] for _ in range(15_000)]
    assert p_value(Counter(runs), SETTINGS["temperature"]) < 1e-9


def test_distributions_are_asked_for_at_visited_nodes_only_and_with_their_path() -> None:
    asked = []
    certain = {0: B, 2: C, 5: OTHER}

    def distribution_at(node: int, path: Sequence[int]) -> npt.NDArray[np.float64]:
        asked.append((node, list(path)))
        return np.eye(100)[certain[node]]

    assert accept_sampled(TREE, TOKENS, distribution_at, lambda: 0.5) == Accepted((0, 2, 5), OTHER)
    assert asked == [(0, []), (2, [B]), (5, [B, C])]


def test_penalties_act_once_and_on_the_drafted_path_too() -> None:
    """Pitfall 20: greedy with a penalty and a processor, against a loop without drafts."""
    logits = np.random.default_rng(5).normal(0, 1, (30, 30))  # the row of the last token
    sampling = Sampling(repetition_penalty=1.8, logit_bias={4: 0.7})
    tree = TokenTree.chain(4)

    context = [2]
    for _ in range(12):
        context.append(next_token(logits[context[-1]], context, sampling, lambda: 0.0))
    rounds, emitted = 0, [2]
    while len(emitted) < len(context):
        guess = [emitted[-1], *context[len(emitted) : len(emitted) + 3], 0, 0, 0, 0][: len(tree)]
        done = list(emitted)
        accepted = walk(
            tree,
            np.array(guess),
            lambda node, path: next_token(logits[guess[node]], [*done, *path], sampling, lambda: 0.0),  # noqa: B023
        )
        emitted += [*(guess[node] for node in accepted.nodes[1:]), accepted.bonus]
        rounds += 1
    assert emitted[: len(context)] == context
    assert rounds == 3
    without = [2]
    for _ in range(12):
        without.append(next_token(logits[without[-1]], without, Sampling(), lambda: 0.0))
    assert without != context


# ---- drawn drafts: p/q ----

Weights = tuple[int, ...]
Row = npt.NDArray[Any]
"""Fractions: every chance below is exact."""


def fractions(*weights: int) -> Row:
    return np.array([Fraction(weight, sum(weights)) for weight in weights], object)


def drawn_round(
    tree: TokenTree, p_at: Callable[[Prefix], Row], q_at: Callable[[Prefix], Row], rule: Callable[..., Accepted]
) -> dict[Prefix, Fraction]:
    """Chances of what one round emits. Tokens are drawn from q without replacement, in node order; siblings for
    which q has no token left are left out, with what hangs below them."""

    def one_round(uniform: Callable[[], float]) -> Prefix:
        prefixes: dict[int, Prefix] = {0: ()}
        sampled_from: dict[int, Row] = {}
        for parent, children in enumerate(tree.children):
            if parent not in prefixes or not children:
                continue
            left = sampled_from[parent] = q_at(prefixes[parent])
            for child in children[: np.count_nonzero(left)]:
                prefixes[child] = (*prefixes[parent], draw(left, uniform()))
                left = without(left, prefixes[child][-1])
        kept = sorted(prefixes)
        tokens = np.array([-1, *(prefixes[node][-1] for node in kept[1:])])
        sampled_from = {kept.index(node): q for node, q in sampled_from.items()}
        accepted = rule(tree.keep(kept), tokens, lambda node, path: p_at(tuple(path)), sampled_from, uniform)
        return (*(int(tokens[node]) for node in accepted.nodes[1:]), accepted.bonus)

    return outcomes(one_round)


def without(row: Row, token: int) -> Row:
    return np.where(np.arange(len(row)) == token, row * 0, row)


def follows(emitted: dict[Prefix, Fraction], p_at: Callable[[Prefix], Row]) -> bool:
    """Whether each token that is emitted, given those before it, has the target's chances exactly."""
    assert sum(emitted.values()) == 1
    for prefix in {sequence[:length] for sequence in emitted for length in range(len(sequence))}:
        size = len(prefix)
        chances = [Fraction(0)] * len(p_at(prefix))
        for sequence, chance in emitted.items():
            if len(sequence) > size and sequence[:size] == prefix:
                chances[sequence[size]] += chance
        if [chance / sum(chances) for chance in chances] != list(p_at(prefix)):
            return False
    return True


@pytest.mark.parametrize("siblings", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((5, 3, 2), (2, 6, 2)),  # the worked example of the reference notes
        ((2, 6, 2), (2, 6, 2)),  # the first sibling is never rejected
        ((0, 1, 1), (1, 1, 1)),  # the target cannot say what the draft can
        ((1, 1, 1), (0, 1, 2)),  # the other way round
        ((1, 0, 0), (0, 1, 1)),  # nothing in common
        ((1, 0, 0), (1, 2, 3)),  # a certain target
        ((4, 3, 2), (0, 1, 0)),  # a certain draft
        ((5, 1, 1, 3), (1, 4, 2, 2)),
        ((1, 1), (3, 1)),  # fewer tokens in the vocabulary than siblings
    ],
)
def test_drawn_siblings_emit_exactly_the_target(p: Weights, q: Weights, siblings: int) -> None:
    """In fractions, over all draws and all outcomes of the rule itself."""
    tree = TokenTree.from_paths([[rank] for rank in range(siblings)])
    p_at = lambda prefix: fractions(*p)  # noqa: E731
    emitted = drawn_round(tree, p_at, lambda prefix: fractions(*q), accept_drawn)
    assert follows(emitted, p_at)
    if siblings == 1:  # Leviathan et al.: a guess is accepted with the overlap of p and q
        overlap = sum(np.minimum(fractions(*p), fractions(*q)))
        assert sum(chance for sequence, chance in emitted.items() if len(sequence) == 2) == overlap


def random_row(seed: int, prefix: Prefix) -> Row:
    """Zeros among them."""
    return fractions(*np.random.default_rng([seed, *prefix]).integers(0, 6, 2).tolist(), 2)


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree.chain(2),
        TokenTree.from_paths([[0], [1], [0, 0]]),
        TokenTree.from_paths([[0], [1], [1, 0], [1, 1]]),
        TokenTree.from_paths([[0], [1], [2], [0, 0], [2, 0]]),
    ],
)
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_drawn_trees_of_two_levels_emit_exactly_the_target(tree: TokenTree, seed: int) -> None:
    p_at, q_at = (lambda prefix, s=s: random_row(s, prefix) for s in (2 * seed, 2 * seed + 1))
    emitted = drawn_round(tree, p_at, q_at, accept_drawn)
    assert max(map(len, emitted)) == 3
    assert follows(emitted, p_at)


BROKEN = ("no comparison with q", "q stays in the residual", "siblings as if with replacement", "bonus from p")


def broken_rule(broken: str) -> Callable[..., Accepted]:
    """`accept_drawn` with one thing wrong, for trees of one level."""

    def rule(
        tree: TokenTree,
        tokens: npt.NDArray[np.int64],
        distribution_at: Callable[..., Row],
        sampled_from: Mapping[int, Row],
        uniform: Callable[[], float],
    ) -> Accepted:
        p, q = distribution_at(0, []), sampled_from[0]
        for child in tree.children[0]:
            token = int(tokens[child])
            if uniform() * (1 if broken == BROKEN[0] else q[token]) < p[token]:
                return Accepted((0, child), draw(distribution_at(child, [token]), uniform()))
            residual = p if broken == BROKEN[1] else np.maximum(p - q, 0)
            p = residual / residual.sum()
            if broken != BROKEN[2]:
                q = without(q, token) / without(q, token).sum()
        return Accepted((0,), draw(distribution_at(0, []) if broken == BROKEN[3] else p, uniform()))

    return rule


@pytest.mark.parametrize("broken", [*BROKEN, "nothing"])
def test_the_exact_test_finds_wrong_rules(broken: str) -> None:
    p_at = lambda prefix: fractions(5, 1, 1, 3)  # noqa: E731
    tree = TokenTree.from_paths([[0], [1]])
    emitted = drawn_round(tree, p_at, lambda prefix: fractions(1, 4, 2, 2), broken_rule(broken))
    assert follows(emitted, p_at) == (broken == "nothing")


def test_chosen_guesses_below_a_drawn_one() -> None:
    """A node without q has chosen children: one draw from p decides between them, and nothing is biased."""
    tree = TokenTree.from_paths([[0], [0, 0], [0, 1]])
    p_at, q = (lambda prefix: random_row(0, prefix)), fractions(2, 1, 1)

    def one_round(uniform: Callable[[], float]) -> Prefix:
        tokens = np.array([-1, draw(q, uniform()), 1, 2])
        accepted = accept_drawn(tree, tokens, lambda node, path: p_at(tuple(path)), {0: q}, uniform)
        return (*(int(tokens[node]) for node in accepted.nodes[1:]), accepted.bonus)

    emitted = outcomes(one_round)
    assert {len(sequence) for sequence in emitted} == {1, 2, 3}
    assert follows(emitted, p_at)


def test_rounding_alone_rejects_nothing() -> None:
    """p and q that differ in the last bit: the residual of nothing has no direction to fall."""
    q = np.array([0.5, 0.25, 0.25])
    p = q * (1 - 2**-53)
    assert (p < q).all()
    certain = 1 - 2**-53  # the largest number that `uniform` gives
    numbers = iter([certain, 0.1])
    accepted = accept_drawn(TokenTree.chain(1), np.array([9, 1]), lambda node, path: p, {0: q}, lambda: next(numbers))
    assert accepted == Accepted((0, 1), 0)


def test_an_impossible_guess_is_passed_over() -> None:
    """q of the token is zero (it was not drawn from q): no number is spent on it, and p/0 accepts nothing."""
    tree = TokenTree.from_paths([[0], [1]])
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 1.0, 0.0])
    numbers = iter([0.6, 0.4])
    accepted = accept_drawn(tree, np.array([9, 0, 1]), lambda node, path: p, {0: q}, lambda: next(numbers))
    assert accepted == Accepted((0,), 0)  # 0.6 rejects token 1, of which p has half of q; the rest of p is token 0
    assert not list(numbers)


# ---- typical acceptance ----


def test_typical_agrees_with_the_rows_form_of_medusa() -> None:
    """Against `evaluate_posterior`'s rows, in torch: leading run, then likelihood, row 0 when none."""
    tree = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [1, 0, 0], [1, 0, 1]])
    rows = torch.tensor(tree.retrieve_rows)
    rng = np.random.default_rng(2)
    seen = Counter[int]()
    for _ in range(400):
        probabilities = torch.tensor(rng.normal(0, 2, (len(tree), 8))).softmax(-1)
        tokens = np.array([rng.permutation(8)[0] for _ in range(len(tree))], np.int64)
        entropy = -(probabilities * torch.log(probabilities + 1e-5)).sum(-1)
        threshold = torch.minimum(torch.tensor(0.09, dtype=torch.float64), torch.exp(-entropy) * 0.3)
        candidates = torch.tensor(tokens)[rows]
        parents = rows[:, :-1]
        p = probabilities[parents].gather(-1, candidates[:, 1:, None])[..., 0]
        kept = (p > threshold[parents]) & (rows[:, 1:] >= 0)
        run = kept.int().cumprod(1).sum(1)
        longest = int(run.max())
        likelihood = torch.where(run == longest, p[:, :longest].log().sum(1), -torch.inf)
        best = rows[likelihood.argmax()][: longest + 1].tolist()

        table = probabilities.numpy()
        accepted = accept_typical(tree, tokens, lambda node, path: table[node], lambda: 0.4)  # noqa: B023
        # Two nodes of one parent with one token are equals: compare what they say.
        assert tokens[list(accepted.nodes)].tolist() == tokens[best].tolist()
        assert accepted.bonus == draw(table[accepted.nodes[-1]], 0.4)
        assert accepted.nodes == tuple(tree.ancestry(accepted.nodes[-1]))
        seen[longest] += 1
    assert set(seen) == {0, 1, 2, 3}


def test_typical_thresholds_by_hand() -> None:
    """The threshold is min(epsilon, delta * exp(-H)); exp(-H) is 1/8 for an even row of 8."""

    def kept(probabilities: npt.NDArray[np.float64], token: int, **limits: float) -> bool:
        tree, tokens = TokenTree.chain(1), np.array([0, token])
        return len(accept_typical(tree, tokens, lambda node, path: probabilities, lambda: 0.0, **limits).nodes) == 2

    even = np.full(8, 1 / 8)
    assert kept(even, 3)  # 1/8 > 0.3/8
    assert not kept(even, 3, epsilon=0.5, delta=1.01)
    assert kept(even, 3, epsilon=0.5, delta=0.99)
    peaked = np.array([0.9, 0.08, 0.02])
    assert [kept(peaked, token) for token in range(3)] == [True, False, False]  # epsilon 0.09 rules
    assert kept(peaked, 1, epsilon=0.07)


def test_typical_on_a_greedy_distribution_is_greedy() -> None:
    next_ids = np.array([A, D, C, E, 44, 0, 77])
    greedy = accept_typical(TREE, TOKENS, lambda node, path: np.eye(100)[next_ids[node]], lambda: 0.3)
    assert greedy == accept_greedy(TREE, TOKENS, next_ids) == Accepted((0, 1, 4), 44)
