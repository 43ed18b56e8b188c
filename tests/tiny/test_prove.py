"""The proof can fail: each part of the pipeline is broken on purpose, and the check that names it must be the one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from speccompile.compiler.build import medusa_module, verify
from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.medusa_heads import read_heads
from speccompile.compiler.prove import first_difference, prove, top_two_gap
from speccompile.graphs.errors import BundleError, ProofError
from speccompile.graphs.medusa import MedusaModule
from speccompile.graphs.tree import TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime import decoder as decoding
from speccompile.runtime.acceptance import Accepted
from speccompile.runtime.backends.ort import OrtCache
from tests.tiny.conftest import Cli, random_heads
from tests.tiny.test_bundle import poison, rehash

LOGIT_CHECKS = {"prefill", "tree", "path", "commit", "row"}


@pytest.fixture
def source(tiny_checkpoint: Path) -> Source:
    """Read anew, to be broken."""
    return read_model(tiny_checkpoint)


@pytest.fixture
def eager_heads(source: Source, tuned_heads: Path, tiny_decoder: Decoder) -> MedusaModule:
    assert tiny_decoder.heads is not None
    return medusa_module(source, read_heads(tuned_heads), tiny_decoder.heads.top_k)


def fails(check: str, blame: str, *arguments: Any) -> str:
    """`prove` fails with this check, blames this layer; returns the sentence."""
    with pytest.raises(ProofError) as caught:
        prove(*arguments)
    sentence = str(caught.value)
    assert sentence.startswith(f"proof '{check}': ")
    assert blame in sentence
    return sentence


def test_holds(tiny_decoder: Decoder, source: Source, eager_heads: MedusaModule) -> None:
    figures = prove(tiny_decoder, source, eager_heads)
    assert set(figures) == {*LOGIT_CHECKS, "hidden", "heads", "heads_ids", "tokens"}
    for name in {*LOGIT_CHECKS, "hidden", "heads", "heads_ids"}:
        assert 0 <= figures[name]["difference"] <= figures[name]["bound"]
    tokens = figures["tokens"]
    assert tokens["prompts"] == 4
    assert tokens["compared"] == tokens["emitted"] > 100
    assert tokens["ties"] == 0
    assert tokens["rounds"] < tokens["emitted"] / 1.3, "these heads draft well"


def test_holds_by_itself(tiny_decoder: Decoder) -> None:
    assert set(prove(tiny_decoder, None)) == {"path", "commit", "row", "tokens"}


# ---- weights and heads that differ ----


def test_another_weight(tiny_decoder: Decoder, source: Source) -> None:
    with torch.no_grad():
        source.model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.05
    fails("prefill", "the traced graph or its weights", tiny_decoder, source)


def test_features_of_another_scale(tiny_decoder: Decoder, source: Source, eager_heads: MedusaModule) -> None:
    with torch.no_grad():  # the logits stay, what the heads read does not
        source.model.model.norm.weight *= 2
        source.model.lm_head.weight /= 2
    fails("hidden", "the feature output", tiny_decoder, source, eager_heads)


def test_other_heads(tiny_decoder: Decoder, source: Source) -> None:
    assert tiny_decoder.heads is not None
    other = medusa_module(source, random_heads(), tiny_decoder.heads.top_k)
    fails("heads", "the heads graph", tiny_decoder, source, other)


def test_heads_that_name_other_tokens(tiny_decoder: Decoder, source: Source, tuned_heads: Path) -> None:
    assert tiny_decoder.heads is not None
    heads = read_heads(tuned_heads)
    shuffled = replace(heads, token_map=torch.arange(heads.draft_vocabulary or 0).flip(0))
    other = medusa_module(source, shuffled, tiny_decoder.heads.top_k)
    fails("heads_ids", "its best tokens are others", tiny_decoder, source, other)


# ---- graphs that are wrong ----


def rewritten(bundle: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> Decoder:
    """A copy of the bundle with another target graph."""
    copy = shutil.copytree(bundle, folder / "copy.bundle")
    model = onnx.load(copy / "target.onnx", load_external_data=False)
    change(model.graph)
    (copy / "target.onnx").write_bytes(model.SerializeToString())
    rehash(copy, "target.onnx")
    return load(copy, threads=1)


def ignore_tree_mask(graph: onnx.GraphProto) -> None:
    """Every token sees all before it: right for a text, wrong for a tree."""
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == "tree_mask":
                node.input[place] = "causal_mask"
    ones = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Shape", ["tree_mask"], ["mask_shape"]),
        helper.make_node("ConstantOfShape", ["mask_shape"], ["mask_ones"], value=ones),
        helper.make_node("Trilu", ["mask_ones"], ["mask_lower"], upper=0),
        helper.make_node("Cast", ["mask_lower"], ["causal_mask"], to=onnx.TensorProto.BOOL),
    ]
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])


def test_mask_that_is_ignored(tiny_bundle: Path, source: Source, tmp_path: Path) -> None:
    decoder = rewritten(tiny_bundle, tmp_path, ignore_tree_mask)
    fails("tree", "the tree mask or the positions", decoder, source)
    fails("path", "rows depend on their neighbours", decoder, None)


def test_positions_that_are_ignored(tiny_bundle: Path, source: Source, tmp_path: Path) -> None:
    def count_rows(graph: onnx.GraphProto) -> None:
        """Position = past length + row, which is the depth only in a chain."""
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name == "position_ids":
                    node.input[place] = "row_positions"
        one = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
        graph.initializer.extend(
            [
                helper.make_tensor("row_axis", onnx.TensorProto.INT64, [], [1]),
                helper.make_tensor("past_axis", onnx.TensorProto.INT64, [1], [1]),
            ]
        )
        nodes = [
            helper.make_node("Shape", ["input_ids"], ["row_shape"]),
            helper.make_node("ConstantOfShape", ["row_shape"], ["row_ones"], value=one),
            helper.make_node("CumSum", ["row_ones", "row_axis"], ["rows"], exclusive=1),
            helper.make_node("Unsqueeze", ["past_length", "past_axis"], ["past_column"]),
            helper.make_node("Add", ["rows", "past_column"], ["row_positions"]),
        ]
        rest = list(graph.node)
        del graph.node[:]
        graph.node.extend([*nodes, *rest])

    decoder = rewritten(tiny_bundle, tmp_path, count_rows)
    fails("tree", "the tree mask or the positions", decoder, source)
    fails("path", "the attention kernel", decoder, None)


def test_argmax_that_is_none(tiny_bundle: Path, tmp_path: Path) -> None:
    def choose_worst(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == "ArgMax")
        node.op_type = "ArgMin"

    decoder = rewritten(tiny_bundle, tmp_path, choose_worst)
    fails("next_ids", "the graph's tail", decoder, None)


# ---- a runtime that is wrong ----


def test_commit_that_moves_nothing(
    tiny_decoder: Decoder, source: Source, eager_heads: MedusaModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(self: OrtCache, nodes: Sequence[int]) -> None:
        self.length += len(nodes)

    monkeypatch.setattr(OrtCache, "commit", commit)
    fails("commit", "committing rows", tiny_decoder, source, eager_heads)
    fails("commit", "committing rows", tiny_decoder, None)


def test_commit_that_keeps_a_row_too_many(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = OrtCache.commit

    def commit(self: OrtCache, nodes: Sequence[int]) -> None:
        whole(self, nodes)
        self.length += list(nodes) != list(range(len(nodes)))

    monkeypatch.setattr(OrtCache, "commit", commit)
    fails("commit", "committing rows", tiny_decoder, None)


def test_acceptance_that_believes_everything(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(tree: TokenTree, tokens: Any, next_ids: Any) -> Accepted:
        nodes = tuple(tree.ancestry(int(tree.depths.argmax())))
        return Accepted(nodes, int(next_ids[nodes[-1]]))

    monkeypatch.setattr(decoding, "accept_greedy", accept)
    sentence = fails("tokens", "the decoding loop", tiny_decoder, None)
    assert "on prompt " in sentence and "logits are" in sentence


def test_acceptance_that_loses_its_bonus(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decoding.accept_greedy

    def accept(tree: TokenTree, tokens: Any, next_ids: Any) -> Accepted:
        accepted = whole(tree, tokens, next_ids)
        return replace(accepted, bonus=int(next_ids[0]))

    monkeypatch.setattr(decoding, "accept_greedy", accept)
    fails("tokens", "the decoding loop", tiny_decoder, None)


def test_nan_is_no_small_difference(tiny_decoder: Decoder, source: Source) -> None:
    with torch.no_grad():
        source.model.model.norm.weight[0] = float("nan")
    fails("prefill", "nan", tiny_decoder, source)


def test_one_nan_logit(tiny_bundle: Path, source: Source, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy.bundle")
    poison(copy, "model.lm_head.weight.T", element=7)  # onnxruntime's ArgMax passes over it
    fails("next_ids", "the graph's tail", load(copy, threads=1), source)


# ---- helpers of the proof ----


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [7]) == 0


def test_top_two_gap(tiny_decoder: Decoder, source: Source) -> None:
    text = [5, 200, 17, 88]
    with torch.no_grad():
        first, second = source.model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
    assert top_two_gap(tiny_decoder, text) == pytest.approx(first - second, abs=1e-4)


# ---- verify ----


def test_verify_by_itself(speccompile: Cli, tiny_bundle: Path) -> None:
    figures = verify(tiny_bundle, None, None, threads=1)
    assert set(figures) == {"path", "commit", "row", "tokens"}
    status, out, err = speccompile("verify", tiny_bundle, "--threads", 1)
    assert (status, out) == (0, "")
    assert "path" in err and "holds" in err


def test_verify_against_the_model(
    tiny_bundle: Path, tiny_checkpoint: Path, tuned_heads: Path, tiny_decoder: Decoder
) -> None:
    figures = verify(tiny_bundle, tiny_checkpoint, tuned_heads, threads=1)
    built = tiny_decoder.bundle.manifest.proof
    assert set(figures) == set(built)
    assert {name: figure["bound"] for name, figure in figures.items() if "bound" in figure} == pytest.approx(
        {name: figure["bound"] for name, figure in built.items() if "bound" in figure}, rel=1e-5
    )
    assert "heads" not in verify(tiny_bundle, tiny_checkpoint, None, threads=1)


def test_verify_against_another_model(
    speccompile: Cli, tiny_bundle: Path, tiny_checkpoint: Path, other_checkpoint: Path
) -> None:
    ours, theirs = (read_model(path).fingerprint for path in (tiny_checkpoint, other_checkpoint))
    with pytest.raises(BundleError) as caught:
        verify(tiny_bundle, other_checkpoint, None, threads=1)
    for word in (str(tiny_bundle), ours[:12], str(other_checkpoint), theirs[:12], "give the model"):
        assert word in str(caught.value)
    assert speccompile("verify", tiny_bundle, "--against", other_checkpoint) == (1, "", f"error: {caught.value}\n")


def test_verify_against_other_heads(
    tiny_bundle: Path, tiny_checkpoint: Path, tiny_heads: Path, tuned_heads: Path
) -> None:
    ours, theirs = (read_heads(path).fingerprint for path in (tuned_heads, tiny_heads))
    with pytest.raises(BundleError) as caught:
        verify(tiny_bundle, tiny_checkpoint, tiny_heads, threads=1)
    for word in (str(tiny_bundle), ours[:12], str(tiny_heads), theirs[:12], "give the heads"):
        assert word in str(caught.value)


def test_verify_finds_a_changed_file(speccompile: Cli, tiny_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy.bundle")
    content = bytearray((copy / "target.onnx.data").read_bytes())
    content[1000] ^= 1
    (copy / "target.onnx.data").write_bytes(content)
    status, _, err = speccompile("verify", copy, "--json")
    assert status == 1 and "target.onnx.data: sha256 is" in err


def test_verify_finds_changed_weights_with_a_matching_hash(
    speccompile: Cli, tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy.bundle")
    weights = np.fromfile(copy / "target.onnx.data", np.float32)
    weights[-1] += 1  # the last row of the lm_head
    weights.tofile(copy / "target.onnx.data")
    rehash(copy, "target.onnx.data")
    assert speccompile("verify", copy, "--json")[0] == 0, "still consistent in itself"
    status, _, err = speccompile("verify", copy, "--against", tiny_checkpoint, "--json")
    assert status == 1 and err.startswith("error: proof 'prefill'")


def test_verify_wants_a_model_to_compare_heads(speccompile: Cli, tiny_bundle: Path, tuned_heads: Path) -> None:
    status, _, err = speccompile("verify", tiny_bundle, "--heads", tuned_heads)
    assert status == 2 and "--against" in err


def test_a_failed_proof_publishes_nothing(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(self: OrtCache, nodes: Sequence[int]) -> None:
        self.length += len(nodes)

    monkeypatch.setattr(OrtCache, "commit", commit)
    status, out, err = speccompile("build", tiny_checkpoint, "--method", "plain", "--out", tmp_path / "out", "--json")
    assert (status, out) == (1, "") and err.startswith("error: proof 'commit'") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
