"""`tune`: replays are what decoding really does, costs are timed as said, and nothing but the manifest changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner

from speccompile.graphs.costs import Costs
from speccompile.graphs.draft_model import DraftTail
from speccompile.graphs.errors import BundleError, SpecCompileError
from speccompile.graphs.gqa import trace_gqa
from speccompile.graphs.manifest import DraftInfo, Manifest, file_info
from speccompile.graphs.passes import finish_gqa_target
from speccompile.graphs.settings import LookaheadSettings, LookupSettings
from speccompile.graphs.target import survey
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree, TokenTree, tree_from_json
from speccompile.runtime import Decoder, load
from speccompile.runtime.backends.ort import OrtCache
from speccompile.runtime.bundle import Bundle
from speccompile.tools.tune import costs as timing
from speccompile.tools.tune import tuning
from speccompile.tools.tune.command import tune as command
from speccompile.tools.tune.costs import CallCosts, DraftCosts, measure_calls, measure_target
from speccompile.tools.tune.recording import Recorded, record
from speccompile.tools.tune.replay import count_ranks, look_ahead, replay
from speccompile.tools.tune.setting import Setting
from speccompile.tools.tune.texts import PROMPTS_FILE, Sample, read_prompts
from speccompile.tools.tune.tuning import measure, tune
from tests.tiny.conftest import EOS_IDS, TREE
from tests.tiny.models import VOCAB, tiny_model
from tests.tiny.test_eagle_drafter import eagle_decoder

__all__ = ["eagle_decoder"]  # a fixture

TEXTS = ("def fibonacci(n):", "one two one two one two", "Why is the sky blue?")
LIMIT = 40
LARGEST = 16
LOOKUP = LookupSettings()


@pytest.fixture(scope="module")
def draft_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target, and itself with noise on its weights as a draft model that is right more often than not."""
    bundle = shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("bundle") / "draft.bundle")
    model, generator = tiny_model("llama"), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.008)
    graph = trace_gqa(model, survey(model, 128), DraftTail(None, 10))
    finish_gqa_target(graph)
    ir.save(graph, bundle / "draft.onnx", external_data="draft.onnx.data")
    data = json.loads((bundle / "manifest.json").read_text())
    data |= {"method": "draft", "heads": None, "tree": {"dynamic": {"nodes": 6}}}
    data["draft"] = asdict(DraftInfo("f", "llama", 3, VOCAB, None, 10, 128, None))
    data["graphs"]["draft"] = data["graphs"]["target"] | {"file": "draft.onnx"}
    data["files"] |= {name: asdict(file_info(bundle / name)) for name in ("draft.onnx", "draft.onnx.data")}
    (bundle / "manifest.json").write_text(json.dumps(data))
    return bundle


@pytest.fixture(scope="module")
def draft_decoder(draft_bundle: Path) -> Decoder:
    return load(draft_bundle, threads=1)


def with_eos(decoder: Decoder, eos_ids: Sequence[int]) -> Decoder:
    other = Setting(decoder.tree, decoder.bundle.manifest.lookup).of(decoder)
    other.bundle = replace(other.bundle, manifest=replace(other.bundle.manifest, eos_ids=list(eos_ids)))
    return other


def samples_of(decoder: Decoder, texts: Sequence[str] = TEXTS) -> list[Sample]:
    samples = []
    for text in texts:
        prompt = decoder.encode(text)[-24:]
        done = decoder.generate(prompt, max_new_tokens=LIMIT, speculate=False, sequence=decoder.new_sequence())
        samples.append(Sample(prompt, done.token_ids, LIMIT, done.stats))
    return samples


# ---- replays ----


def same_as_decoding(decoder: Decoder, settings: Sequence[Setting]) -> int:
    """Check replays against `Decoder.generate`, answer by answer; the number of guesses that were accepted."""
    accepted = 0
    eos_ids = frozenset(decoder.bundle.manifest.eos_ids)
    for sample in samples_of(decoder, TEXTS[1:]):
        notes = record(decoder, sample, LARGEST)
        for setting in settings:
            other = setting.of(decoder)
            done = other.generate(sample.prompt, max_new_tokens=sample.limit, sequence=other.new_sequence())
            assert done.token_ids == sample.answer, setting
            rounds = replay(sample, setting, notes, decoder.capacity, eos_ids)
            assert len(rounds) == done.stats.rounds, setting
            assert sum(r.emitted for r in rounds) == len(done.token_ids) - 1, setting
            assert sum(r.nodes - 1 for r in rounds) == done.stats.drafted, setting
            assert rounds[-1].past + rounds[-1].emitted == len(sample.prompt) + len(sample.answer) - 1, setting
            if decoder.draft is not None:
                assert sum(len(r.calls) for r in rounds) == done.stats.draft_calls, setting
            accepted += done.stats.accepted
    return accepted


def grown_settings(lookup: LookupSettings | None = None) -> list[Setting]:
    numbers: list[tuple[int, float, int, int | None]] = [
        (16, 0.0, 8, None),
        (8, 0.0, 8, None),
        (5, 0.02, 3, None),
        (16, 0.1, 4, None),
        (12, 0.0, 2, None),
        (16, 0.0, 8, 3),
        (6, 0.05, 5, 3),
        (9, 0.0, 8, 1),
        (4, 0.3, 8, 1),
        (2, 0.0, 1, 1),
    ]
    trees: list[DraftTree] = [DynamicTree(*limits) for limits in numbers]
    trees += [TokenTree.chain(1), TokenTree.chain(4), AdaptiveChain(6, 0.2), AdaptiveChain(4), AdaptiveChain(8, 0.6)]
    return [Setting(tree, lookup) for tree in trees]


@pytest.mark.parametrize("eos_ids", [(), EOS_IDS], ids=["endless", "eos"])
def test_medusa_replays_are_exact(tiny_decoder: Decoder, eos_ids: Sequence[int]) -> None:
    trees: list[DraftTree] = [TREE, TokenTree.chain(3), DynamicTree(16), DynamicTree(6, 0.05), DynamicTree(9, 0, 2, 3)]
    settings = [Setting(tree) for tree in trees]
    settings += [Setting(tree, LOOKUP) for tree in (TREE, DynamicTree(8, 0.02))]
    assert same_as_decoding(with_eos(tiny_decoder, eos_ids), settings) > 30


@pytest.mark.parametrize("eos_ids", [(), EOS_IDS], ids=["endless", "eos"])
@pytest.mark.parametrize("which", ["draft_decoder", "eagle_decoder"])
def test_replays_of_what_is_grown_are_exact(which: str, eos_ids: Sequence[int], request: pytest.FixtureRequest) -> None:
    decoder = with_eos(request.getfixturevalue(which), eos_ids)
    merged = [grown_settings(LOOKUP)[place] for place in (1, 3, 11, 12)]
    assert same_as_decoding(decoder, [*grown_settings(), *merged]) > 100


def test_a_cut_is_what_the_smaller_tree_grows_to(draft_decoder: Decoder) -> None:
    """Not only where rounds of a smaller tree would be: at every position, and node by node."""
    decoder = with_eos(draft_decoder, EOS_IDS)
    (sample,) = samples_of(decoder, TEXTS[:1])
    large = record(decoder, sample, LARGEST).grown
    for nodes, depth, top_k in ((2, 1, None), (4, 8, None), (7, 2, None), (12, 3, 3), (5, 5, 3), (6, 4, 1)):
        small = record(decoder, sample, nodes, depth, [top_k]).grown[top_k]
        assert len(small) == len(large[top_k]) == len(sample.answer) - 1
        for ours, theirs in zip(large[top_k], small, strict=True):
            for floor in (0.0, 0.1):
                found = [
                    sorted((grown.tokens[n], grown.ranks[n], round(grown.probabilities[n], 5)) for n in kept)
                    for grown, (kept, _) in ((one, one.cut(nodes, floor, depth)) for one in (ours, theirs))
                ]
                assert found[0] == found[1]
                assert len(found[0]) <= nodes
                levels = [list(map(len, grown.cut(nodes, floor, depth)[1])) for grown in (ours, theirs)]
                assert levels[0] == levels[1]


def test_prompt_lookup_replays_are_exact(tiny_decoder: Decoder) -> None:
    decoder = with_eos(tiny_decoder, [])
    decoder.heads = None
    numbers = ((12, 0.12, 3), (4, 0.0, 1), (32, 0.05, 8))
    settings = [Setting(DynamicTree(nodes, floor), LookupSettings(3, guesses)) for nodes, floor, guesses in numbers]
    settings.append(Setting(DynamicTree(10, 0.05), lookahead=LookaheadSettings(0, 4, 2)))
    assert same_as_decoding(decoder, settings) > 10


def test_lookahead_is_counted_as_decoding_does(tiny_decoder: Decoder) -> None:
    decoder = with_eos(tiny_decoder, EOS_IDS)
    decoder.heads = None
    accepted = 0
    for ahead in (LookaheadSettings(3, 3, 3), LookaheadSettings(5, 2, 4, True)):
        setting = Setting(DynamicTree(ahead.nodes), lookahead=ahead)
        for sample in samples_of(decoder):
            other = setting.of(decoder)
            done = other.generate(sample.prompt, max_new_tokens=LIMIT, sequence=other.new_sequence())
            rounds = look_ahead(decoder, sample, setting)
            assert (len(rounds), sum(r.nodes - 1 for r in rounds)) == (done.stats.rounds, done.stats.drafted)
            assert sum(r.emitted for r in rounds) == len(done.token_ids) - 1
            accepted += done.stats.accepted
    assert accepted > 10


def test_calls_name_the_rows_that_are_run(draft_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catching up, then every level, as the draft model's cache really saw them."""
    decoder = with_eos(draft_decoder, [])
    (sample,) = samples_of(decoder, TEXTS[:1])
    notes = record(decoder, sample, LARGEST)
    seen: list[int] = []
    run = OrtCache.run

    def watched(self: OrtCache, ids: Any, *rest: Any, **more: Any) -> Any:
        if self.target is decoder.draft:
            seen.append(len(ids))
        return run(self, ids, *rest, **more)

    monkeypatch.setattr(OrtCache, "run", watched)
    for tree in (DynamicTree(9, 0.02, 4), TokenTree.chain(3), AdaptiveChain(5)):
        seen.clear()
        other = Setting(tree).of(decoder)
        other.generate(sample.prompt, max_new_tokens=LIMIT, sequence=other.new_sequence())
        rounds = replay(sample, Setting(tree), notes, decoder.capacity, ())
        assert seen == [len(sample.prompt), *(rows for r in rounds for rows in r.calls)]
        assert max(seen[1:]) > 1


def test_ranks_are_counted_at_every_position(tiny_decoder: Decoder) -> None:
    decoder = with_eos(tiny_decoder, [])
    noted = [(sample, record(decoder, sample, LARGEST)) for sample in samples_of(decoder)]
    counts = count_ranks(noted, Setting(TREE), decoder.capacity, ())
    expected: dict[tuple[int, int], int] = {}
    places = [0, 0, 0]
    for sample, notes in noted:
        assert notes.heads is not None
        for done in range(1, len(sample.answer)):
            path: tuple[int, ...] = ()
            while any(other[:-1] == path for other in TREE.paths[1:]) and len(path) < LIMIT - done - 1:
                depth = len(path)
                places[depth] += 1
                wide = [other[-1] for other in TREE.paths[1:] if other[:-1] == path]
                hits = [rank for rank in wide if notes.heads[0][done - 1, depth, rank] == sample.answer[done + depth]]
                if not hits:
                    break
                path = (*path, hits[0])
                expected[depth, hits[0]] = expected.get((depth, hits[0]), 0) + 1
    found = {(d, r): count for d, row in enumerate(counts.right) for r, count in enumerate(row) if count}
    assert (found, counts.places) == (expected, places)
    assert counts.shares()[0][0] == expected[0, 0] / places[0]


# ---- costs ----


def test_costs_are_medians_without_the_first_calls(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[tuple[int, int], int] = {}

    def call(cache: Any, rows: int, seen: int, wanted: int, rng: Any) -> float:
        assert (seen, wanted) == (rows, rows)
        key = cache.length, rows
        calls[key] = calls.get(key, 0) + 1
        noise = {1: 1e6, 2: -7.0, 3: 1e4}.get(calls[key], 0.0)  # the first does not count, the others cancel out
        return cache.length / 10 + rows + noise

    monkeypatch.setattr(timing, "_call", call)
    found = measure_target(tiny_decoder, [1, 3, 8], [20, 50, 1000], sweeps=5)
    capped = tiny_decoder.capacity - 8
    assert found == [[past / 10 + rows for rows in (1, 3, 8)] for past in (20, 50, capped)]


@pytest.mark.parametrize("which", ["tiny_decoder", "draft_decoder", "eagle_decoder"])
def test_calls_of_every_graph_are_timed(which: str, request: pytest.FixtureRequest) -> None:
    decoder = request.getfixturevalue(which)
    lines: list[str] = []
    found = measure_calls(decoder, 2, lines.append)
    assert found.target.tokens == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert found.target.pasts == [decoder.capacity - 64]
    assert found.draft is not None and len(lines) == 3
    assert found.draft.rows == ([1] if decoder.heads is not None else [1, 2, 3, 4, 6, 8, 12, 16, 24])
    for times in (*found.target.target, found.draft.first, found.draft.later):
        assert min(times) > 0
    assert found.target.target[0][-1] > found.target.target[0][0]  # 64 tokens against one


def test_a_filled_cache_holds_what_it_says(tiny_decoder: Decoder) -> None:
    cache = timing._filled(tiny_decoder.target, 10, 5, np.random.default_rng(0))
    assert (cache.length, cache.capacity) == (10, 15)
    assert np.count_nonzero(cache.buffer[:, 0, :, :10]) == cache.buffer[:, 0, :, :10].size


# ---- texts ----


def test_prompts_take_turns(tiny_decoder: Decoder, tmp_path: Path) -> None:
    tuned, held_out = read_prompts(tiny_decoder, None, 100)
    assert (len(tuned), len(held_out)) == (16, 16)
    assert all(len(ids) <= tiny_decoder.capacity // 2 for ids in (*tuned, *held_out))
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\n\nc\n")
    ids = {text: tiny_decoder.encode([{"role": "user", "content": text}]) for text in "abc"}
    assert read_prompts(tiny_decoder, file, 1) == ([ids["a"]], [ids["b"]])
    assert read_prompts(tiny_decoder, file, 9) == ([ids["a"], ids["c"]], [ids["b"]])
    file.write_text("a\n")
    with pytest.raises(SpecCompileError, match=r"prompts.txt: it has 1 prompts .* give two prompts or more"):
        read_prompts(tiny_decoder, file, 9)


def test_our_prompts_are_no_benchmarks() -> None:
    from speccompile.tools.prompts import first_turns

    ours, theirs = PROMPTS_FILE.read_text("utf-8").splitlines(), first_turns()
    words = [set(text.lower().split()) for text in theirs]
    for text in ours:
        own = set(text.lower().split())
        assert max(len(own & other) / len(own | other) for other in words) < 0.35, text
    assert len(ours) == len(set(ours)) == 32


# ---- the whole ----


def flat(ms_a_row: float) -> CallCosts:
    """A step of a second, to which every further row adds so much: host time does not matter beside it."""
    tokens = [1, 2, 4, 8, 16, 32]
    table = [[1000.0 + ms_a_row * (count - 1) for count in tokens]]
    return CallCosts(Costs(tokens, [50], table), DraftCosts([1, 8], [10.0, 10.0], [10.0, 10.0]))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{text}\n{text} Now\n" for text in TEXTS))
    return file


def tuned(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, ms_a_row: float, gain: float = 1.5, **options: Any
) -> Manifest:
    """`tune` on made-up costs, and with a made-up measurement."""
    measured = {"speedup": gain, "mean_accepted_tokens": 1.0, "tokens": 9}
    monkeypatch.setattr(tuning, "measure_calls", lambda decoder, report: flat(ms_a_row))
    monkeypatch.setattr(tuning, "measure", lambda *arguments: measured)
    return tune(bundle, text=prompts, threads=1, **{"max_new_tokens": 24} | options)


def copied(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy.bundle")


def test_the_manifest_alone_changes(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in bundle.iterdir()}
    old = Bundle.open(bundle).manifest
    assert tuned(bundle, prompts, monkeypatch, 5.0, dry_run=True).costs is not None
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in bundle.iterdir()} == before
    manifest = tuned(bundle, prompts, monkeypatch, 5.0)
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in bundle.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"} and set(after) == set(before)
    assert Bundle.open(bundle).manifest == manifest
    assert replace(manifest, tree=old.tree, costs=None, measured={}) == old
    assert manifest.costs == replace(flat(5.0).target, draft=manifest.costs.draft, host=manifest.costs.host)  # type: ignore[union-attr]
    measured = manifest.measured
    assert measured["choice"]["tree"] == manifest.tree == measured["candidates"][0]["tree"]
    assert (measured["off"], measured["measured"]["tokens"], measured["machine"]["threads"]) == (False, 9, 1)
    gains = [candidate["speedup"] for candidate in measured["candidates"]]
    assert gains == sorted(gains, reverse=True) and len(gains) == 5


@pytest.mark.parametrize("which", ["tiny_bundle", "draft_bundle"])
def test_the_prediction_is_what_decoding_comes_to(
    which: str, prompts: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With known costs, rounds and tokens of real decoding give the predicted gain, and no smaller or larger tree a
    better one."""
    bundle = request.getfixturevalue(which)
    manifest = tuned(bundle, prompts, monkeypatch, 30.0, dry_run=True)
    decoder = load(bundle, threads=1)
    texts, held_out = read_prompts(decoder, prompts, 16)

    def gain(tree: DraftTree, asked: list[list[int]] = texts) -> tuple[float, float]:
        other = Setting(tree).of(decoder)
        done = [other.generate(ids, max_new_tokens=24, sequence=other.new_sequence()).stats for ids in asked]
        emitted, rounds = sum(s.emitted - 1 for s in done), sum(s.rounds for s in done)
        calls = sum(s.draft_calls for s in done) if decoder.draft is not None else rounds - len(done)
        spent = rounds * 1000 + sum(s.drafted for s in done) * 30 + calls * 10
        return emitted * 1000 / spent, emitted / rounds

    tree = tree_from_json(manifest.tree)
    for figures, asked in ((manifest.measured["candidates"][0], texts), (manifest.measured["predicted"], held_out)):
        speedup, accepted = gain(tree, asked)
        assert accepted == pytest.approx(figures["mean_accepted_tokens"])
        assert speedup == pytest.approx(figures["speedup"], rel=0.02)
    speedup, _ = gain(tree)
    assert speedup > 1.2
    assert isinstance(tree, DynamicTree | TokenTree)
    others: list[DraftTree] = [TREE] if which == "tiny_bundle" else []  # trees of fixed ranks are not tried for drafts
    others += [TokenTree.chain(1), TokenTree.chain(3), DynamicTree(4, 0.1), DynamicTree(32), DynamicTree(16, 0.05)]
    for other in others:
        assert gain(other)[0] < speedup * 1.02


def test_where_every_row_costs_a_step_nothing_is_drafted(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    manifest = tuned(bundle, prompts, monkeypatch, 1000.0, gain=0.7)
    assert manifest.measured["off"] and manifest.measured["predicted"]["speedup"] < 1
    assert manifest.tree == {"paths": []} == manifest.measured["choice"]["tree"]
    assert len(tree_from_json(manifest.measured["candidates"][0]["tree"])) > 1  # what was measured to lose
    done = load(bundle, threads=1).generate(TEXTS[0], max_new_tokens=10)
    assert (done.stats.drafted, len(done.token_ids)) == (0, 10)
    # Tuned again where rows are cheap, it drafts again.
    assert not tuned(bundle, prompts, monkeypatch, 5.0).measured["off"]
    assert load(bundle, threads=1).generate(TEXTS[0], max_new_tokens=10).stats.drafted > 0


def test_what_was_measured_to_lose_is_off(tiny_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = tuned(tiny_bundle, prompts, monkeypatch, 5.0, gain=0.99, dry_run=True)
    assert manifest.measured["candidates"][0]["speedup"] > 1.2
    assert manifest.measured["off"] and manifest.tree == {"paths": []}


def test_an_interrupt_leaves_the_old_manifest(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    before = (bundle / "manifest.json").read_bytes()

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuned(bundle, prompts, monkeypatch, 5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuned(bundle, prompts, monkeypatch, 5.0)
    assert (bundle / "manifest.json").read_bytes() == before
    assert {path.name for path in bundle.iterdir()} == {path.name for path in tiny_bundle.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(BundleError, match=r"copy.bundle: cannot be written.* use --dry-run"):
            tuned(bundle, prompts, monkeypatch, 5.0)


def test_measuring_decodes_in_turns(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = with_eos(tiny_decoder, [])
    texts = [decoder.encode(text)[-24:] for text in TEXTS]
    order: list[bool] = []
    generate = Decoder.generate

    def timed(self: Decoder, prompt: Any, **options: Any) -> Any:
        """Plain rounds of 8 ms; speculative ones of 10, 2 of them drafting and 1 outside."""
        order.append(options["speculate"])
        done = generate(self, prompt, **options)
        parts = {"draft": 2e-3, "verify": 7e-3, "host": 1e-3} if options["speculate"] else {"verify": 8e-3}
        done.stats.seconds = dict.fromkeys(done.stats.seconds, 0.0) | {"prefill": 9.0}
        done.stats.seconds |= {stage: seconds * done.stats.rounds for stage, seconds in parts.items()}
        return done

    monkeypatch.setattr(Decoder, "generate", timed)
    found = measure(decoder, Setting(TREE), texts, 20)
    assert order[2:] in ([False, True, True, False, False, True], [True, False, False, True, True, False])
    monkeypatch.undo()
    other = Setting(TREE).of(decoder)
    rounds = sum(other.generate(ids, max_new_tokens=20, sequence=other.new_sequence()).stats.rounds for ids in texts)
    assert found["tokens"] == 3 * 19
    assert found["mean_accepted_tokens"] == pytest.approx(57 / rounds)
    assert found["speedup"] == pytest.approx(8 * 57 / (10 * rounds))
    assert (found["plain_ms"], found["round_ms"], found["draft_ms"], found["host_ms"]) == pytest.approx((8, 10, 2, 1))


def test_the_command_line(tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """Everything for real, if only a little of it."""
    bundle = copied(tiny_bundle, tmp_path)
    options = [str(bundle), "--text", str(prompts), "--prompts", "1", "--max-new-tokens", "8", "--threads", "1"]
    done = CliRunner().invoke(command, [*options, "--json"], catch_exceptions=False)
    measured = json.loads(done.stdout)
    manifest = Bundle.open(bundle).manifest
    assert manifest.measured == measured and manifest.costs is not None
    assert measured["predicted"]["host_ms"] == manifest.costs.host > 0
    assert measured["predicted"]["draft_ms"] == manifest.costs.draft > 0
    assert 0 < measured["measured"]["speedup"] < 10
    assert len(measured["acceptance"]["shares"]) == 3 and 0 < sum(measured["acceptance"]["shares"][0]) <= 1
    done = CliRunner().invoke(command, [*options, "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0 and "gain over plain decoding" in done.output and "nothing was" in done.output
    assert Bundle.open(bundle).manifest.measured == measured


def test_lookahead_and_prompt_lookup_are_tuned(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    monkeypatch.setattr("speccompile.tools.tune.search.WINDOWS", ((2, 2, 2), (3, 3, 3)))
    data = json.loads((bundle / "manifest.json").read_text())
    data |= {"heads": None, "eos_ids": []}
    for method, field, value in (
        ("prompt-lookup", "lookup", {"ngram": 2, "guesses": 4, "newest": False}),
        ("lookahead", "lookahead", {"window": 5, "ngram": 3, "guesses": 5, "from_prompt": False}),
    ):
        data |= {"method": method, "lookup": None, "lookahead": None, field: value, "tree": {"dynamic": {"nodes": 20}}}
        (bundle / "manifest.json").write_text(json.dumps(data))
        manifest = tuned(bundle, prompts, monkeypatch, 1.0, max_new_tokens=50)
        assert not manifest.measured["off"], method
        if method == "prompt-lookup":
            assert manifest.lookup is not None and (manifest.lookup.ngram, manifest.lookup.newest) == (2, False)
            assert "dynamic" in manifest.tree and manifest.measured["acceptance"]["shares"]
        else:
            assert manifest.lookahead is not None and manifest.lookup is None
        decoder = load(bundle, threads=1)
        texts, _ = read_prompts(decoder, prompts, 16)
        done = [decoder.generate(ids, max_new_tokens=50, sequence=decoder.new_sequence()).stats for ids in texts]
        accepted = sum(s.emitted - 1 for s in done) / sum(s.rounds for s in done)
        assert accepted == pytest.approx(manifest.measured["candidates"][0]["mean_accepted_tokens"])


def test_a_plain_bundle_gets_its_costs(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    data = json.loads((bundle / "manifest.json").read_text())
    data |= {"method": "plain", "heads": None, "tree": {"paths": []}}
    (bundle / "manifest.json").write_text(json.dumps(data))
    manifest = tuned(bundle, prompts, monkeypatch, 20.0)
    assert Bundle.open(bundle).manifest == manifest
    assert manifest.costs == flat(20.0).target
    assert (manifest.measured["choice"], manifest.measured["off"]) == (None, True)


def test_a_prompt_without_an_answer_is_refused(
    tiny_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "measure_calls", lambda decoder, report: flat(1.0))
    with pytest.raises(SpecCompileError, match="none of 3 prompts has an answer of two tokens or more"):
        tune(tiny_bundle, text=prompts, max_new_tokens=1, threads=1, dry_run=True)


def test_nothing_is_recorded_where_nothing_drafts(tiny_decoder: Decoder) -> None:
    decoder = with_eos(tiny_decoder, [])
    decoder.heads = None
    assert record(decoder, samples_of(decoder, TEXTS[:1])[0], 8) == Recorded()
