"""Draft models, lookahead, prompt lookup and their combination, from the command line to sampled answers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from scipy.stats import chisquare

from speccompile.compiler.build import build, verify
from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.cli import compare
from speccompile.compiler.draft_model import cut_model, write_draft
from speccompile.compiler.inspection import describe
from speccompile.graphs.errors import CheckpointError, ProofError, SpecCompileError
from speccompile.graphs.settings import LookaheadSettings, LookupSettings
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree, TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime.acceptance import accept_drawn
from speccompile.runtime.backends.ort import OrtCache
from speccompile.runtime.stats import Stats
from tests.tiny.conftest import EOS_IDS, Cli, save_tiny_model, write_tokenizer
from tests.tiny.models import VOCAB, tiny_model
from tests.tiny.test_bundle import edit_manifest, rehash

TEXTS = ("def fibonacci(n):", "the fox and the crow", "one two one two one two", "Why is the sky blue?")
TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
DRAFT_TREES: dict[str, DraftTree] = {
    "chain": TokenTree.chain(3),
    "tree": TREE,
    "dynamic": DynamicTree(8, 0.02),
    "adaptive": AdaptiveChain(6, 0.2),
}
LOOKAHEADS = [(5, 3, 5), (7, 5, 7), (3, 2, 2), (0, 3, 4)]


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """The tiny target with noise on its weights: a draft model that is right more often than not."""
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.008)
    folder = tmp_path_factory.mktemp("checkpoint") / "draft"
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def draft_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, draft_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "draft.bundle"
    build(tiny_checkpoint, out, method="draft", draft=draft_checkpoint, tree=TREE)
    return out


@pytest.fixture(scope="session")
def draft_decoder(draft_bundle: Path) -> Decoder:
    return load(draft_bundle, threads=1)


def changed(decoder: Decoder, tree: DraftTree, eos_ids: list[int] | None = None, **fields: Any) -> Decoder:
    """The same loaded graphs with another tree and other fields in the manifest."""
    manifest = decoder.bundle.manifest
    manifest = replace(manifest, eos_ids=manifest.eos_ids if eos_ids is None else eos_ids, **fields)
    other = copy.copy(decoder)
    other.bundle, other.tree, other._default = replace(decoder.bundle, manifest=manifest, tree=tree), tree, None
    return other


def without_graphs(decoder: Decoder, **fields: Any) -> Decoder:
    """The same target without heads."""
    other = changed(decoder, DynamicTree(12, 0.02), **fields)
    other.heads = None
    return other


def lookahead_decoder(decoder: Decoder, numbers: tuple[int, int, int], **fields: Any) -> Decoder:
    return without_graphs(decoder, method="lookahead", lookahead=LookaheadSettings(*numbers), **fields)


def methods(tiny: Decoder, drafting: Decoder, eos_ids: list[int]) -> Iterator[tuple[str, Decoder]]:
    for name, tree in DRAFT_TREES.items():
        yield f"draft {name}", changed(drafting, tree, eos_ids)
    for numbers in LOOKAHEADS:
        yield f"lookahead {numbers}", lookahead_decoder(tiny, numbers, eos_ids=eos_ids)
    yield "prompt-lookup", without_graphs(tiny, method="prompt-lookup", lookup=LookupSettings(), eos_ids=eos_ids)
    yield "oldest", without_graphs(tiny, method="prompt-lookup", lookup=LookupSettings(2, 1, False), eos_ids=eos_ids)
    yield "also, fixed tree", changed(tiny, tiny.tree, eos_ids, lookup=LookupSettings())
    yield "also, dynamic tree", changed(tiny, DynamicTree(10, 0.02), eos_ids, lookup=LookupSettings())
    for name in ("tree", "dynamic"):
        yield f"also, draft {name}", changed(drafting, DRAFT_TREES[name], eos_ids, lookup=LookupSettings())


def answer(decoder: Decoder, prompt: Any, **options: Any) -> Any:
    return decoder.generate(prompt, sequence=decoder.new_sequence(), **options)


# ---- the same tokens ----


@pytest.mark.parametrize("eos_ids", [[], EOS_IDS], ids=["endless", "eos"])
def test_greedy_answers_are_those_of_plain_decoding(
    tiny_decoder: Decoder, draft_decoder: Decoder, eos_ids: list[int]
) -> None:
    prompts = [tiny_decoder.encode(text)[-40:] for text in TEXTS]
    for name, decoder in methods(tiny_decoder, draft_decoder, eos_ids):
        accepted = 0
        for prompt in prompts:
            plain = answer(decoder, prompt, max_new_tokens=70, speculate=False)
            ours = answer(decoder, prompt, max_new_tokens=70)
            assert (ours.token_ids, ours.finish_reason) == (plain.token_ids, plain.finish_reason), name
            assert ours.stats.emitted == len(ours.token_ids)
            assert ours.stats.accepted <= ours.stats.tested <= ours.stats.drafted
            accepted += ours.stats.accepted
        assert accepted > 10, name


def test_limits_are_kept_to_the_last_token(tiny_decoder: Decoder, draft_decoder: Decoder) -> None:
    prompt = tiny_decoder.encode(TEXTS[2])
    room = tiny_decoder.capacity
    for name, decoder in methods(tiny_decoder, draft_decoder, []):
        for limit in (1, 2, 3):
            assert len(answer(decoder, prompt, max_new_tokens=limit).token_ids) == limit, name
        full = answer(decoder, prompt, max_new_tokens=1000)
        assert full.finish_reason == "capacity", name
        assert len(full.token_ids) == room - len(prompt) + 1, name
        one = answer(decoder, prompt[:1], max_new_tokens=12)  # shorter than any n-gram
        assert one.token_ids == answer(decoder, prompt[:1], max_new_tokens=12, speculate=False).token_ids, name


def test_a_conversation_goes_on_where_it_was(tiny_decoder: Decoder, draft_decoder: Decoder) -> None:
    """Kept prefixes, longer and shorter ones, in the target's cache and in the draft model's."""
    text = tiny_decoder.encode(TEXTS[0])
    for name, decoder in methods(tiny_decoder, draft_decoder, []):
        sequence = decoder.new_sequence()
        first = decoder.generate(text, max_new_tokens=20, sequence=sequence)
        longer = [*text, *first.token_ids, 7, 8, 9]
        for prompt in (longer, text[:5], [*longer[:12], 30, 31], text):
            got = decoder.generate(prompt, max_new_tokens=20, sequence=sequence)
            assert got.token_ids == answer(decoder, prompt, max_new_tokens=20, speculate=False).token_ids, name
        assert got.stats.reused_tokens == 12 if len(text) > 12 else len(text) - 1, name


def test_penalties_and_biases_act_on_drafts_too(tiny_decoder: Decoder, draft_decoder: Decoder) -> None:
    prompt = tiny_decoder.encode(TEXTS[1])
    options: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {11: 2.0, 12: float("-inf")}}
    for name, decoder in methods(tiny_decoder, draft_decoder, []):
        ours, plain = (answer(decoder, prompt, max_new_tokens=40, speculate=s, **options) for s in (True, False))
        assert ours.token_ids == plain.token_ids, name
        if name == "draft chain":
            assert ours.stats.accepted > 5  # the draft model guesses what is left under the same rules


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_chosen_drafts_do_not_change_what_a_seed_draws(
    tiny_decoder: Decoder, draft_decoder: Decoder, temperature: float
) -> None:
    prompt = tiny_decoder.encode(TEXTS[1])
    for name, decoder in methods(tiny_decoder, draft_decoder, []):
        if name.startswith("draft") and name != "draft dynamic":
            continue  # these draw their guesses from the same numbers
        for seed in range(3):
            ours, plain = (
                answer(decoder, prompt, max_new_tokens=30, temperature=temperature, top_p=0.9, seed=seed, speculate=s)
                for s in (True, False)
            )
            assert ours.token_ids == plain.token_ids, name


# ---- drawn drafts ----

LENGTH, SAMPLES = 3, 1500


def chances(decoder: Decoder, prompt: list[int], **options: Any) -> dict[tuple[int, ...], float]:
    """Probability of every answer of LENGTH tokens, from transformers-free float64 arithmetic on plain logits."""
    temperature, top_k, top_p = options["temperature"], options["top_k"], options["top_p"]
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in table.items():
            text = np.array([*prompt, *path])
            chain = TokenTree.chain(len(text) - 1)
            out = decoder.target.open(len(text)).run(text, chain.depths, chain.mask, np.array([len(text) - 1]))
            scores = out.logits[0, 0].astype(np.float64) / temperature
            order = np.argsort(-scores)[:top_k]
            weights = np.exp(scores[order] - scores[order[0]])
            weights /= weights.sum()
            kept = int(np.searchsorted(np.cumsum(weights), top_p)) + 1
            weights = weights[:kept] / weights[:kept].sum()
            for token, weight in zip(order, weights, strict=False):
                longer[(*path, int(token))] = probability * float(weight)
        table = longer
    return table


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("tree", ["chain", "tree", "adaptive"])
def test_answers_to_drawn_drafts_have_the_targets_chances(
    draft_decoder: Decoder, tree: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"temperature": 2 * temperature, "top_k": 4, "top_p": 0.9}
    decoder = changed(draft_decoder, DRAFT_TREES[tree], [])
    prompt = decoder.encode(TEXTS[1])[-12:]
    table = chances(decoder, prompt, **options)
    assert 0.999 < sum(table.values()) < 1.001 and len(table) >= 8
    value, accepted = p_value(decoder, prompt, table, options)
    assert value > 1e-3
    assert accepted > SAMPLES / 3
    if (tree, temperature) == ("chain", 0.7):  # the rule must know the q that was drawn from

        def careless(tree: TokenTree, tokens: Any, distribution_at: Any, sampled_from: Any, uniform: Any) -> Any:
            swapped = {node: np.where(q > 0, 1 / np.maximum(q, 1e-3), 0) for node, q in sampled_from.items()}
            swapped = {node: q / q.sum() for node, q in swapped.items()}
            return accept_drawn(tree, tokens, distribution_at, swapped, uniform)

        monkeypatch.setattr("speccompile.runtime.decoder.accept_drawn", careless)
        assert p_value(decoder, prompt, table, options)[0] < 1e-6


def p_value(decoder: Decoder, prompt: list[int], table: dict[Any, float], options: Any) -> tuple[float, int]:
    counts: dict[Any, int] = dict.fromkeys(table, 0)
    accepted, sequence = 0, decoder.new_sequence()
    for seed in range(SAMPLES):
        got = decoder.generate(prompt, max_new_tokens=LENGTH, seed=seed, sequence=sequence, **options)
        counts[tuple(got.token_ids)] += 1  # a KeyError: an answer that has no chance came out
        accepted += got.stats.accepted
    common = [path for path, probability in table.items() if probability * SAMPLES >= 5]
    observed, expected = [counts[path] for path in common], [table[path] * SAMPLES for path in common]
    if (rest := SAMPLES - sum(expected)) > 1e-6:
        observed, expected = [*observed, SAMPLES - sum(observed)], [*expected, rest]
    return float(chisquare(observed, np.array(expected) * SAMPLES / sum(expected)).pvalue), accepted


# ---- bundles ----


def test_a_draft_bundle_is_proved_and_verified_again(
    draft_bundle: Path, draft_decoder: Decoder, tiny_checkpoint: Path, draft_checkpoint: Path
) -> None:
    manifest = draft_decoder.bundle.manifest
    for name in ("draft", "draft_topk", "draft_int8"):
        assert 0 < manifest.proof[name]["difference"] <= manifest.proof[name]["bound"]
    assert manifest.draft is not None and (manifest.draft.layers, manifest.draft.draft_vocabulary) == (3, VOCAB)
    figures = verify(draft_bundle, tiny_checkpoint, draft=draft_checkpoint, threads=1)
    assert set(figures) == set(manifest.proof) - {"draft"}  # the graph before rounding is not in the bundle
    with pytest.raises(SpecCompileError, match="its draft model had fingerprint"):
        verify(draft_bundle, tiny_checkpoint, draft=tiny_checkpoint, threads=1)


def test_a_draft_graph_that_says_something_else_is_not_published(
    tiny_checkpoint: Path, draft_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OrtCache.run

    def unmasked(self: OrtCache, ids: Any, positions: Any, mask: Any, rows: Any, past: Any = None) -> Any:
        if self.target.top_k and mask.shape[0] < mask.shape[1]:  # a level of the draft model's tree
            mask = np.ones_like(mask)
        return run(self, ids, positions, mask, rows, past)

    monkeypatch.setattr(OrtCache, "run", unmasked)
    with pytest.raises(ProofError, match=r"proof 'draft': .* its tree mask or positions\. Nothing was published"):
        build(tiny_checkpoint, tmp_path / "out", method="draft", draft=draft_checkpoint)
    assert not list(tmp_path.iterdir())


def test_a_slim_draft_shares_the_targets_embedding(tmp_path: Path) -> None:
    """Layers cut out of a tied target, with a draft vocabulary of 50 tokens."""
    model = tiny_model("llama-tied")
    model.generation_config.eos_token_id = EOS_IDS
    model.save_pretrained(tmp_path / "target")
    write_tokenizer(tmp_path / "target")
    source = read_model(tmp_path / "target")
    token_ids = torch.arange(5, 305, 6)
    write_draft(cut_model(source, (0, 2), token_ids), tmp_path / "draft")
    manifest = build(tmp_path / "target", tmp_path / "b", method="draft", draft=tmp_path / "draft")
    assert manifest.draft is not None
    assert (manifest.draft.draft_vocabulary, manifest.draft.target_fingerprint) == (50, source.fingerprint)
    graph = ir.load(tmp_path / "b" / "draft.onnx").graph
    table = next(node for node in graph if node.op_type == "Gather").inputs[0]
    assert table is not None and isinstance(table.const_value, ir.ExternalTensor)
    assert table.const_value.location == "target.onnx.data"
    np.testing.assert_array_equal(table.const_value.numpy(), model.get_input_embeddings().weight.detach().numpy())
    decoder = load(tmp_path / "b", threads=1)
    np.testing.assert_array_equal(decoder.draft_tokens, token_ids.numpy())
    facts = describe(tmp_path / "draft")
    assert (facts["kind"], facts["layers"], facts["target_fingerprint"]) == ("draft model", [0, 2], source.fingerprint)
    prompt = decoder.encode(TEXTS[0])
    for tree in DRAFT_TREES.values():
        ours = answer(changed(decoder, tree, []), prompt, max_new_tokens=40)
        assert (
            ours.token_ids == answer(changed(decoder, tree, []), prompt, max_new_tokens=40, speculate=False).token_ids
        )
        assert ours.stats.drafted > 0
    file = tmp_path / "b" / "draft_tokens.npy"
    repeated = token_ids.numpy().copy()
    repeated[7] = repeated[6]  # q would add up to less than 1
    for ids in (repeated, token_ids.numpy()[::-1].copy(), token_ids.numpy() + 300, token_ids.numpy().astype(np.int32)):
        np.save(file, ids)
        rehash(tmp_path / "b", file.name)
        with pytest.raises(
            SpecCompileError, match=r"draft_tokens\.npy: int.* of shape .* ascending token ids below 320"
        ):
            load(tmp_path / "b", threads=1)
    file.write_bytes(b"not an array")
    with pytest.raises(SpecCompileError, match=r"draft_tokens\.npy: \d+ bytes but"):
        load(tmp_path / "b")


def test_settings_of_another_method_are_refused(draft_bundle: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(draft_bundle, tmp_path / "copy")
    settings = {"window": 5, "ngram": 3, "guesses": 5, "from_prompt": False}
    edit_manifest(copied, lambda manifest: manifest.update({"lookahead": settings}))
    with pytest.raises(SpecCompileError, match="field 'lookahead' is set, but method 'draft' has no use for it"):
        load(copied, threads=1)


def test_a_draft_graph_that_is_not_the_manifests(draft_bundle: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(draft_bundle, tmp_path / "copy")
    edit_manifest(copied, lambda manifest: manifest["draft"].update(top_k=4))
    with pytest.raises(SpecCompileError, match="10 best tokens but the manifest says 320 and 4; rebuild"):
        load(copied, threads=1)


def test_behind_the_draft_models_last_position_decoding_is_plain(draft_decoder: Decoder) -> None:
    manifest = draft_decoder.bundle.manifest
    assert manifest.draft is not None
    drafted = []
    for length in (48, manifest.draft.max_length):
        decoder = changed(draft_decoder, TokenTree.chain(3), [], draft=replace(manifest.draft, max_length=length))
        prompt = decoder.encode(TEXTS[1])
        ours, plain = (answer(decoder, prompt, max_new_tokens=90, speculate=s) for s in (True, False))
        assert ours.token_ids == plain.token_ids
        drafted.append(ours.stats.drafted)
    assert 0 < drafted[0] <= 3 * (48 - len(prompt)) < drafted[1]


# ---- the command line ----


def test_every_method_is_built_and_run(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tuned_heads: Path, tmp_path: Path
) -> None:
    plain = None
    for name, options in {
        "lookahead": ("--method", "lookahead", "--window", 4, "--ngram", 3, "--guesses", 2, "--pool-from-prompt"),
        "ngrams": ("--method", "lookahead", "--window", 0),
        "lookup": ("--method", "prompt-lookup", "--match", "oldest", "--ngram", 2, "--tree", "dynamic-6-0.2"),
        "also": ("--heads", tuned_heads, "--also", "prompt-lookup", "--tree", "dynamic-9"),
    }.items():
        out = tmp_path / name
        status, _, err = speccompile("build", tiny_checkpoint, *options, "--out", out, "--json")
        assert status == 0, err
        done = speccompile(
            "run", out, "--prompt", TEXTS[2], "--max-new-tokens", 30, "--threads", 1, "--stats", "--json"
        )
        assert done[0] == 0, done[2]
        facts = json.loads(done[1])
        assert facts["compared"]["speed_up"][1] > 0
        plain = plain or facts["token_ids"]
        assert facts["token_ids"] == plain, name
        assert speccompile("inspect", out)[0] == 0
    manifest = json.loads((tmp_path / "lookahead" / "manifest.json").read_text())
    assert manifest["lookahead"] == {"window": 4, "ngram": 3, "guesses": 2, "from_prompt": True}
    manifest = json.loads((tmp_path / "lookup" / "manifest.json").read_text())
    assert manifest["lookup"] == {"ngram": 2, "guesses": 3, "newest": False}
    assert manifest["tree"] == {"dynamic": {"nodes": 6, "floor": 0.2}}


def test_stats_compare_a_draft_model_with_theory(speccompile: Cli, draft_bundle: Path) -> None:
    done = speccompile(
        "run", draft_bundle, "--prompt", TEXTS[0], "--threads", 1, "--stats", "--json", "--max-new-tokens", 40
    )
    assert done[0] == 0, done[2]
    facts = json.loads(done[1])
    stats, compared = facts["stats"], facts["compared"]
    assert compared["acceptance_rate"][1] == pytest.approx(stats["accepted"] / stats["tested"])
    assert compared["guesses_a_round"][1] == pytest.approx(stats["drafted"] / stats["rounds"])
    assert compared["tokens_a_round"] == [None, stats["mean_accepted_tokens"]]  # theory knows chains, this is a tree
    assert compared["speed_up"][1] > 0
    status, _, err = speccompile("run", draft_bundle, "--prompt", TEXTS[0], "--stats", "--max-new-tokens", 10)
    assert status == 0 and "predicted" in err and "speed up" in err


def test_theory_of_chains() -> None:
    """arXiv 2211.17192, equation 1 and theorem 3.8, with alpha 1/2, gamma 3, beta 1/10."""
    stats = Stats(rounds=10, drafted=30, tested=20, accepted=10, emitted=21, draft_calls=30, draft_step_seconds=2e-3)
    stats.seconds |= {"verify": 0.25, "draft": 0.06}
    plain = Stats(rounds=20, emitted=21)
    plain.seconds["verify"] = 0.4
    got = compare(stats, plain)
    assert got["tokens_a_round"] == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 8, 2.0))
    assert got["cost_of_a_draft_step"] == (None, pytest.approx(0.1))
    assert got["cost_of_a_verify"] == pytest.approx((1.0, 1.25))
    assert got["speed_up"] == pytest.approx((1.875 / 1.3, 0.4 / 0.31))
    assert compare(stats, Stats(emitted=1))["speed_up"] == (None, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "lookahead", "--window", 0, "--pool-from-prompt"), "a window of 0 always knows the prompt"),
        (("--method", "lookahead", "--window", -1), "lookahead: window is -1; use 0 or more"),
        (("--method", "lookahead", "--ngram", 1), "lookahead: ngram is 1; use 2 .. 32"),
        (("--method", "lookahead", "--guesses", 0), "lookahead: guesses is 0; use 1 or more"),
        (("--method", "prompt-lookup", "--ngram", 0), "prompt lookup: ngram is 0; use 1 .. 32"),
        (("--method", "prompt-lookup", "--ngram", 99), "prompt lookup: ngram is 99; use 1 .. 32"),
        (("--method", "prompt-lookup", "--tree", "chain-3"), "--tree: prompt lookup grows its trees"),
        (("--method", "lookahead", "--tree", "chain-3"), "--tree: of no use to method lookahead"),
        (("--method", "draft"), "--draft: method draft needs a draft model"),
        (("--method", "plain", "--tree", "chain-3"), "--tree: of no use to method plain"),
        (("--method", "medusa", "--tree", "adaptive-3"), "--tree: heads draft a whole tree at once"),
    ],
)
def test_settings_out_of_range(
    speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path, options: tuple[Any, ...], words: str
) -> None:
    status, out, err = speccompile("build", tiny_checkpoint, *options, "--out", tmp_path / "out")
    assert (status, out) == (1, "") and err.splitlines()[-1].startswith("error: ") and words in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "plain", "--heads", "x"),
        ("--method", "medusa", "--draft", "x"),
        ("--method", "lookahead", "--also", "prompt-lookup"),
        ("--method", "draft", "--head", "x"),
        ("--method", "prompt-lookup", "--window", 3),
        ("--method", "medusa", "--ngram", 3),
        ("--method", "lookahead", "--match", "oldest"),
    ],
)
def test_options_of_other_methods(speccompile: Cli, tmp_path: Path, options: tuple[Any, ...]) -> None:
    status, out, err = speccompile("build", tmp_path, *options)
    assert (status, out) == (2, "") and f"does not go with --method {options[1]}" in err


def test_a_draft_with_another_tokenizer(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=3)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, _, err = speccompile(
        "build", tiny_checkpoint, "--method", "draft", "--draft", other, "--out", tmp_path / "out", "--json"
    )
    assert status == 1 and str(other) in err and f"{vocabulary[second]}" in err
    assert not (tmp_path / "out").exists()


def test_a_draft_as_large_as_its_target_is_a_warning(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, draft_checkpoint: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    build(tiny_checkpoint, tmp_path / "out", method="draft", draft=draft_checkpoint, report=lines.append)
    assert [line for line in lines if line.startswith("warning: ") and "parameters" in line]


def test_a_draft_that_is_not_a_model(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    status, _, err = speccompile(
        "build", tiny_checkpoint, "--method", "draft", "--draft", tmp_path / "none", "--out", tmp_path / "out", "--json"
    )
    assert status == 1 and str(tmp_path / "none") in err
    with pytest.raises(CheckpointError):
        build(tiny_checkpoint, tmp_path / "out", method="draft", draft=tmp_path / "none")


def test_orders_of_names_are_the_same_everywhere() -> None:
    """The methods that the command line offers are those that the manifest knows."""
    from speccompile.compiler.cli import build as command
    from speccompile.graphs.manifest import METHODS

    choice = next(option for option in command.params if option.name == "method")
    assert sorted(choice.type.choices) == sorted(METHODS)  # type: ignore[attr-defined]
