"""The decoding loop, one for every method: propose a tree, verify it in one target call, accept, commit.

draft    = drafter.propose(root)             the root is chosen but not in the cache yet
output   = target(draft.tree)                one call for all nodes
accepted = rule(draft, output)               a path of nodes, and the bonus that follows it
cache.commit(accepted.nodes)                 rows of the path stay, the rest is overwritten later
root     = accepted.bonus
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speccompile.graphs.errors import BundleError, GenerationError
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.tree import DynamicTree
from speccompile.runtime.acceptance import Accepted, accept_drawn, accept_greedy, accept_sampled, accept_typical
from speccompile.runtime.backends.step import Cache, Graphs, StepOutput
from speccompile.runtime.bundle import Bundle
from speccompile.runtime.drafters.combined import CombinedDrafter
from speccompile.runtime.drafters.draft import Draft, Drafter
from speccompile.runtime.drafters.draft_model import DraftModelDrafter
from speccompile.runtime.drafters.eagle import EagleDrafter
from speccompile.runtime.drafters.growing import GrowingDrafter
from speccompile.runtime.drafters.lookahead import LookaheadDrafter
from speccompile.runtime.drafters.medusa import MedusaDrafter
from speccompile.runtime.drafters.plain import PlainDrafter
from speccompile.runtime.drafters.prompt_lookup import PromptLookupDrafter
from speccompile.runtime.pace import Pace
from speccompile.runtime.sampling import Sampling, distribution, next_token
from speccompile.runtime.stats import StageClock, Stats
from speccompile.runtime.text import Text, TextStream

PREFILL_CHUNK = 256
ACCEPTANCE_RULES = ("exact", "typical")
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt_rtx", "tensorrt_lean")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Piece:
    """Part of an answer: text that is final, and the tokens accepted with it. The last one has the reason it ended."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer.

    Args:
        token_ids: new tokens only, the end-of-text token included when one came.
        text: what they say, special tokens skipped, cut before a stop string.
        finish_reason: "eos", "stop" (a stop string), "length" (max_new_tokens) or "capacity" (the cache is full).
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Stats

    def to_json(self) -> dict[str, Any]:
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_json(),
        }


@dataclass
class SequenceState:
    """One conversation's cache, and the tokens whose keys and values it holds."""

    cache: Cache
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None  # the one it is used for; an older stream cannot go on
    draft_cache: Cache | None = None  # of a draft model or head; holds a prefix of `tokens`
    reads_ahead: int = 0  # a row of it depends on that many tokens behind its own: 1 for an EAGLE head

    def keep_prefix(self, ids: Sequence[int], features: bool = False) -> int:
        """Truncate to what `ids` has in common with the cache, less its last token, which must run again.

        Args:
            features: whether the target's features will be wanted for all rows that `draft_cache` lacks. They are not
                kept, so these rows run again.
        """
        common = 0
        for ours, theirs in zip(self.tokens, ids[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if self.draft_cache is not None:
            self.draft_cache.truncate(min(self.draft_cache.length, max(common - self.reads_ahead, 0)))
            if features:
                common = self.draft_cache.length
        self.cache.truncate(common)
        del self.tokens[common:]
        return common

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.cache.commit(nodes)
        self.tokens += tokens


@dataclass(frozen=True)
class Request:
    """What one call of `generate` asks for, checked."""

    ids: list[int]
    max_new_tokens: int
    sampling: Sampling
    acceptance: str
    stop: tuple[str, ...]
    speculate: bool
    uniform: Callable[[], float]


class Decoder:
    """A loaded bundle. Weights are held once; every `SequenceState` made by `new_sequence` has its own cache.

    Calls that use the same sequence (or the default one) must not overlap in time; others may. `pace` steps back to
    plain decoding while drafts lose; it is None, and every round drafts, where nobody has measured what rounds cost.

    `graphs` runs the bundle's graphs; by default ONNX Runtime does, with `threads` and `provider`. The other arguments
    are those of `load`.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        provider: str | None = None,
        capacity: int | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        graphs = graphs or open_graphs(bundle, threads, provider)
        longest = min(manifest.target.max_length, graphs.capacity or manifest.target.max_length)
        self.capacity = min(capacity or longest, longest)
        self.text = Text.load(bundle.path, manifest.tokenizer.special_tokens)
        # Small graphs first: what loading one takes for a moment is given back before the largest is loaded.
        self.heads = graphs.heads() if manifest.heads is not None else None
        self.draft, name = None, "draft" if manifest.eagle is None else "eagle"
        self.draft_tokens = bundle.draft_tokens()
        if (info := manifest.drafting) is not None:
            self.draft = graphs.target(name)
            if (self.draft.vocab_size, self.draft.top_k) != (info.draft_vocabulary, info.top_k):
                raise BundleError(
                    f"{bundle.path}: {name}.onnx gives {self.draft.vocab_size} logits and {self.draft.top_k} best "
                    f"tokens but the manifest says {info.draft_vocabulary} and {info.top_k}; rebuild the bundle."
                )
        self.target = graphs.target()
        self._most_rows = self.target.max_tokens or self.capacity  # of one call
        self.tree = bundle.tree
        self.pace = Pace(manifest.costs) if manifest.costs is not None else None
        # A node whose ancestors lie in the cache as they will when they are committed has the very logits of plain
        # decoding. Elsewhere sums run in another order. That costs float32 its last bit, but where activations are
        # rounded a last bit may tip an integer, and grows to whole logits. Only the integer products of the gqa dialect
        # round activations.
        target = manifest.graphs["target"]
        self.in_order = target.dialect == "gqa" and target.precision not in ("fp32", "fp16", "bf16")
        if self.heads is not None and self.heads.width != self.target.width:
            raise BundleError(
                f"{bundle.path}: the target's features are {self.target.width} wide but medusa.onnx takes "
                f"{self.heads.width}; they were made for different models, rebuild the bundle."
            )
        if self.draft is not None:
            width = None if manifest.eagle is None else self.target.width
            if {self.draft.features, self.draft.width} != {width} or (width is None) != (manifest.eagle is None):
                raise BundleError(
                    f"{bundle.path}: {name}.onnx takes features {self.draft.features} wide and gives states "
                    f"{self.draft.width} wide, but should take and give {width}, as the target's are; rebuild the "
                    "bundle."
                )
        self._default: SequenceState | None = None

    # ---- the interface ----

    def new_sequence(self) -> SequenceState:
        """A fresh sequence with its own cache, for `generate(..., sequence=...)`."""
        draft_cache, manifest = None, self.bundle.manifest
        if self.draft is not None and (info := manifest.drafting) is not None and len(self.tree) > 1:
            draft_cache = self.draft.open(min(self.capacity + len(self.tree), info.max_length))
        return SequenceState(
            self.target.open(self.capacity), draft_cache=draft_cache, reads_ahead=int(manifest.eagle is not None)
        )

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer a prompt. Takes the options of `stream`."""
        pieces = self.stream(prompt, **options)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                answer: Generation = end.value
                return answer

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        processor: Callable[[Sequence[int], npt.NDArray[Any]], npt.NDArray[Any]] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
        acceptance: str = "exact",
        sequence: SequenceState | None = None,
    ) -> Generator[Piece, None, Generation]:
        """Yield the answer piece by piece, as tokens are accepted; the generator's value is the whole `Generation`.

        Args:
            prompt: text (encoded as it is), token ids, or chat messages [{"role": ..., "content": ...}].
            temperature: 0 is greedy. With a seed, the same tokens come out with and without speculation, unless a draft
                model or EAGLE head draws its guesses from the same numbers; then only the distribution is the same (in
                a tuned bundle also between two answers, as those before decide which rounds draft).
            processor: called with (token ids so far, logits [V]); returns the logits to use.
            stop: strings that end the answer; they are not part of its text.
            speculate: False decodes plainly with the same graph. So does a bundle whose tree is the root alone, and
                every round in which `pace` expects no gain.
            acceptance: "exact" (lossless), or "typical": Medusa's rule, NOT lossless.
            sequence: where keys and values live; by default one that this decoder keeps, so that a conversation
                runs only what is new in it.

        Raises:
            GenerationError: for an unusable prompt or option, before anything is run.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, processor)
        if seed is not None and seed < 0:
            raise GenerationError(f"seed: {seed} is negative; use 0 or more.")
        if acceptance not in ACCEPTANCE_RULES:
            raise GenerationError(f"acceptance: '{acceptance}' is unknown; use one of {', '.join(ACCEPTANCE_RULES)}.")
        if acceptance == "typical" and sampling.greedy:
            raise GenerationError("acceptance: 'typical' needs a temperature above 0; greedy decoding is always exact.")
        if max_new_tokens < 1:
            raise GenerationError(f"max_new_tokens: {max_new_tokens} asks for nothing; use 1 or more.")
        if logit_bias and max(logit_bias) >= self.target.vocab_size:
            raise GenerationError(
                f"sampling: logit_bias names token {max(logit_bias)}, but the model has "
                f"{self.target.vocab_size} tokens."
            )
        request = Request(
            self.encode(prompt),
            max_new_tokens,
            sampling,
            acceptance,
            (stop,) if isinstance(stop, str) else tuple(stop),
            speculate,
            np.random.default_rng(seed).random,
        )
        if sequence is None:
            sequence = self._default = self._default or self.new_sequence()
        answer = Answer(self.text, request, frozenset(self.bundle.manifest.eos_ids))
        return self._guarded(request, answer, sequence)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            GenerationError: when it is empty, too long for the cache, or holds ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            ids = self.text.encode(prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):  # len: an array has no truth value
            ids = self.text.chat([dict(message) for message in prompt])  # type: ignore[call-overload,arg-type]
        else:
            ids = [int(token) for token in prompt]  # type: ignore[call-overload,arg-type]
        if not ids:
            raise GenerationError("prompt: it is empty; give at least one token.")
        if len(ids) > self.capacity:
            raise GenerationError(
                f"prompt: {len(ids)} tokens do not fit the cache of {self.capacity}; shorten it or build with a larger "
                "--max-length."
            )
        vocabulary = self.target.vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            odd = next(token for token in ids if not 0 <= token < vocabulary)
            raise GenerationError(f"prompt: token id {odd} is outside the vocabulary of {vocabulary}.")
        return ids

    # ---- the loop ----

    def _guarded(self, request: Request, answer: Answer, sequence: SequenceState) -> Generator[Piece, None, Generation]:
        """The loop; what failed leaves nothing to the default sequence's next answer. Keys that are no numbers would
        spoil it in dialect scatter, whose attention multiplies rows that it does not see with zero."""
        try:
            return (yield from self._stream(request, answer, sequence))
        except GenerationError:
            if sequence is self._default and sequence.answer is answer:
                self._default = None
            raise

    def _stream(self, request: Request, answer: Answer, sequence: SequenceState) -> Generator[Piece, None, Generation]:
        exact = request.acceptance == "exact" or not request.speculate
        stats = Stats(lossless=exact, prompt_tokens=len(request.ids))
        clock = StageClock(stats)
        sequence.answer = answer
        drafter = self._drafter(request, sequence)
        pace = None if isinstance(drafter, PlainDrafter) else self.pace
        clock.start()
        root = self._prefill(request, sequence, drafter, stats, clock)
        answer.take([root])
        while answer.finish_reason is None:
            room = self.capacity - sequence.cache.length
            if room < 1:
                answer.end("capacity")
                break
            piece = answer.piece()
            clock.stop()
            yield piece
            if sequence.answer is not answer:
                raise GenerationError(
                    "sequence: another call has used it since this stream's last piece; give each stream its own "
                    "(sequence=decoder.new_sequence())."
                )
            clock.start()
            depth, past = request.max_new_tokens - len(answer.token_ids) - 1, sequence.cache.length
            drafts = pace is None or pace.drafts()
            draft = drafter.propose(root, min(room, self._most_rows), depth) if drafts else drafter.propose(root, 1, 0)
            clock.add("draft", drafter.seconds)
            if self.in_order and not isinstance(drafter, LookaheadDrafter):  # whose other rows look ahead
                draft = draft.one_path()
            output = self._verify(draft, sequence.cache)
            clock.add("verify", sequence.cache.seconds)
            with clock.stage("accept"):
                accepted = self._accept(draft, output, request, sequence.tokens)
            new = [int(draft.tokens[node]) for node in accepted.nodes[1:]] + [accepted.bonus]
            kept = answer.take(new)
            nodes = accepted.nodes[: kept + 1]
            with clock.stage("commit"):
                sequence.commit(nodes, [root, *new[: len(nodes) - 1]])
            drafter.observe(nodes, output)
            root = accepted.bonus
            stats.rounds += 1
            stats.drafted += len(draft.tree) - 1
            tested = draft.tree.trunk if self.in_order else draft.tree
            stats.tested += sum(1 for node in nodes if tested.children[node])
            stats.accepted += len(nodes) - 1
            stats.bonus += kept == len(new)
            stats.count_round(kept)
            stats.plain_rounds += not drafts
            if drafts and pace is not None:
                stats.stepped_back += pace.note(len(draft.tree), past, kept)
        stats.emitted = len(answer.token_ids)
        if (growing := _growing(drafter)) is not None:
            stats.draft_calls, stats.draft_step_seconds = growing.calls, growing.step_seconds
        last = answer.piece()
        clock.stop()
        yield last
        return Generation(answer.token_ids, answer.text, last.finish_reason or "", stats)

    def _drafter(self, request: Request, sequence: SequenceState) -> Drafter:
        """A drafter for one answer."""
        manifest, tree, tokens = self.bundle.manifest, self.tree, sequence.tokens
        eos_ids, lookup, ahead = frozenset(manifest.eos_ids), manifest.lookup, manifest.lookahead
        if not request.speculate or manifest.method == "plain" or len(tree) == 1:
            return PlainDrafter()
        if ahead is not None and ahead.window:
            return LookaheadDrafter(tokens, ahead, eos_ids)
        if ahead is not None:  # without a window its n-grams come from the text, which is prompt lookup's index
            lookup = LookupSettings(ahead.ngram, ahead.guesses)
        first: Drafter | None = MedusaDrafter(self.heads, tree) if self.heads is not None else None
        cache = sequence.draft_cache
        if self.draft is not None and cache is not None and len(request.ids) < cache.capacity:
            first = (DraftModelDrafter if manifest.eagle is None else EagleDrafter)(
                self.draft,
                cache,
                tokens,
                tree,
                request.sampling,
                request.uniform,
                eos_ids,
                self.draft_tokens,
                self.target.vocab_size,
                draws=lookup is None,
            )
        if lookup is None:
            return first or PlainDrafter()
        budget = tree if isinstance(tree, DynamicTree) else DynamicTree(len(tree))
        looking_up = PromptLookupDrafter(tokens, lookup, budget, eos_ids)
        return looking_up if first is None else CombinedDrafter(first, looking_up, budget.nodes, budget.floor)

    def _prefill(
        self, request: Request, sequence: SequenceState, drafter: Drafter, stats: Stats, clock: StageClock
    ) -> int:
        """Run what the cache does not hold yet of the prompt; the first token of the answer."""
        features = isinstance(_growing(drafter), EagleDrafter)
        start = stats.reused_tokens = sequence.keep_prefix(request.ids, features)
        cache, most = sequence.cache, min(PREFILL_CHUNK, self._most_rows)
        for begin in range(start, len(request.ids), most):
            chunk = request.ids[begin : begin + most]
            count = len(chunk)
            positions = np.arange(begin, begin + count)
            output = cache.run(np.array(chunk), positions, np.tri(count, dtype=np.bool_), np.array([count - 1]))
            clock.add("prefill", cache.seconds)
            sequence.commit(range(count), chunk)
            drafter.observe(range(count), output)
            clock.add("prefill", drafter.seconds)
        return self._next_token(output, 0, request, sequence.tokens)

    def _verify(self, draft: Draft, cache: Cache) -> StepOutput:
        tree = draft.tree
        return cache.run(draft.tokens, cache.length + tree.depths, tree.mask, tree.nodes)

    def _accept(self, draft: Draft, output: StepOutput, request: Request, before: list[int]) -> Accepted:
        sampling, root, tree = request.sampling, int(draft.tokens[0]), draft.tree
        if self.in_order:
            tree = tree.trunk
        if not sampling.needs_logits:
            accepted = accept_greedy(tree, draft.tokens, output.next_ids[0])
            _require_finite(output, accepted.nodes)
            return accepted

        def distribution_at(node: int, path: list[int]) -> npt.NDArray[np.float64]:
            return distribution(output.logits[0, node], [*before, root, *path], sampling)

        if request.acceptance == "typical" and request.speculate:
            return accept_typical(tree, draft.tokens, distribution_at, request.uniform)
        if draft.sampled_from is not None:
            return accept_drawn(tree, draft.tokens, distribution_at, draft.sampled_from, request.uniform)
        return accept_sampled(tree, draft.tokens, distribution_at, request.uniform)

    def _next_token(self, output: StepOutput, row: int, request: Request, context: list[int]) -> int:
        if not request.sampling.needs_logits:
            _require_finite(output, (row,))
            return int(output.next_ids[0, row])
        return next_token(output.logits[0, row], context, request.sampling, request.uniform)


class Answer:
    """The answer so far: where it ends (end-of-text tokens, stop strings, token limit) and the text still to show."""

    def __init__(self, text: Text, request: Request, eos_ids: frozenset[int]) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._eos_ids, self._limit = eos_ids, request.max_new_tokens
        self._shown = TextStream(text, request.stop)
        self._piece_start, self._piece_text = 0, ""

    def take(self, tokens: Sequence[int]) -> int:
        """Add one round's tokens, as far as the answer goes; returns how many were kept."""
        ended = next((index for index, token in enumerate(tokens, 1) if token in self._eos_ids), None)
        tokens = tokens[:ended]
        shown, stopped = self._shown.push(tokens)
        tokens = tokens[:stopped]
        self.token_ids += tokens
        self._piece_text += shown
        if stopped is not None:
            self.finish_reason = "stop"
        elif ended is not None:
            self.end("eos")
        elif len(self.token_ids) >= self._limit:
            self.end("length")
        return len(tokens)

    def end(self, reason: str) -> None:
        """Nothing more comes; text that was held back is shown, unless it completes a stop string."""
        rest, stopped = self._shown.finish()
        self._piece_text += rest
        self.finish_reason = "stop" if stopped else reason

    def piece(self) -> Piece:
        """What came since the last piece."""
        piece = Piece(self._piece_text, self.token_ids[self._piece_start :], self.finish_reason)
        self.text += self._piece_text
        self._piece_start, self._piece_text = len(self.token_ids), ""
        return piece


def _growing(drafter: Drafter) -> GrowingDrafter | None:
    """The drafter, or the one of two, that runs a draft model or head."""
    first = drafter.first if isinstance(drafter, CombinedDrafter) else drafter
    return first if isinstance(first, GrowingDrafter) else None


def _require_finite(output: StepOutput, rows: Sequence[int]) -> None:
    """Check the logits behind the graph's argmax, in the rows that were used.

    Raises:
        GenerationError: when one is not a number (a damaged or overflowing model would otherwise babble on).
    """
    if not output.finite(rows):
        raise GenerationError("logits: they are not finite (NaN or infinity); the model overflows or is damaged.")


def load(
    bundle_path: str | Path,
    threads: int | None = None,
    provider: str | None = None,
    *,
    backend: str = "onnxruntime",
    fall_back: bool = False,
    capacity: int | None = None,
    check_hashes: bool = True,
) -> Decoder:
    """Open a bundle for generation.

    Args:
        threads: ONNX Runtime's threads; None takes the cores this process may use.
        provider: ONNX Runtime's execution provider; None is the CPU.
        backend: "onnxruntime", or the module that runs the bundle's engines: "tensorrt", "tensorrt_rtx" or
            "tensorrt_lean".
        fall_back: whether the CPU may stand in for a provider that cannot be used here.
        capacity: tokens a sequence may hold (prompt and answer), at most and by default the bundle's max_length, or
            what its engines were built for.
        check_hashes: False skips reading every file once before it is used.

    Raises:
        BundleError: when the bundle is damaged, unsafe, or of another version, or the backend or provider cannot be
            used here.
    """
    bundle = Bundle.open(bundle_path, check_hashes)
    graphs = open_graphs(bundle, threads, provider, backend, fall_back, check_hashes)
    return Decoder(bundle, capacity=capacity, graphs=graphs)


def open_graphs(
    bundle: Bundle,
    threads: int | None = None,
    provider: str | None = None,
    backend: str = "onnxruntime",
    fall_back: bool = False,
    check_hashes: bool = True,
) -> Graphs:
    """A bundle's graphs, run by one backend, whose library is imported only now. For the arguments see `load`."""
    if backend == "onnxruntime":
        from speccompile.runtime.backends.ort import OrtGraphs

        return OrtGraphs(bundle, threads, provider, fall_back)
    if backend not in BACKENDS:
        raise BundleError(f"backend: '{backend}' is unknown; use one of {', '.join(BACKENDS)}.")
    if provider is not None:
        raise BundleError(
            f"provider: '{provider}' is ONNX Runtime's, and the backend '{backend}' has none; leave it out."
        )
    from speccompile.runtime.backends.tensorrt import TrtGraphs

    return TrtGraphs(bundle, backend, check_hashes)
