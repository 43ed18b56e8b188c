"""SmolLM2-135M-Instruct, end to end: the truth that random small models cannot tell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.prove import TIE_GAP, eager_logits, first_difference, top_two_gap
from speccompile.graphs.manifest import Manifest
from speccompile.graphs.tree import TokenTree
from speccompile.runtime import Decoder
from speccompile.tools.prompts import first_turns

pytestmark = pytest.mark.real

PROMPTS, NEW_TOKENS = 6, 64
WEIGHTS_MB = (134_515_008 * 4 + 6_498_304) / 2**20  # the target, its tied embedding counted once, and the heads in int8
QUESTION = "List three facts about the moon."


def chat(decoder: Decoder, text: str) -> list[int]:
    return decoder.text.chat([{"role": "user", "content": text}])


def test_tree_logits_equal_transformers(smollm2_decoder: Decoder, smollm2_source: Source) -> None:
    tree = TokenTree.named("mc_sim_7b_63").prune(24)
    prompt = chat(smollm2_decoder, QUESTION)
    tokens = np.random.default_rng(3).integers(0, smollm2_decoder.target.vocab_size, len(tree))
    cache = smollm2_decoder.target.open(256)
    chain = TokenTree.chain(len(prompt) - 1)
    cache.run(np.array(prompt), chain.depths, chain.mask, np.array([len(prompt) - 1]))
    cache.commit(range(len(prompt)))
    logits = cache.run(tokens, cache.length + tree.depths, tree.mask, tree.nodes).logits[0]
    for leaf in (node for node in range(len(tree)) if not tree.children[node]):
        path = tree.ancestry(leaf)
        eager, _ = eager_logits(smollm2_source, [*prompt, *tokens[path].tolist()])
        np.testing.assert_allclose(logits[path], eager[-len(path) :], atol=2e-3, rtol=0)


def test_proof_figures_are_in_the_manifest(manifest: Manifest) -> None:
    for name in ("prefill", "tree", "path", "commit"):
        assert 0 < manifest.proof[name]["difference"] <= 2e-3, name
    assert manifest.proof["tokens"]["compared"] >= 100
    assert manifest.graphs["target"].nodes < 400 < manifest.graphs["target"].traced_nodes


def test_speculative_equals_plain_equals_transformers(smollm2_decoder: Decoder, smollm2_source: Source) -> None:
    """Greedy tokens of MT-bench first turns; `python -m speccompile.tools.bench` does all 80."""
    accepted = 0
    for text in first_turns(limit=PROMPTS):
        ids = chat(smollm2_decoder, text)
        answers = [
            smollm2_decoder.generate(
                ids, max_new_tokens=NEW_TOKENS, speculate=s, sequence=smollm2_decoder.new_sequence()
            )
            for s in (True, False)
        ]
        accepted += answers[0].stats.accepted
        prompt = torch.tensor([ids])
        reference = smollm2_source.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )[0, len(ids) :].tolist()
        for answer in answers:
            place = first_difference(answer.token_ids, reference)
            assert place is None or top_two_gap(smollm2_decoder, [*ids, *reference[:place]]) < TIE_GAP["fp32"]
    assert accepted > PROMPTS * 10  # the heads do draft: about one guess in two rounds


def test_sampled_tokens_do_not_depend_on_speculation(smollm2_decoder: Decoder) -> None:
    ids = chat(smollm2_decoder, QUESTION)
    for seed in range(3):
        speculative, plain = (
            smollm2_decoder.generate(
                ids, max_new_tokens=40, temperature=0.8, top_p=0.95, seed=seed, speculate=s,
                sequence=smollm2_decoder.new_sequence(),
            ).token_ids
            for s in (True, False)
        )  # fmt: skip
        assert speculative == plain


def test_stream_joins_to_the_text_and_stops_at_a_string(smollm2_decoder: Decoder) -> None:
    message = [{"role": "user", "content": QUESTION}]
    whole = smollm2_decoder.generate(message, max_new_tokens=48)
    pieces = list(smollm2_decoder.stream(message, max_new_tokens=48))
    assert "".join(piece.text for piece in pieces) == whole.text
    stop = whole.text[20:26]
    cut = smollm2_decoder.generate(message, max_new_tokens=48, stop=stop)
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_run_stays_in_memory(smollm2_bundle: Path) -> None:
    """Peak of `run` at most 1.35 times the fp32 weights, plus the cache that the tokens fill."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [
        sys.executable,
        "-m",
        "speccompile.compiler.cli",
        "run",
        str(smollm2_bundle),
        "--chat",
        "--prompt",
        QUESTION,
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--max-new-tokens", "64"], check=True, capture_output=True, text=True
    )
    peak = int(done.stdout.split()[-1]) / 1024
    cache = 60 * 3 * 64 * 4 * 256 / 2**20  # 256 tokens are more than were used
    assert peak <= 1.35 * WEIGHTS_MB + cache, f"{peak:.0f} MB"


@pytest.mark.venv
def test_copied_bundle_runs_without_torch(smollm2_bundle: Path, smollm2_decoder: Decoder, tmp_path: Path) -> None:
    """In a clean virtual environment with `pip install .[cpu]` only, the bundle says the same in another folder."""
    root = Path(__file__).resolve().parents[2]
    source = tmp_path / "source"
    shutil.copytree(root, source, ignore=shutil.ignore_patterns(".*", "build", "*.bundle", "*.egg-info", "__pycache__"))
    moved = tmp_path / "elsewhere" / "copy.bundle"
    shutil.copytree(smollm2_bundle, moved)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{source}[cpu]"], check=True, cwd=tmp_path)
    frozen = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout.lower()
    assert not any(f"\n{name} " in frozen for name in ("torch", "transformers", "onnx"))
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "speccompile", "run", moved, "--chat", "--prompt", QUESTION, "--json"],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == smollm2_decoder.generate([{"role": "user", "content": QUESTION}]).token_ids
    assert answer["stats"]["accepted"] > 0
