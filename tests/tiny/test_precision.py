"""Targets in int8 and int4, from the checkpoint to the last token: what is stored, what it costs, and that speculation
stays exact.

A difference in the last bit of an activation may tip an integer, which grows to whole logits on its way through the
layers. So there is no tolerance here: a token's logits are the same, bit by bit, alone and in any chain.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from scipy.special import log_softmax

from speccompile.compiler.build import build, verify
from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.medusa_heads import write_heads
from speccompile.compiler.quality import held_out
from speccompile.compiler.write_graph import write_graph
from speccompile.graphs.errors import BundleError, ProofError, SpecCompileError
from speccompile.graphs.manifest import Manifest
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree, TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime.backends.ort import OrtCache, OrtTarget, StepOutput, open_session
from tests.tiny.conftest import EOS_IDS, TEXTS, Cli, random_heads, write_tokenizer
from tests.tiny.models import tiny_model
from tests.tiny.passes import Array, Feed, graph, kinds, normal, run
from tests.tiny.test_bundle import edit_manifest
from tests.tiny.test_methods import DRAFT_TREES, TREE, answer, changed, lookahead_decoder, without_graphs

VOCAB, WIDTH, LAYERS, LIMIT = 672, 128, 2, 192
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "head_dim": 32,
    "max_position_embeddings": LIMIT,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """What is built of which model."""

    precision: str
    method: str
    kind: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def tied(self) -> bool:
        return dict(self.changes).get("tie_word_embeddings", True)


CASES = {
    "int8 draft": Case("int8", "draft"),
    # Rows that end within a vector, and within a block.
    "int4 medusa, untied": Case("int4", "medusa", changes=(("tie_word_embeddings", False), ("intermediate_size", 344))),
    "int4 prompt-lookup, biases": Case("int4", "prompt-lookup", "qwen2"),
}
names = pytest.mark.parametrize("name", CASES)


@dataclass(frozen=True)
class Built:
    case: Case
    checkpoint: Path
    bundle: Path
    manifest: Manifest
    decoder: Decoder
    parts: dict[str, Path]


def save_model(folder: Path, case: Case, noise: float = 0.0, seed: int = 0) -> Path:
    """A checkpoint whose weights rounding does not ruin. With `noise` on all but the embedding it drafts for the
    one without."""
    model = tiny_model(case.kind, seed, **{**SIZES, **dict(case.changes)})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 0.7 if parameter.ndim == 2 else 1
            if "embed" not in name:
                parameter += torch.randn(parameter.shape, generator=generator) * noise
    model.generation_config.eos_token_id = EOS_IDS
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def build_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Builds each of `CASES` once, when it is first asked for."""

    @cache
    def make(name: str) -> Built:
        case, folder = CASES[name], tmp_path_factory.mktemp("built")
        checkpoint = save_model(folder / "model", case)
        parts, tree = dict[str, Path](), None
        if case.method == "draft":
            parts, tree = {"draft": save_model(folder / "draft", case, noise=0.004)}, TREE
        if case.method == "medusa":
            parts, tree = {"heads": folder / "heads"}, TREE
            write_heads(random_heads(WIDTH, target_fingerprint=read_model(checkpoint).fingerprint), parts["heads"])
        options: dict[str, Any] = {"method": case.method, "precision": case.precision, "tree": tree, **parts}
        manifest = build(checkpoint, folder / "bundle", **options)
        return Built(case, checkpoint, folder / "bundle", manifest, load(folder / "bundle", threads=1), parts)

    return make


@pytest.fixture
def built(name: str, build_case: Callable[[str], Built]) -> Built:
    return build_case(name)


# ---- what is published ----


@names
def test_the_manifest_says_how_the_target_was_rounded(built: Built) -> None:
    manifest = json.loads((built.bundle / "manifest.json").read_text())
    assert manifest["graphs"]["target"]["precision"] == built.case.precision
    assert manifest["method"] == built.case.method
    proof = manifest["proof"]
    assert proof["row"] == {"difference": 0.0, "bound": 0.0}
    for check in ("prefill", "tree", "path", "commit"):  # of the target before it was rounded
        assert 0 <= proof[check]["difference"] <= proof[check]["bound"] < 0.01
    assert proof["tokens"]["ties"] == 0 and proof["tokens"]["compared"] > 50


@names
def test_every_large_product_was_rounded(built: Built) -> None:
    model = ir.load(built.bundle / "target.onnx")
    counts, bits = kinds(model), [n.attributes["bits"].as_int() for n in model.graph if n.op_type == "MatMulNBits"]
    assert "MatMul" not in counts and "Gather" not in {
        node.op_type for node in model.graph if (table := node.inputs[0]) is not None and table.is_initializer()
    }
    assert counts["GatherBlockQuantized"] == 1
    if built.case.precision == "int8":
        assert counts["MatMulIntegerToFloat"] == 3 * LAYERS
        assert counts["QuantizeLinear"] == 3 * LAYERS  # packed QKV, and gate and up, share theirs
        assert bits == [8] * (LAYERS + 1)  # down, and the lm_head
    else:
        assert sorted(bits) == sorted([8, 8, 4, 4] * LAYERS + [8])


@names
def test_quality_is_that_of_the_bundle_against_torch(built: Built) -> None:
    figures = built.manifest.proof["quality"]
    texts = held_out(built.decoder.text, built.decoder.capacity)
    model = read_model(built.checkpoint).model
    losses, exact_losses, agree, divergence = list[float](), list[float](), list[bool](), list[float]()
    for ids in texts[::4]:
        with torch.no_grad():
            exact = log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1].double().numpy(), -1)
        ours = log_softmax(in_one_call(built.decoder.target, ids)[:-1].astype(np.float64), -1)
        following = np.array(ids[1:])[:, None]
        losses += (-np.take_along_axis(ours, following, -1)).ravel().tolist()
        exact_losses += (-np.take_along_axis(exact, following, -1)).ravel().tolist()
        agree += (ours.argmax(-1) == exact.argmax(-1)).tolist()
        divergence += (np.exp(exact) * (exact - ours)).sum(-1).tolist()
    assert figures["tokens"] == sum(len(ids) - 1 for ids in texts) > 1000
    # A quarter of the texts says nearly the same.
    assert np.mean(divergence) == pytest.approx(figures["kl_per_token"], rel=0.15)
    assert np.mean(agree) == pytest.approx(figures["top1_agreement"], abs=0.05)
    rise = np.log(figures["perplexity"] / figures["exact_perplexity"])
    assert np.mean(losses) - np.mean(exact_losses) == pytest.approx(rise, abs=0.02)
    assert np.mean(exact_losses) == pytest.approx(np.log(figures["exact_perplexity"]), rel=0.05)
    least, most = {"int8": (0.85, 0.02), "int4": (0.6, 0.15)}[built.case.precision]
    assert figures["top1_agreement"] > least and 0 < figures["kl_per_token"] < most


def in_one_call(target: OrtTarget, ids: list[int]) -> Array:
    count = np.arange(len(ids))
    return target.open(len(ids)).run(np.array(ids), count, np.tri(len(ids), dtype=np.bool_), count).logits[0].copy()


def spans(bundle: Path, name: str = "target") -> dict[str, tuple[int, int]]:
    """(offset, length) in NAME.onnx.data of the weights that are stored there."""
    found = {}
    for tensor in onnx.load(bundle / f"{name}.onnx", load_external_data=False).graph.initializer:
        entry = {item.key: item.value for item in tensor.external_data}
        if entry and entry["location"] == "target.onnx.data":
            found[tensor.name] = int(entry["offset"]), int(entry["length"])
    return found


@names
def test_every_table_is_stored_once(built: Built) -> None:
    stored, size = spans(built.bundle), (built.bundle / "target.onnx.data").stat().st_size
    tables = [span for span in stored.values() if span[1] == VOCAB * WIDTH]
    assert len(tables) == 2  # the embedding's and the lm_head's
    assert len(set(tables)) == (1 if built.case.tied else 2)
    assert size <= sum(length for _, length in set(stored.values())) + 4096 * len(stored)  # and no more than padding
    for first, second in zip(sorted(set(stored.values())), sorted(set(stored.values()))[1:], strict=False):
        assert first[0] + first[1] <= second[0]
    parameters = sum(p.numel() for p in read_model(built.checkpoint).model.parameters())
    rope = LIMIT * 32 * 4
    # A byte or less for each weight, a scale for 32 of them at most, and biases.
    bytes_each = 1 + 4 / 32 if built.case.precision == "int8" else 0.9
    assert size < bytes_each * parameters + rope + 8192 + 4096 * len(stored)


@pytest.mark.parametrize("name", ["int8 draft"])
def test_a_draft_model_reads_the_embedding_of_the_target(built: Built) -> None:
    """Its own is the same table, which is not written again."""
    table = next(span for span in spans(built.bundle).values() if span[1] == VOCAB * WIDTH)
    assert table in spans(built.bundle, "draft").values()
    assert built.manifest.graphs["draft"].precision == "int8"
    others = sum(p.numel() for p in read_model(built.parts["draft"]).model.model.layers.parameters())
    assert (built.bundle / "draft.onnx.data").stat().st_size < 1.2 * others + LIMIT * 32 * 4 + 65536


# ---- bit by bit ----


def alone(target: OrtTarget, prompt: Array, tokens: Array) -> Array:
    """Logits [N,V] of tokens behind a prompt, each in a call of its own, as plain decoding runs them."""
    cache = after(target, prompt, len(tokens))
    rows = []
    for token in tokens:
        one = np.ones((1, 1), np.bool_)
        rows.append(
            cache.run(np.array([token]), np.array([cache.length]), one, np.zeros(1, np.int64)).logits[0, 0].copy()
        )
        cache.commit([0])
    return np.array(rows)


def after(target: OrtTarget, prompt: Array, room: int) -> OrtCache:
    """A cache with the prompt's rows; logits of its last one alone are computed."""
    count = len(prompt)
    cache = target.open(count + room)
    cache.run(prompt, np.arange(count), np.tri(count, dtype=np.bool_), np.array([count - 1]))
    cache.commit(range(count))
    return cache


@names
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_alone_and_in_any_chain(built: Built, threads: int) -> None:
    """Of 1 to 9 tokens and some longer ones, behind prompts of several lengths, with others behind it."""
    target = OrtTarget(built.bundle / "target.onnx", threads=threads)
    rng = np.random.default_rng(0)
    for past in (1, 2, 16, 31, 77, 130):
        prompt, tokens = rng.integers(VOCAB, size=past), rng.integers(VOCAB, size=40)
        wanted = alone(target, prompt, tokens)
        assert len(np.unique(wanted, axis=0)) == len(wanted)
        cache = after(target, prompt, len(tokens))
        for count in (*range(1, 10), 16, 40):
            chain = TokenTree.chain(count - 1)
            found = cache.run(tokens[:count], past + chain.depths, chain.mask, chain.nodes)
            np.testing.assert_array_equal(found.logits[0], wanted[:count])
            np.testing.assert_array_equal(found.next_ids[0], wanted[:count].argmax(-1))
        for kept in range(1, 9):
            mixed = np.concatenate([tokens[:kept], rng.integers(VOCAB, size=9 - kept)])
            chain = TokenTree.chain(8)
            found = cache.run(mixed, past + chain.depths, chain.mask, chain.nodes).logits[0]
            np.testing.assert_array_equal(found[:kept], wanted[:kept])


@names
def test_the_trunk_of_a_tree_is_the_same_whatever_branches_off(built: Built) -> None:
    rng, target = np.random.default_rng(1), built.decoder.target
    prompt = rng.integers(VOCAB, size=33)
    # 0 - 1 - 2 - 3, then siblings of 1 and 3 and what follows them.
    tree = TokenTree((-1, 0, 1, 2, 0, 4, 2, 5), (0, 0, 0, 0, 1, 0, 1, 0))
    assert len(tree.trunk) == 4
    tokens = rng.integers(VOCAB, size=len(tree))
    cache = after(target, prompt, len(tree))
    found = cache.run(tokens, len(prompt) + tree.depths, tree.mask, tree.nodes).logits[0, :4].copy()
    np.testing.assert_array_equal(found, alone(target, prompt, tokens[:4]))


# ---- the same tokens ----


def as_methods(built: Built) -> Iterator[tuple[str, Decoder, bool]]:
    """The bundle's target under every method that its graphs allow, and whether its guesses are any good."""
    decoder = built.decoder
    bare = changed(decoder, decoder.tree, eos_ids=[], method="plain", lookup=None)
    bare.draft = bare.heads = None
    yield "prompt-lookup", without_graphs(bare, method="prompt-lookup", lookup=LookupSettings()), True
    yield "lookahead", lookahead_decoder(bare, (5, 3, 5)), True
    yield "lookahead without window", lookahead_decoder(bare, (0, 3, 4)), True
    trees: dict[str, DraftTree] = {"tree": TREE}
    if decoder.draft is not None:
        trees = {**DRAFT_TREES, "deep": DynamicTree(12, 0.01, depth=6), "confident": AdaptiveChain(8, 0.5)}
    if decoder.draft is not None or decoder.heads is not None:
        for name, tree in trees.items():
            yield f"{built.case.method} {name}", changed(decoder, tree, []), decoder.draft is not None
        yield f"{built.case.method}, lookup too", changed(decoder, TREE, [], lookup=LookupSettings()), True


@names
def test_greedy_tokens_are_those_of_plain_decoding(built: Built) -> None:
    prompts = [built.decoder.encode(text)[:60] for text in (*TEXTS[:4], "one two one two one two")]
    plain = [answer(changed(built.decoder, TREE, []), ids, max_new_tokens=110, speculate=False) for ids in prompts]
    assert all(len(one.token_ids) == 110 for one in plain)
    for method, decoder, drafts_well in as_methods(built):
        accepted = 0
        for ids, wanted in zip(prompts, plain, strict=True):
            found = answer(decoder, ids, max_new_tokens=110)
            assert found.token_ids == wanted.token_ids, method
            accepted += found.stats.accepted
        assert accepted > 10 or not drafts_well, method


@names
def test_rows_are_kept_where_they_were_run(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row behind a moved one was summed in another order than plain decoding sums it. That seldom shows in tokens of
    small models, so it is looked at here: nothing is ever moved, and what is not a chain looks ahead."""
    kept, branched = list[list[int]](), 0
    true_run, true_commit = OrtCache.run, OrtCache.commit

    def run_and_look(self: OrtCache, *given: Any, **more: Any) -> StepOutput:
        nonlocal branched
        if self.target is built.decoder.target:
            mask = np.asarray(given[2])
            branched += not np.array_equal(mask, np.tri(len(mask), dtype=np.bool_))
        return true_run(self, *given, **more)

    def commit_and_look(self: OrtCache, nodes: Any) -> None:
        if self.target is built.decoder.target:
            kept.append(list(nodes))
        true_commit(self, nodes)

    monkeypatch.setattr(OrtCache, "run", run_and_look)
    monkeypatch.setattr(OrtCache, "commit", commit_and_look)
    for method, decoder, _ in as_methods(built):
        kept.clear()
        branched = 0
        for sampling in ({}, {"temperature": 0.2, "seed": 1}):
            answer(decoder, TEXTS[0], max_new_tokens=80, **sampling)
        assert all(nodes == list(range(len(nodes))) for nodes in kept), method
        assert (branched > 0) == (method == "lookahead"), method


@names
def test_plain_tokens_are_the_argmax_of_rows_alone(built: Built) -> None:
    """Plain decoding, redone by hand from the prompt's last logits on."""
    ids = built.decoder.encode(TEXTS[3])
    tokens = answer(changed(built.decoder, TREE, []), ids, max_new_tokens=40, speculate=False).token_ids
    rows = alone(built.decoder.target, np.array(ids), np.array(tokens[:-1]))
    assert tokens[1:] == rows.argmax(-1).tolist()
    assert tokens[0] == in_one_call(built.decoder.target, ids)[-1].argmax()


@names
def test_sampled_tokens_are_those_of_plain_decoding(built: Built) -> None:
    """With one seed, where guesses are not drawn themselves."""
    accepted = 0
    for method, decoder, _ in as_methods(built):
        if "draft" in method and "lookup" not in method:
            continue
        for seed in range(3):
            ids, options = decoder.encode(TEXTS[seed]), {"temperature": 0.15, "seed": seed, "max_new_tokens": 64}
            found, plain = (answer(decoder, ids, speculate=speculate, **options) for speculate in (True, False))
            assert found.token_ids == plain.token_ids, method
            accepted += found.stats.accepted
    assert accepted > 10


@names
def test_a_conversation_goes_on_from_rows_that_were_verified(built: Built) -> None:
    decoder = without_graphs(built.decoder, method="prompt-lookup", lookup=LookupSettings(), eos_ids=[])
    decoder.draft = None
    accepted = 0
    for first in TEXTS[:4]:
        text, sequences = decoder.encode(first), {speculate: decoder.new_sequence() for speculate in (True, False)}
        for turn in range(2):
            found = {
                speculate: decoder.generate(text, max_new_tokens=75, speculate=speculate, sequence=sequence)
                for speculate, sequence in sequences.items()
            }
            assert found[True].token_ids == found[False].token_ids
            assert all((one.stats.reused_tokens > 60) == (turn > 0) for one in found.values())
            text, accepted = [*text, *found[True].token_ids, 7, 8], accepted + found[True].stats.accepted
    assert accepted > 5


# ---- what is refused ----


def test_an_unknown_precision(tmp_path: Path, speccompile: Cli) -> None:
    with pytest.raises(SpecCompileError) as caught:
        build(tmp_path / "model", tmp_path / "out", method="plain", precision="int2")
    sentence = str(caught.value)
    assert sentence == "--precision: 'int2' is unknown in dialect gqa; use one of fp32, int8, int4."
    status, out, err = speccompile("build", tmp_path / "model", "--method", "plain", "--precision", "int2")
    assert status == 2 and out == ""
    assert "'int2'" in err and all(f"'{known}'" in err for known in ("fp32", "int8", "int4"))
    assert not list(tmp_path.iterdir())


@names
def test_verify(built: Built) -> None:
    by_itself = verify(built.bundle, None, threads=1)
    assert by_itself["row"] == {"difference": 0.0, "bound": 0.0}
    assert by_itself["tokens"]["ties"] == 0
    assert not {"quality", "prefill", "path"} & set(by_itself)  # there is nothing exact to compare with
    figures = verify(built.bundle, built.checkpoint, threads=1, **built.parts)
    assert figures["row"] == by_itself["row"]
    for name, value in built.manifest.proof["quality"].items():
        assert figures["quality"][name] == pytest.approx(value, rel=1e-3)
    more = {"draft": "draft_int8", "medusa": "heads_int8"}.get(built.case.method)
    assert more is None or more in figures


@pytest.mark.parametrize("name", ["int8 draft", "int4 medusa, untied"])
def test_another_models_weights(built: Built, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", built.case, seed=1)
    with pytest.raises(BundleError, match="give the model it was built from"):
        verify(built.bundle, other, threads=1)
    # A bundle that claims to be of that model, by its fingerprint.
    forged = shutil.copytree(built.bundle, tmp_path / "forged")
    edit_manifest(forged, lambda m: m["target"].update(fingerprint=read_model(other).fingerprint))
    edit_manifest(forged, lambda m: m["heads"] and m["heads"].update(target_fingerprint=None))
    with pytest.raises(ProofError) as caught:
        verify(forged, other, threads=1)
    sentence = str(caught.value)
    assert sentence.startswith("proof 'quality': ") and "another model's" in sentence and "\n" not in sentence


@pytest.mark.parametrize("name", ["int8 draft", "int4 medusa, untied"])
def test_a_lone_row_that_differs_in_its_last_bit(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU whose kernels sum it in another order: a rounded target is not proved there."""
    true_run = OrtCache.run

    def off(self: OrtCache, input_ids: Any, *rest: Any, **more: Any) -> StepOutput:
        out = true_run(self, input_ids, *rest, **more)
        if np.shape(input_ids)[-1] == 1:
            out.logits[...] = np.nextafter(out.logits, np.float32(np.inf))
        return out

    monkeypatch.setattr(OrtCache, "run", off)
    with pytest.raises(ProofError) as caught:
        verify(built.bundle, None, threads=1)
    sentence = str(caught.value)
    assert sentence.startswith("proof 'row': ") and "--precision fp32" in sentence and "\n" not in sentence


# ---- writing ----


def two_readers(rows: Array, blocks: Array) -> ir.Model:
    """An embedding and an lm_head on tables of bytes, [V,F] and [V,F/32,32]."""
    tokens, width = rows.shape
    return graph(
        f"""agraph (int64[B,T] ids, float[B,R,{width}] x) => (float[B,T,{width}] e, float[B,R,{tokens}] y) {{
            e = com.microsoft.GatherBlockQuantized<bits = 8, block_size = 32, gather_axis = 0, quantize_axis = 1>(
                rows, ids, scales)
            y = com.microsoft.MatMulNBits<K = {width}, N = {tokens}, bits = 8, block_size = 32>(x, blocks, scales)
        }}""",
        rows=rows,
        blocks=blocks,
        scales=np.full((tokens, width // 32), 0.25, np.float32),
    )


def same_results(path: Path, feed: Feed, wanted: list[Array]) -> None:
    """What is written computes what `run` gave, whose kernels are not fused."""
    for got, want in zip(open_session(path, threads=1).run(None, dict(feed)), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("same", [True, False])
def test_a_table_that_is_read_in_two_shapes_is_written_once(tmp_path: Path, same: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (700, 96)).astype(np.uint8)
    blocks = rows.reshape(700, 3, 32).copy()
    if not same:
        blocks[-1, -1, -1] ^= 1
    model, feed = two_readers(rows, blocks), {"ids": np.array([[0, 699, 3]]), "x": normal(1, 2, 96)}
    wanted = run(model, feed)
    write_graph(model, tmp_path, "target")
    read = ir.load(tmp_path / "target.onnx")
    for name, array in (("rows", rows), ("blocks", blocks)):
        tensor = read.graph.initializers[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), array)
    same_results(tmp_path / "target.onnx", feed, wanted)
    stored, size = spans(tmp_path), (tmp_path / "target.onnx.data").stat().st_size
    assert (stored["rows"] == stored["blocks"]) == same
    assert size // rows.nbytes == (1 if same else 2)

    # What is written behind it, in either shape, refers to the same bytes.
    small = two_readers(rows, blocks)
    write_graph(small, tmp_path, "draft", owner="target")
    assert {name: spans(tmp_path, "draft")[name] for name in ("rows", "blocks")} == {
        name: stored[name] for name in ("rows", "blocks")
    }
    same_results(tmp_path / "draft.onnx", feed, wanted)


def test_equal_bytes_of_another_kind_are_not_taken_for_a_table(tmp_path: Path) -> None:
    """Twins are tables of bytes; other tensors of the same size stay apart."""
    model = graph(
        """agraph (float[B,T,256] x, float[B,T,512] z) => (float[B,T,512] y, float[B,T,256] w) {
            y = MatMul(x, V)
            w = MatMul(z, W)
        }""",
        V=normal(256, 512),
        W=normal(256, 512).reshape(512, 256),
    )
    feed = {"x": normal(1, 2, 256), "z": normal(1, 2, 512)}
    wanted = run(model, feed)
    write_graph(model, tmp_path, "target")
    same_results(tmp_path / "target.onnx", feed, wanted)


def test_a_graph_may_be_written_to_two_folders(tmp_path: Path) -> None:
    """As drafting graphs are, exact and rounded: each folder stands alone, whatever became of the other."""
    model = graph(
        "agraph (float[B,T,256] x) => (float[B,T,300] y) <float[B,T,300] z> { z = MatMul(x, W) y = Add(z, b) }",
        W=normal(256, 300),
        b=normal(300),
    )
    feed = {"x": normal(1, 2, 256)}
    wanted = run(model, feed)
    for name in ("exact", "rounded"):
        (tmp_path / name).mkdir()
        write_graph(model, tmp_path / name, "medusa")
    shutil.rmtree(tmp_path / "exact")
    same_results(tmp_path / "rounded" / "medusa.onnx", feed, wanted)
