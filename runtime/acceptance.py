"""Acceptance rules: which path of a verified draft tree is kept, and which token follows it.

Where guesses were chosen, the lossless rules are one walk: ask the target for its next token at the current node;
if a child holds it, go there; if none does, it is the bonus. Greedy asks for the argmax, sampling for one draw. This
emits exactly what plain decoding emits from the same stream of uniform numbers: the draft decides how many target
calls are needed, never which tokens come out.

Where guesses were drawn from a drafter's q, `accept_drawn` keeps more of them, by comparing p with q. The tokens
still have the target's distribution, but they are not those of plain decoding with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speccompile.graphs.tree import TokenTree
from speccompile.runtime.sampling import draw

Tokens = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]
NextTokenAt = Callable[[int, list[int]], int]
"""(node, drafted tokens on its path, root excluded) -> the target's next token there."""
DistributionAt = Callable[[int, list[int]], Probabilities]
"""(node, drafted tokens on its path, root excluded) -> the target's distribution float64 [V] there."""


@dataclass(frozen=True)
class Accepted:
    """The outcome of one round.

    `nodes` runs from the root (node 0, always kept) down to the last accepted node, parent to child. `bonus`
    is the target's token after it, and the next round's root. The round emits the tokens of `nodes[1:]`, then
    `bonus`: as many as there are nodes.
    """

    nodes: tuple[int, ...]
    bonus: int


def walk(tree: TokenTree, tokens: Tokens, next_token_at: NextTokenAt) -> Accepted:
    """Follow the target's own choices down the tree; `next_token_at` is called once per emitted token.

    Args:
        tree: N nodes.
        tokens: int64 [N], the token at each node.
        next_token_at: asked only about visited nodes, from the root down.
    """
    node, nodes, path = 0, [0], list[int]()
    while True:
        token = next_token_at(node, path)
        child = next((child for child in tree.children[node] if tokens[child] == token), None)
        if child is None:
            return Accepted(tuple(nodes), token)
        node, path = child, [*path, token]
        nodes.append(node)


def accept_greedy(tree: TokenTree, tokens: Tokens, next_ids: Tokens) -> Accepted:
    """Keep the path that agrees with the argmax `next_ids` int64 [N] at each parent."""
    return walk(tree, tokens, lambda node, path: int(next_ids[node]))


def accept_sampled(
    tree: TokenTree, tokens: Tokens, distribution_at: DistributionAt, uniform: Callable[[], float]
) -> Accepted:
    """Keep the path that agrees with one draw per level from the target's distribution.

    Lossless for drafts that do not depend on the numbers `uniform` will give. Drafts that are themselves
    sampled from q are still verified exactly, only less often accepted than with the p/q rule.
    """
    return walk(tree, tokens, lambda node, path: draw(distribution_at(node, path), uniform()))


def accept_drawn(
    tree: TokenTree,
    tokens: Tokens,
    distribution_at: DistributionAt,
    sampled_from: Mapping[int, Probabilities],
    uniform: Callable[[], float],
) -> Accepted:
    """Keep drawn guesses with probability min(1, p/q). Lossless: the output has the target's distribution exactly.

    The rule of arXiv 2211.17192 (algorithm 1) and 2302.01318, for siblings drawn without replacement as in
    Infini-AI-Lab/Sequoia `Tree/SpecTree.py` and SafeAILab/EAGLE branch v1 `eagle/model/utils.py`: with q_j = q without
    the siblings before j, renormalised, sibling j (token x) is accepted with probability min(1, p_j(x) / q_j(x)), else
    p_(j+1) = max(0, p_j - q_j), renormalised. After the last rejection the bonus is drawn from what is left of p, at a
    leaf from p itself.

    Args:
        distribution_at: p, float64 [V], after all processing; asked only about visited nodes.
        sampled_from: by node, the q float64 [V] that its children were drawn from, one after the other in node order,
            after the same processing. The guesses below a node that is missing here count as chosen, not drawn: one
            draw from p decides between them, as in `accept_sampled`.
    """
    node, nodes, path = 0, [0], list[int]()
    while True:
        p, q, children = distribution_at(node, path), sampled_from.get(node), tree.children[node]
        if q is None:
            token = draw(p, uniform())
            child = next((child for child in children if tokens[child] == token), None)
        else:
            child, p = _first_kept(p, q, children, tokens, uniform)
            token = draw(p, uniform()) if child is None else int(tokens[child])
        if child is None:
            return Accepted(tuple(nodes), token)
        node, path = child, [*path, token]
        nodes.append(node)


def _first_kept(
    p: Probabilities, q: Probabilities, children: Sequence[int], tokens: Tokens, uniform: Callable[[], float]
) -> tuple[int | None, Probabilities]:
    """The first sibling that p/q keeps, or None; and what is left of p."""
    for child in children:
        token = tokens[child]
        if not q[token]:
            continue  # it cannot have been drawn here; passing over it costs a guess and biases nothing
        if uniform() * q[token] < p[token]:
            return child, p
        residual = np.maximum(p - q, 0)
        mass = residual.sum()
        if not mass:
            return child, p  # p is q but for rounding, which alone has rejected this token
        p = residual / mass
        q = q.copy()
        q[token] = 0
        q = q / (q.sum() or 1)  # nothing is left when all that q can say has been drawn
    return None, p


def accept_typical(
    tree: TokenTree,
    tokens: Tokens,
    distribution_at: DistributionAt,
    uniform: Callable[[], float],
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Accepted:
    """Medusa's typical acceptance. NOT lossless: the output does not have the target's distribution.

    Keeps a drafted token x when p(x) > min(epsilon, delta * exp(-H(p))), with p the target's distribution at
    its parent and H its entropy. The longest run of kept tokens wins, among equals the one with the larger
    sum of log p; the bonus is drawn at its last node (arXiv 2401.10774 section 3.3.1; FasterDecoding/Medusa
    `medusa/model/utils.py` `evaluate_posterior`, thresholds as its `generate` passes them).
    """
    paths: dict[int, list[int]] = {0: []}  # accepted nodes, with the tokens that lead there
    scores = {0: (0, 0.0)}  # length of the run, sum of log p
    for parent in range(len(tree)):
        if parent not in paths or not tree.children[parent]:
            continue
        probabilities = distribution_at(parent, paths[parent])
        entropy = -np.sum(probabilities * np.log(probabilities + 1e-5))
        threshold = min(epsilon, delta * np.exp(-entropy))
        for child in tree.children[parent]:
            token = int(tokens[child])
            if probabilities[token] > threshold:
                length, log_p = scores[parent]
                paths[child] = [*paths[parent], token]
                scores[child] = (length + 1, log_p + float(np.log(probabilities[token])))
    best = max(scores, key=lambda node: scores[node])
    return Accepted(tuple(tree.ancestry(best)), draw(distribution_at(best, paths[best]), uniform()))
