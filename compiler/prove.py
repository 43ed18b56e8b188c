"""The proof that a finished bundle says what its model says, run before it is published and by `verify`.

Each check names the layer of the pipeline that is wrong when it fails:

    prefill   graph against eager transformers on plain text             -> tracing or weights
    tree      graph against eager transformers, every path of a tree     -> tree mask or positions
    path      tree against each of its paths run alone in the graph      -> attention kernel, row independence
    row       tokens in one call against one call each                   -> kernels that treat a lone row differently
    commit    next logits after a moved path against a fresh prefill     -> cache commit
    hidden    feature output against eager transformers                  -> feature tap, or a head's fusion
    heads     heads graph against the eager heads                        -> heads graph
    draft     draft graph against the eager draft model, level by level  -> draft graph, its mask or positions
    eagle     head's graph against the eager head, level by level        -> head's graph, its mask, positions or states
    *_int8    the same in int8, with the bounds of rounding              -> how weights are packed
    *_fp16    the same in fp16, with the bounds of rounding              -> an overflow, or a cast in the wrong place
    finite    logits in sixteen bits are numbers                         -> an overflow
    quality   a target in fewer bits against the exact one               -> how its weights are rounded
    tokens    speculative greedy tokens against plain ones               -> decoding loop

Checks against eager need the model; the others need only the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.draft_model import DraftModel
from speccompile.compiler.eagle_head import EagleHead
from speccompile.compiler.quality import compare, held_out, logits_of
from speccompile.graphs.errors import ProofError
from speccompile.graphs.manifest import GraphInfo
from speccompile.graphs.medusa import MedusaModule
from speccompile.graphs.target import tapping
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import OrtHeads, OrtTarget
from speccompile.runtime.backends.step import Heads, StepOutput, Target
from speccompile.runtime.decoder import Decoder

PROMPTS = (
    "Write a short story about a fox and a crow.",
    "def fibonacci(n):",
    "The first ten prime numbers are 2, 3, 5,",
    "Ein kurzer Satz.",
)
BRANCHING = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]])
PROOF_TREE_NODES = 16
PROOF_TOKENS = 48

# Logits are compared relative to their largest size: float32 carries 24 bits, and a 30-layer model loses about ten;
# float16 carries eleven, and loses four (SmolLM2: 3e-3). What drafts in int8 rounds weights and activations (127 steps
# each): a third of this at most, seen on SmolLM2.
LOGIT_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "int8": 0.1}
# Two logits closer than this are a tie that rounding may decide either way (DESIGN.md, "Must be shown"). In sixteen
# bits it is at most that; see `tie_gap`.
TIE_GAP = {"fp32": 1e-4, "fp16": 0.1}
LOGPROB_TOLERANCE = 1e-3
HEADS_TOLERANCE = {"fp32": LOGPROB_TOLERANCE, "fp16": 0.1, "int8": 1.0}  # log-probabilities
LONE_ROWS, MANY_ROWS = 9, 33
LONE_ROW = (
    "this CPU's kernels, which compute a lone row differently: decoding with rounded weights would not be exact here, "
    "use --precision fp32"
)
LARGEST_DIVERGENCE = 0.5  # nats a token between a rounded target and the exact one. SmolLM2 in int4: 0.1
ROUNDING = {
    "int8": "rounding to int8, which these weights do not bear: use --draft-precision fp32",
    "fp16": "rounding to fp16, which these weights do not bear: use --precision fp32",
}

Array = npt.NDArray[Any]
Report = Callable[[str], None]


@dataclass
class Proof:
    """Figures and bounds so far; `require` fails at the first figure beyond its bound.

    Args:
        computes: "fp32" or "fp16", what the target computes in.
    """

    computes: str = "fp32"
    figures: dict[str, Any] = field(default_factory=dict)

    def require(self, name: str, difference: float, bound: float, blame: str) -> None:
        known = self.figures.get(name, {"difference": 0.0, "bound": bound})
        if not difference <= bound < float("inf"):  # NaN fails too
            raise ProofError(
                f"proof '{name}': differs by {difference:.3g}, more than {bound:.3g} allows; the fault lies in {blame}."
            )
        if difference >= known["difference"]:
            self.figures[name] = {"difference": float(difference), "bound": float(bound)}

    def bound(self, logits: Array) -> float:
        """How far other logits of the target may be from these."""
        return LOGIT_TOLERANCE[self.computes] * float(np.abs(logits).max())


def prove(
    decoder: Decoder,
    source: Source | None,
    heads: MedusaModule | None = None,
    draft: DraftModel | None = None,
    eagle: EagleHead | None = None,
    report: Report = lambda _: None,
    exact: Path | None = None,
) -> dict[str, Any]:
    """Run every check that the arguments allow.

    Args:
        source: the model to compare with; None proves the bundle against itself only.
        heads: the eager heads to compare with, giving as many guesses as the bundle's.
        draft: the draft model to compare with, its lm_head cut down as the bundle's is.
        eagle: the EAGLE head to compare with.
        exact: folder with graphs as they were before their weights were rounded, of those that were: they are what is
            held against the model.

    Returns:
        figures for the manifest: per check its largest difference and the bound, and counts of tokens.

    Raises:
        ProofError: naming the check that failed and the layer of the pipeline that it blames.
    """
    info = decoder.bundle.manifest.graphs["target"]
    rounded = info.precision not in TIE_GAP
    proof = Proof(computes_in(info))
    prompts = [_encode(decoder, text) for text in PROMPTS]
    trees = [BRANCHING]
    if isinstance(decoder.tree, TokenTree) and len(decoder.tree) > 1:
        trees.append(decoder.tree.prune(PROOF_TREE_NODES))
    rng = np.random.default_rng(0)
    # What is held against the model: a rounded target says something else, by more than the faults that are looked for.
    whole = None if rounded else decoder.target
    if exact is not None and (exact / "target.onnx").is_file():
        whole = OrtTarget(exact / "target.onnx")
    for number, prompt in enumerate(prompts):
        rows = LONE_ROWS if number else MANY_ROWS
        report(f"proving logits, prompt {number + 1} of {len(prompts)}")
        if whole is not None:
            for tree in trees:
                tokens = rng.integers(decoder.target.vocab_size, size=len(tree))
                _prove_logits(proof, whole, source, prompt, tree, tokens)
        if rounded and not decoder.in_order:  # one that verifies trees: the rounded graph against itself, too
            tokens = rng.integers(decoder.target.vocab_size, size=len(BRANCHING))
            _prove_logits(proof, decoder.target, None, prompt, BRANCHING, tokens)
        _prove_rows(proof, decoder.target, decoder.in_order, prompt, rng.integers(decoder.target.vocab_size, size=rows))
    if rounded and (source is not None or whole is not None):
        report("measuring what rounding costs")
        proof.figures["quality"] = _quality(decoder, whole, source)
    if source is not None and heads is not None and decoder.heads is not None:
        report("proving the heads")
        if exact is not None and (exact / "medusa.onnx").is_file():
            _prove_heads(
                proof, whole, decoder, OrtHeads(exact / "medusa.onnx", threads=1), "fp32", source, heads, prompts
            )
        precision = decoder.bundle.manifest.graphs["medusa"].precision
        _prove_heads(proof, whole, decoder, decoder.heads, precision, source, heads, prompts)
    given = draft or eagle
    if decoder.draft is not None and given is not None and (draft is not None or source is not None):
        name = "draft" if draft is not None else "eagle"
        report("proving the draft model" if draft is not None else "proving the EAGLE head")
        names = None if given.token_ids is None else given.token_ids.numpy()
        if not np.array_equal(names, decoder.draft_tokens):  # type: ignore[arg-type]  # None equals None
            raise ProofError(f"proof '{name}_topk': the bundle's list of draft tokens is another than in {given.path}.")
        graphs = [(decoder.draft, decoder.bundle.manifest.graphs[name].precision)]
        if exact is not None and (exact / f"{name}.onnx").is_file():
            graphs.insert(0, (OrtTarget(exact / f"{name}.onnx", threads=1), "fp32"))
        for graph, precision in graphs:
            for prompt in prompts:
                if draft is not None:
                    _prove_draft(proof, decoder, graph, precision, draft, prompt)
                elif eagle is not None and source is not None:
                    _prove_eagle(proof, whole, decoder, graph, precision, eagle, source, prompt)
    report("proving tokens")
    proof.figures["tokens"] = _prove_tokens(proof, decoder, prompts)
    return proof.figures


def _encode(decoder: Decoder, text: str) -> list[int]:
    chat = decoder.text.chat_template is not None
    ids = decoder.text.chat([{"role": "user", "content": text}]) if chat else decoder.text.encode(text)
    room = decoder.capacity - max(len(decoder.tree), len(BRANCHING)) - 2
    return ids[-max(1, room // 2) :]


def _run(cache: Any, ids: Array, tree: TokenTree) -> Array:
    """Logits [N,V] of a tree behind the committed tokens; also checks the graph's own argmax."""
    out = cache.run(ids, cache.length + tree.depths, tree.mask, tree.nodes)
    if (out.next_ids < 0).any():
        raise ProofError(
            "proof 'finite': logits are no finite numbers; in sixteen bits the model overflows, use --precision bf16 "
            "(for TensorRT) or fp32."
        )
    if not np.array_equal(out.logits[0].argmax(-1), out.next_ids[0]):
        raise ProofError(
            "proof 'next_ids': the graph's argmax differs from its logits; the fault lies in the graph's tail."
        )
    return out.logits[0].copy()


def _prove_logits(
    proof: Proof, target: Target, source: Source | None, prompt: list[int], tree: TokenTree, tokens: Array
) -> None:
    cache = target.open(len(prompt) + len(tree) + 2)
    ids = np.array(prompt)
    first = _run(cache, ids, TokenTree.chain(len(prompt) - 1))
    bound = proof.bound(first)
    if source is not None:
        eager, _ = eager_logits(source, prompt)
        bound = proof.bound(eager)
        proof.require("prefill", _distance(first, eager), bound, "the traced graph or its weights")
    cache.commit(range(len(prompt)))

    logits = _run(cache, tokens, tree)
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    for leaf in leaves:
        path = tree.ancestry(leaf)
        if source is not None:
            eager, _ = eager_logits(source, [*prompt, *tokens[path].tolist()])
            proof.require("tree", _distance(logits[path], eager[-len(path) :]), bound, "the tree mask or the positions")
        alone = _run(cache, tokens[path], TokenTree.chain(len(path) - 1))
        proof.require(
            "path", _distance(logits[path], alone), bound, "the attention kernel: rows depend on their neighbours"
        )

    moved = next(
        (tree.ancestry(leaf) for leaf in leaves if tree.ancestry(leaf) != list(range(tree.depths[leaf] + 1))), None
    )
    if moved is None:
        return
    _run(cache, tokens, tree)  # the paths alone have overwritten its rows
    cache.commit(moved)
    after = _run(cache, tokens[:1], TokenTree.chain(0))
    text = np.array([*prompt, *tokens[moved], tokens[0]])
    fresh = _run(target.open(len(text)), text, TokenTree.chain(len(text) - 1))
    proof.require("commit", _distance(after[0], fresh[-1]), bound, "committing rows in the cache")


def _prove_rows(proof: Proof, target: Target, exactly: bool, prompt: list[int], tokens: Array) -> None:
    """Tokens one by one, as plain decoding runs them, against the same in calls of several, as they are verified.

    A target that rounds activations has no tolerance: see `passes.derive_gqa_inputs`.
    """
    cache = target.open(len(prompt) + len(tokens))
    first = _run(cache, np.array(prompt), TokenTree.chain(len(prompt) - 1))
    cache.commit(range(len(prompt)))
    alone = []
    for token in tokens:
        alone.append(_run(cache, np.array([token]), TokenTree.chain(0))[0])
        cache.commit([0])
    bound = 0.0 if exactly else proof.bound(first)
    blame = LONE_ROW if exactly else "the kernels: rows depend on their neighbours"
    for count in {*range(1, LONE_ROWS + 1), len(tokens)}:
        cache.truncate(len(prompt))
        together = _run(cache, tokens[:count], TokenTree.chain(count - 1))
        proof.require("row", _distance(together, np.array(alone[:count])), bound, blame)


def _quality(decoder: Decoder, whole: Target | None, source: Source | None) -> dict[str, Any]:
    texts = held_out(decoder.text, decoder.capacity)
    if whole is not None:
        figures = compare(logits_of(whole), logits_of(decoder.target), texts)
    else:
        assert source is not None
        figures = compare(lambda ids: eager_logits(source, ids)[0], logits_of(decoder.target), texts)
    if not figures["kl_per_token"] <= LARGEST_DIVERGENCE:
        raise ProofError(
            f"proof 'quality': the rounded target is {figures['kl_per_token']:.3g} nats a token from the exact one, "
            f"more than {LARGEST_DIVERGENCE:g} allows; its weights do not bear this --precision or are another model's."
        )
    return figures


def _require_hidden(proof: Proof, hidden: Array, want: Array) -> None:
    proof.require("hidden", _distance(hidden, want), proof.bound(want), "the feature output of the target graph")


def eager_logits(source: Source, ids: list[int]) -> tuple[Array, Array]:
    """transformers' logits [T,V] for a whole text, and what its lm_head read [T,F], float32."""
    seen: list[torch.Tensor] = []
    hook = source.lm_head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        with torch.no_grad():
            logits = source.model(input_ids=torch.tensor([ids]), use_cache=False).logits
    finally:
        hook.remove()
    return logits[0].float().numpy(), seen[0][0].float().numpy()


def _prove_heads(
    proof: Proof,
    whole: Target | None,
    decoder: Decoder,
    graph: Heads,
    precision: str,
    source: Source,
    heads: MedusaModule,
    prompts: list[list[int]],
) -> None:
    name, tolerance = _named("heads", precision), HEADS_TOLERANCE[precision]
    for prompt in prompts:
        count = len(prompt)
        cache = (whole or decoder.target).open(count)
        chain = TokenTree.chain(count - 1)
        hidden = cache.run(np.array(prompt), chain.depths, chain.mask, np.array([count - 1])).hidden
        assert hidden is not None
        if whole is not None:
            _require_hidden(proof, hidden[0], eager_logits(source, prompt)[1])
        with torch.no_grad():
            want_ids, want = (part[0, 0].numpy() for part in heads(torch.from_numpy(hidden[:, -1:].copy())))
        ids, logprobs = graph.run(hidden[0, -1])
        proof.require(name, _distance(logprobs, want), tolerance, ROUNDING.get(precision, "the heads graph"))
        if precision != "int8":
            wrong = _other_guesses(ids, logprobs, want_ids, want, tolerance)
            proof.require("heads_ids", wrong, 0, "the heads graph: its best tokens are others")


def _other_guesses(ids: Array, logprobs: Array, want_ids: Array, want: Array, tolerance: float) -> int:
    """Of guesses [heads,K], how many have another log-probability than the eager heads give the same token. One that
    those do not name may only be as likely as the last that they do."""
    wrong = 0
    for head in range(len(ids)):
        known = dict(zip(want_ids[head].tolist(), want[head].tolist(), strict=True))
        for token, logprob in zip(ids[head].tolist(), logprobs[head].tolist(), strict=True):
            expected = known.get(token, min(logprob, want[head, -1]))
            wrong += not abs(logprob - expected) <= tolerance
    return wrong


def _prove_draft(
    proof: Proof, decoder: Decoder, graph: Target, precision: str, draft: DraftModel, prompt: list[int]
) -> None:
    """A tree run level by level behind the prompt, as it is drafted, against every path in the eager model."""
    name, tolerance = _named("draft", precision), LOGIT_TOLERANCE[precision]
    tree, info = BRANCHING, decoder.bundle.manifest.draft
    assert info is not None
    prompt = prompt[-max(1, info.max_length - len(tree)) :]  # it may know fewer positions than the target
    tokens = np.random.default_rng(1).integers(decoder.target.vocab_size, size=len(tree))
    cache = graph.open(len(prompt) + len(tree))
    chain = TokenTree.chain(len(prompt) - 1)
    first = cache.run(np.array(prompt), chain.depths, chain.mask, np.array([len(prompt) - 1]))
    texts, rows = [prompt], [(first.logits[0, 0].copy(), _topk(first, 0))]
    cache.commit(range(len(prompt)))
    for depth in range(tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        mask = tree.mask[level, : level[-1] + 1]
        out = cache.run(tokens[level], cache.length + tree.depths[level], mask, np.arange(len(level)))
        texts += [[*prompt, *tokens[tree.ancestry(int(node))].tolist()] for node in level]
        rows += [(out.logits[0, row].copy(), _topk(out, row)) for row in range(len(level))]
    for text, (logits, best) in zip(texts, rows, strict=True):
        with torch.no_grad():
            eager = draft.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float().numpy()
        bound = tolerance * float(np.abs(eager).max())
        blame = "the draft graph, its tree mask or positions" if precision == "fp32" else ROUNDING[precision]
        proof.require(name, _distance(logits, eager), bound, blame)
        _require_topk(proof, "draft_topk", decoder.draft_tokens, logits, *best)


def _require_topk(proof: Proof, name: str, token_ids: Array | None, logits: Array, ids: Array, logprobs: Array) -> None:
    """The best tokens are held against the graph's own logits, which leaves no room for rounding."""
    own = logits - np.logaddexp.reduce(logits.astype(np.float64))
    names = np.arange(len(own)) if token_ids is None else token_ids
    columns = np.searchsorted(names, ids).clip(max=len(names) - 1)
    best = np.sort(own)[::-1][: len(ids)]
    wrong = max(_distance(logprobs, own[columns]), _distance(logprobs, best))
    if not np.array_equal(names[columns], ids):
        wrong = float("inf")  # tokens that it cannot say
    proof.require(name, wrong, LOGPROB_TOLERANCE, "the drafting graph's best tokens, or the target's ids for them")


def _prove_eagle(
    proof: Proof,
    whole: Target | None,
    decoder: Decoder,
    graph: Target,
    precision: str,
    head: EagleHead,
    source: Source,
    prompt: list[int],
) -> None:
    """Features of the target graph, and a tree run level by level behind them, against every path in the eager head."""
    name, tolerance = _named("eagle", precision), LOGIT_TOLERANCE[precision]
    tree, count = BRANCHING, len(prompt)
    tokens = np.random.default_rng(1).integers(decoder.target.vocab_size, size=len(tree))
    chain = TokenTree.chain(count - 1)
    cache = (whole or decoder.target).open(count)
    out = cache.run(np.array(prompt), chain.depths, chain.mask, np.array([count - 1]))
    assert out.hidden is not None
    features = out.hidden[0].copy()
    if whole is not None:
        _require_hidden(proof, features, eager_features(source, head, prompt))

    paths = [tree.ancestry(node) for node in range(len(tree))]
    wanted = [eager_draft(head, features, [*prompt[1:], *tokens[path].tolist()]) for path in paths]
    # Row i of a head reads feature i and token i + 1; the root is the token behind the prompt. Nodes are given the
    # eager states of their parents: what rounding adds in one level must not count again in all below.
    cache = graph.open(count + len(tree))
    ids = np.array([*prompt[1:], tokens[0]])
    first = cache.run(ids, chain.depths, chain.mask, np.array([count - 1]), features=features)
    cache.commit(range(count))
    found = {0: (first.logits[0, 0].copy(), _state(first, -1), _topk(first, 0))}
    for depth in range(1, tree.max_depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        above = np.stack([wanted[tree.parents[node]][1] for node in level])
        mask = tree.mask[level, 1 : level[-1] + 1]
        rows = np.arange(len(level))
        out = cache.run(tokens[level], cache.length + tree.depths[level] - 1, mask, rows, features=above)
        for row, node in enumerate(level.tolist()):
            found[node] = out.logits[0, row].copy(), _state(out, row), _topk(out, row)
    blame = "the head's graph, its tree mask, positions or states" if precision == "fp32" else ROUNDING[precision]
    for node, (logits, state, best) in found.items():
        for got, eager in zip((logits, state), wanted[node], strict=True):
            proof.require(name, _distance(got, eager) / max(float(np.abs(eager).max()), 1e-9), tolerance, blame)
        _require_topk(proof, "eagle_topk", decoder.draft_tokens, logits, *best)


def _named(what: str, precision: str) -> str:
    return what if precision == "fp32" else f"{what}_{precision}"


def _state(output: StepOutput, row: int) -> Array:
    assert output.hidden is not None
    return output.hidden[0, row].copy()


def eager_features(source: Source, head: EagleHead, ids: list[int]) -> Array:
    """What `head` reads of the eager target [T,F], float32."""
    taps = head.form.taps
    with torch.no_grad(), tapping(source.model, taps) as streams:
        _, hidden = eager_logits(source, ids)
        tapped = [streams[tap].float() for tap in taps] or [torch.from_numpy(hidden)[None]]
        features: Array = head.model.features(tapped)[0].numpy()
    return features


def eager_draft(head: EagleHead, features: Array, ids: list[int]) -> tuple[Array, Array]:
    """Logits [Vd] and state [F] of the eager head at the last of `ids`, which are paired with `features` [N,F] and,
    behind those, with its own states. Each of those runs everything again: no cache, no mask but the causal one."""
    known = torch.from_numpy(features)[None]
    while True:
        count = known.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            out = head.model(torch.tensor([ids[:count]]), torch.arange(count)[None], known, attention_mask=mask)
        if count == len(ids):
            return out.logits[0, -1].numpy(), out.hidden_states[-1][0, -1].numpy()
        known = torch.cat((known, out.hidden_states[-1][:, -1:]), 1)


def _topk(output: StepOutput, row: int) -> tuple[Array, Array]:
    assert output.topk_ids is not None and output.topk_logprobs is not None
    return output.topk_ids[0, row].copy(), output.topk_logprobs[0, row].copy()


def _prove_tokens(proof: Proof, decoder: Decoder, prompts: list[list[int]]) -> dict[str, int]:
    compared = ties = rounds = emitted = 0
    for number, prompt in enumerate(prompts):
        limit = min(PROOF_TOKENS, decoder.capacity - len(prompt))
        speculative, plain = (
            decoder.generate(prompt, max_new_tokens=limit, speculate=speculate, sequence=decoder.new_sequence())
            for speculate in (True, False)
        )
        rounds, emitted = rounds + speculative.stats.rounds, emitted + speculative.stats.emitted
        compared += len(plain.token_ids)
        if (place := first_difference(speculative.token_ids, plain.token_ids)) is None:
            continue
        gap = top_two_gap(decoder, [*prompt, *plain.token_ids[:place]])
        # Where activations are rounded, logits are the same to the bit: no ties.
        if gap >= tie_gap(decoder, proof.figures) or decoder.in_order:
            raise ProofError(
                f"proof 'tokens': speculative and plain greedy tokens differ on prompt {number + 1} at token {place}, "
                f"where the best two logits are {gap:.3g} apart; the fault lies in the decoding loop."
            )
        ties += 1
    return {"prompts": len(prompts), "compared": compared, "ties": ties, "rounds": rounds, "emitted": emitted}


def computes_in(target: GraphInfo) -> str:
    """ "fp32" or "fp16": dialect gqa makes weights whole again, scatter multiplies them in the bits they have."""
    return "fp32" if target.dialect == "gqa" or target.precision == "fp32" else "fp16"


def tie_gap(decoder: Decoder, figures: Mapping[str, Any] | None = None) -> float:
    """Two of its logits closer than this are a tie, which rounding may decide either way: in sixteen bits both may be
    off by what the proof saw between calls that differ only in how many rows they have.

    Args:
        figures: of its proof; default: those in its manifest.
    """
    most = TIE_GAP[computes_in(decoder.bundle.manifest.graphs["target"])]
    if most == TIE_GAP["fp32"]:
        return most
    seen = decoder.bundle.manifest.proof if figures is None else figures
    return min(most, 2 * max(seen.get(name, {}).get("difference", most) for name in ("row", "path")))


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token in which two texts differ (a missing one differs), or None."""
    place = next(
        (index for index, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
    )
    return None if place == len(a) == len(b) else place


def top_two_gap(decoder: Decoder, text: list[int]) -> float:
    """Distance between the best two logits after `text`."""
    chain = TokenTree.chain(len(text) - 1)
    out = decoder.target.open(len(text)).run(np.array(text), chain.depths, chain.mask, np.array([len(text) - 1]))
    second, first = np.partition(out.logits[0, 0], -2)[-2:]
    return float(first - second)


def _distance(a: Array, b: Array) -> float:
    return float(np.abs(a.astype(np.float64) - b).max())
