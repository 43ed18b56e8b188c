"""Who answers: bundles, plain and speculative, and variants of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from speccompile.graphs.errors import SpecCompileError
from speccompile.graphs.settings import LOOKUP_TREE, LookaheadSettings, LookupSettings
from speccompile.graphs.tree import DraftTree, DynamicTree
from speccompile.runtime import Decoder, load
from speccompile.runtime.stats import Stats


@dataclass(frozen=True)
class Asked:
    """What every contestant is asked for: so many tokens, the best ones or (temperature above 0) drawn ones."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """New token ids, an end-of-text token included when one came.

    Args:
        stats: None from a program that keeps none of ours.
        counted: how many tokens were generated, where `tokens` had to be read back from a text.
    """

    tokens: list[int]
    stats: Stats | None = None
    counted: int | None = None

    def __len__(self) -> int:
        return len(self.tokens) if self.counted is None else self.counted


@dataclass(frozen=True)
class Run:
    """One reply, and the wall seconds it took."""

    seconds: float
    reply: Reply


@dataclass(eq=False)
class Contestant:
    """One way of answering a prompt.

    Args:
        answer: new tokens for the token ids of a prompt, from an empty cache.
        decoder: of a bundle; None for another program.
        plain: who decodes the same graph plainly; None for whoever does so itself, and for another program.
        prepare: what must be known about a prompt before it is answered; not timed.
        facts: what is known of it beforehand, for the report.
    """

    name: str
    answer: Callable[[list[int]], Reply]
    decoder: Decoder | None = None
    plain: Contestant | None = None
    prepare: Callable[[list[int]], None] = lambda ids: None
    facts: dict[str, Any] = field(default_factory=dict)
    runs: list[list[Run]] = field(default_factory=list)  # by prompt, then by repeat

    def run(self, number: int, ids: list[int]) -> None:
        """Answer prompt `number` once more."""
        self.prepare(ids)
        before = perf_counter()
        reply = self.answer(ids)
        seconds = perf_counter() - before
        self.runs += [[] for _ in range(number + 1 - len(self.runs))]
        self.runs[number].append(Run(seconds, reply))


def bundle_contestant(
    name: str, decoder: Decoder, asked: Asked, plain: Contestant | None = None, **more: Any
) -> Contestant:
    """A bundle: decoding as it was built to, or plainly when no `plain` contestant is given to compare it with."""

    def answer(ids: list[int]) -> Reply:
        done = decoder.generate(
            ids,
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            speculate=plain is not None,
            sequence=decoder.new_sequence(),
        )
        return Reply(done.token_ids, done.stats)

    return Contestant(name, answer, decoder, plain, **more)


# ---- several bundles ----


def load_all(paths: Sequence[Path], threads: int | None) -> list[Decoder]:
    """Open bundles. Those with the same target graph share one session of it.

    Raises:
        SpecCompileError: when one is given twice, or their tokenizers differ, so that they cannot be asked the same.
    """
    decoders: list[Decoder] = []
    for path in paths:
        if any(path.resolve() == other.bundle.path.resolve() for other in decoders):
            raise SpecCompileError(f"{path}: this bundle is given twice; name each one once.")
        decoder = load(path, threads)
        first = (decoders or [decoder])[0]
        ours, theirs = (d.bundle.manifest.tokenizer.fingerprint for d in (decoder, first))
        if ours != theirs:
            raise SpecCompileError(
                f"{path}: tokenizer.fingerprint is {ours[:12]}... but that of {first.bundle.path} is {theirs[:12]}...; "
                "only bundles of one tokenizer can be asked the same, compare them in separate runs."
            )
        same = next((other for other in decoders if target_of(other) == target_of(decoder)), decoder)
        decoder.target = same.target
        decoders.append(decoder)
    return decoders


def target_of(decoder: Decoder) -> tuple[object, ...]:
    """What two bundles with the same target graph have in common: its weights, its files and their hashes."""
    manifest = decoder.bundle.manifest
    graph = manifest.graphs["target"].file
    files = sorted((name, info.sha256) for name, info in manifest.files.items() if name.startswith(graph))
    return manifest.target.fingerprint, *files


def plain_contestants(decoders: Sequence[Decoder], asked: Asked) -> list[Contestant]:
    """Plain decoding of every target graph, in the order of the bundles: "plain", or, when they are several, with the
    precision behind it, or the bundle's stem where that does not tell them apart."""
    of_graph: dict[tuple[object, ...], Decoder] = {}
    for decoder in decoders:
        of_graph.setdefault(target_of(decoder), decoder)
    labels = _distinct([[_precision(decoder), *_names(decoder)] for decoder in of_graph.values()])
    names = [f"plain {label}" for label in labels] if len(labels) > 1 else ["plain"]
    return [bundle_contestant(name, decoder, asked) for name, decoder in zip(names, of_graph.values(), strict=True)]


def speculative_contestants(
    decoders: Sequence[Decoder], plains: Sequence[Contestant], asked: Asked
) -> list[Contestant]:
    """Every bundle that speculates: called by its method, or by its stem where several have the same."""
    ways = [decoder for decoder in decoders if decoder.bundle.manifest.method != "plain"]
    names = _distinct([[decoder.bundle.manifest.method, *_names(decoder)] for decoder in ways])
    return [
        bundle_contestant(name, decoder, asked, plain_of(decoder, plains))
        for name, decoder in zip(names, ways, strict=True)
    ]


def plain_of(decoder: Decoder, plains: Sequence[Contestant]) -> Contestant:
    """Who decodes the same target graph plainly."""
    return next(p for p in plains if p.decoder is not None and target_of(p.decoder) == target_of(decoder))


def _precision(decoder: Decoder) -> str:
    return decoder.bundle.manifest.graphs["target"].precision


def _names(decoder: Decoder) -> tuple[str, str]:
    return decoder.bundle.path.stem, str(decoder.bundle.path)


def _distinct(choices: Sequence[Sequence[str]]) -> list[str]:
    """For each, the first of its names that nobody else could be called by."""
    return [
        next(name for name in own if all(name not in other for other in choices if other is not own)) for own in choices
    ]


# ---- variants ----


def variant(decoder: Decoder, tree: DraftTree, **changes: Any) -> Decoder:
    """The same loaded graphs with another tree and other fields in the manifest.

    What `tune` measured is left out: it was for the bundle's own tree, and a variant is there to be tried, so it drafts
    even where that does not pay.
    """
    other = copy.copy(decoder)
    manifest = replace(decoder.bundle.manifest, **{"costs": None, **changes})
    other.bundle = replace(decoder.bundle, manifest=manifest, tree=tree)
    other.tree, other.pace = tree, None
    return other


def lookup_variant(decoder: Decoder) -> Decoder:
    """Prompt lookup, whatever the bundle was built for."""
    other = variant(decoder, LOOKUP_TREE, method="prompt-lookup", lookup=LookupSettings(), lookahead=None)
    other.heads = other.draft = None
    return other


def lookahead_variant(decoder: Decoder, numbers: str) -> Decoder:
    """Lookahead with W,N,G, whatever the bundle was built for."""
    try:
        window, ngram, guesses = map(int, numbers.split(","))
    except ValueError as error:
        raise SpecCompileError(f"--lookahead: '{numbers}' is not W,N,G; give three whole numbers.") from error
    settings = LookaheadSettings(window, ngram, guesses)
    other = variant(decoder, DynamicTree(settings.nodes), method="lookahead", lookahead=settings, lookup=None)
    other.heads = other.draft = None
    return other


def joined_variants(ways: Sequence[Contestant], asked: Asked) -> Iterator[Contestant]:
    """Every contestant that drafts with a graph, its guesses joined by prompt lookup's.

    Raises:
        SpecCompileError: when there is none.
    """
    drafting = [way for way in ways if way.decoder is not None and (way.decoder.heads or way.decoder.draft)]
    if not drafting:
        raise SpecCompileError("--also: no bundle here has heads or a draft for prompt lookup to join; give one.")
    for way in drafting:
        assert way.decoder is not None
        joined = variant(way.decoder, way.decoder.tree, lookup=LookupSettings())
        yield bundle_contestant(f"{way.name} and lookup", joined, asked, way.plain)
