"""EAGLE from checkpoint to bundle: features, graphs of every form of head, builds, proofs that can fail, bad input."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

from speccompile.compiler import build as building
from speccompile.compiler import prove as proving
from speccompile.compiler.build import build, verify
from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.eagle_head import EagleHead, make_head, read_eagle, write_eagle
from speccompile.compiler.inspection import describe
from speccompile.compiler.prove import BRANCHING, eager_draft, eager_features, prove
from speccompile.graphs.draft_model import DraftTail
from speccompile.graphs.eagle import EagleForm, EagleModel, Fusion
from speccompile.graphs.errors import BundleError, CheckpointError, ProofError, SpecCompileError, TraceError
from speccompile.graphs.gqa import trace_gqa
from speccompile.graphs.manifest import GraphInfo
from speccompile.graphs.passes import finish_gqa_target
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.target import Tail, TargetTail, decoder_layers, survey, tapping
from speccompile.graphs.tree import AdaptiveChain, DraftTree, DynamicTree, TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime import decoder as decoding
from speccompile.runtime.backends.ort import OrtCache, OrtTarget
from speccompile.runtime.bundle import Bundle
from speccompile.runtime.drafters import growing
from tests.tiny.conftest import Cli
from tests.tiny.eagle_reference import ReferenceHead, random_weights
from tests.tiny.models import VOCAB, tiny_model
from tests.tiny.test_bundle import edit_manifest, rehash
from tests.tiny.test_eagle_head import IDS, INNER, PROMPT, TAPS, WIDTH, config_of, save, tensors_of
from tests.tiny.test_methods import answer, changed

TEXTS = ("def fibonacci(n):", "the fox and the crow", "one two one two one two", "Why is the sky blue?")
TREES: dict[str, DraftTree] = {
    "static": TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "chain": TokenTree.chain(3),
    "dynamic": DynamicTree(9, depth=4, top_k=3),
    "dynamic with a floor": DynamicTree(8, 0.06, depth=6),
    "adaptive": AdaptiveChain(5, 0.1),
}
Array = npt.NDArray[Any]


def graph_of(model: nn.Module, tail: Tail, folder: Path, features: int | None = None) -> OrtTarget:
    graph = trace_gqa(model, survey(model, 128), tail, features)
    finish_gqa_target(graph)
    ir.save(graph, folder / "graph.onnx", external_data="graph.onnx.data")
    return OrtTarget(folder / "graph.onnx", threads=1)


# ---- features of the target ----

FINAL_NORMS = {
    "llama": "model.norm",
    "qwen3": "model.norm",
    "gemma2": "model.norm",  # norms before and after everything, embeddings scaled, windows, soft-caps
    "gpt_neox": "gpt_neox.final_layer_norm",  # attention and MLP side by side
    "phi": "model.final_layernorm",
    "gpt2": "transformer.ln_f",  # positions added to the embeddings
}


def entering(model: Any, final_norm: str, ids: Sequence[int]) -> list[Array]:
    """By layer, the stream [T,F] that enters it, float64; behind those what leaves the last. From transformers' own
    hidden states, whose last one goes through the final norm."""
    holder = model.get_submodule(final_norm.rpartition(".")[0])
    norm, name = model.get_submodule(final_norm), final_norm.rpartition(".")[2]
    setattr(holder, name, nn.Identity())
    try:
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    finally:
        setattr(holder, name, norm)
    return [state[0].double().numpy() for state in states]


@pytest.mark.parametrize(("name", "norm"), zip(FINAL_NORMS, ("each", "whole", "none") * 2, strict=True))
def test_fused_features_are_those_of_transformers_hidden_states(name: str, norm: str, tmp_path: Path) -> None:
    """First, middle and last stream, for a prompt and for every path of a tree behind it."""
    model, width, taps = tiny_model(name), 40, (0, 2, 3)
    fusion = Fusion(3, 64, width, norm, 1e-5)
    with torch.no_grad():
        for parameter in fusion.parameters():
            parameter.normal_(0, 0.3)
    graph = graph_of(model, TargetTail(True, fusion, taps), tmp_path)
    assert graph.width == width
    weights = {"fc": fusion.fc.weight}
    if norm == "each":
        weights |= {f"fc_norm.{index}": part.weight for index, part in enumerate(fusion.fc_norm)}
    elif norm == "whole":
        weights["input_norm"] = fusion.input_norm.weight  # type: ignore[assignment]
    known = {key: value.detach().double().numpy() for key, value in weights.items()}
    reference = ReferenceHead(3, 1, 1, 1, 1, known, np.arange(1), epsilon=1e-5)

    def wanted(ids: Sequence[int], taps: Sequence[int] = taps) -> Array:
        streams = entering(model, FINAL_NORMS[name], ids)
        assert len(streams) == 4
        return reference.features([streams[tap] for tap in taps])

    cache, count = graph.open(64), len(PROMPT)
    out = cache.run(np.array(PROMPT), np.arange(count), np.tri(count, dtype=np.bool_), np.array([count - 1]))
    assert out.hidden is not None
    scale = np.abs(wanted(PROMPT)).max()
    np.testing.assert_allclose(out.hidden[0], wanted(PROMPT), atol=2e-5 * scale, rtol=0)
    for other in ((0, 1, 3), (1, 2, 3), (0, 2, 2)):  # which the tolerance tells apart
        assert np.abs(out.hidden[0] - wanted(PROMPT, other)).max() > 1e-2 * scale
    cache.commit(range(count))
    tokens = np.random.default_rng(3).integers(3, VOCAB, len(BRANCHING))
    hidden = cache.run(tokens, count + BRANCHING.depths, BRANCHING.mask, np.array([0])).hidden
    assert hidden is not None
    for node in range(len(BRANCHING)):
        text = [*PROMPT, *tokens[BRANCHING.ancestry(node)].tolist()]
        np.testing.assert_allclose(hidden[0, node], wanted(text)[-1], atol=2e-5 * scale, rtol=0)


def test_a_model_whose_layers_cannot_be_told_apart() -> None:
    model = tiny_model("llama")
    assert decoder_layers(model) is model.model.layers
    twice = tiny_model("llama")
    twice.memories = nn.ModuleList(nn.Identity() for _ in range(3))
    none = tiny_model("llama")
    none.model.layers = none.model.layers[:2]
    for odd in (twice, none):
        with pytest.raises(TraceError, match="its 3 layers cannot be told apart; no features can be tapped"):
            decoder_layers(odd)
        with pytest.raises(TraceError, match="LlamaForCausalLM: its 3 layers"), tapping(odd, (1,)):
            pass
        with tapping(odd, ()) as streams:
            assert streams == {}
    for taps in ((-1, 2), (0, 4)):
        words = re.escape(f"features of layers {list(taps)} asked for; it has 3.")
        with pytest.raises(TraceError, match=words), tapping(model, taps):
            pass
    with tapping(model, (0, 3)):
        assert model.model.layers[0]._forward_pre_hooks and model.model.layers[2]._forward_hooks
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.model.layers)


# ---- graphs of heads ----

NORMS = ("0.input", "norm", "embedding_norm", "feature_norm")
EACH = ("fc_norm.0", "fc_norm.1", "fc_norm.2")
HEADS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    # name: version, norms and biases besides, what else
    "EAGLE-1": (1, ("fc.bias",), {}),
    "EAGLE-1, two layers": (1, (*NORMS, "0.q.bias", "0.k.bias", "0.v.bias", "1.down.bias"), {"layers": 2}),
    "EAGLE-1, fused": (1, ("input_norm",), {"taps": (1, 8), "ids": IDS}),
    "EAGLE-1, joined": (1, (*NORMS, *EACH, "1.q.bias"), {"layers": 3, "join": 2, "taps": (0, 3, 8), "ids": IDS}),
    "EAGLE-3": (3, ("input_norm",), {"normed_residual": True}),
    "EAGLE-3, two layers": (3, (), {"layers": 2, "taps": (5,), "width": 48, "ids": np.arange(VOCAB)}),
    "EAGLE-3.1": (3, (*EACH, "0.q_norm", "0.k_norm", "0.o.bias"), {"normed_state": True, "head_dim": 24}),
}


@pytest.fixture(scope="module")
def deep_target() -> Source:
    model = tiny_model("llama", num_hidden_layers=8)
    return Source(Path("target"), model, None, "f" * 64, "c" * 64, (2,))


def reference_of(name: str, target: Source) -> tuple[ReferenceHead, tuple[int, ...]]:
    """A random head, and its taps."""
    version, extra, options = HEADS[name]
    options = dict(options)
    taps = options.pop("taps", TAPS if version == 3 else ())
    ids = options.pop("ids", IDS if version == 3 else np.arange(VOCAB))
    layers, head_dim, width = options.pop("layers", 1), options.pop("head_dim", 16), options.pop("width", WIDTH)
    weights = random_weights(
        *(np.random.default_rng(len(name)), version, width, WIDTH, 4, 2, head_dim, INNER, VOCAB, len(ids), layers),
        extra,
        len(taps) or None,
    )
    if width == WIDTH:
        weights["embedding"] = target.model.get_input_embeddings().weight.detach().double().numpy()
    return ReferenceHead(version, 4, 2, head_dim, layers, weights, ids, **options), taps


def folder_of(reference: ReferenceHead, taps: tuple[int, ...], folder: Path) -> Path:
    """The head on disk, in the official layout or what we make of it."""
    stands_alone = len(reference.weights["0.post"]) != WIDTH
    tensors = tensors_of(reference, "official", () if stands_alone else ("embedding",))
    config = config_of(reference, "official") | {"bias": "fc.bias" in reference.weights}
    form: dict[str, Any] = {"norm_before_residual": reference.normed_residual, "norm_output": reference.normed_state}
    if reference.version == 1:
        config["bias"] = "fc.bias" in reference.weights
        form = {"join": reference.join}
        ours = {name: f"fusion.{name}" for name in ("input_norm", *(f"fc_norm.{index}" for index in range(len(taps))))}
        ours |= {"norm": "lm_head_layernorm", "fusion": "fusion.fc"}
        tensors = {
            f"{ours[name]}.weight": tensors.pop(f"{name}.weight") for name in ours if name in reference.weights
        } | tensors
    config["speccompile_eagle"] = {"target_fingerprint": "f" * 64, "taps": list(taps), "shares": [], "form": form}
    return save(folder, tensors, config)


@pytest.mark.parametrize("name", HEADS)
def test_head_graphs_equal_float64(name: str, deep_target: Source, tmp_path: Path) -> None:
    """A prompt in two pieces, then a tree level by level, each level seeing what it descends from of all before it."""
    reference, taps = reference_of(name, deep_target)
    head = read_eagle(folder_of(reference, taps, tmp_path / "head"), deep_target)
    assert head.warnings == () and head.form.taps == taps and head.form.join == reference.join
    streams = entering(deep_target.model, "model.norm", PROMPT[:-1])
    with torch.no_grad():
        last = deep_target.model(torch.tensor([PROMPT[:-1]]), output_hidden_states=True).hidden_states[-1]
    taken = [streams[tap] for tap in taps] or [last[0].double().numpy()]
    wanted = reference.features(taken)
    features = eager_features(deep_target, head, PROMPT[:-1])
    np.testing.assert_allclose(features, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)

    top_k = 7
    graph = graph_of(head.model, DraftTail(head.token_ids, top_k, with_state=True), tmp_path, head.model.feature_width)
    width = head.model.feature_width
    assert (graph.features, graph.width, graph.top_k, graph.vocab_size) == (
        width,
        width,
        top_k,
        len(reference.token_ids),
    )
    cache = graph.open(64)
    count = len(PROMPT) - 1
    tokens = np.random.default_rng(4).integers(0, VOCAB, len(BRANCHING))
    known = [*PROMPT[1:-1], int(tokens[0])]  # the root is what follows the text: position count of the target

    def run(ids: Sequence[int], positions: Array, mask: Array, beside: Array) -> Iterator[tuple[Array, ...]]:
        rows = np.arange(len(ids))
        out = cache.run(np.array(ids), positions, mask, rows, features=beside)
        assert out.hidden is not None and out.topk_ids is not None and out.topk_logprobs is not None
        parts = (out.hidden[0], out.logits[0], out.next_ids[0], out.topk_ids[0], out.topk_logprobs[0])
        yield from zip(*(part.copy() for part in parts), strict=True)

    found: dict[int, tuple[Array, ...]] = {}
    for begin, end in ((0, 5), (5, count)):
        ids, size = known[begin:end], end - begin
        *_, found[0] = run(ids, np.arange(begin, end), np.tri(size, dtype=np.bool_), features[begin:end])
        cache.commit(range(size))
    for depth in range(1, BRANCHING.max_depth + 1):
        level = np.flatnonzero(BRANCHING.depths == depth)
        above = np.stack([found[BRANCHING.parents[node]][0] for node in level])
        mask = BRANCHING.mask[level, 1 : level[-1] + 1]
        assert depth == 1 or (mask.shape[1] > len(level) and not mask.all())
        found |= dict(
            zip(
                level.tolist(),
                run(tokens[level].tolist(), np.full(len(level), count + depth - 1), mask, above),
                strict=True,
            )
        )
    for node, (state, logits, best, ids, logprobs) in found.items():
        path = tokens[BRANCHING.ancestry(node)[1:]].tolist()
        want_state, want = reference.follow(known, wanted, path)
        np.testing.assert_allclose(state, want_state, atol=1e-4 * np.abs(want_state).max(), rtol=0)
        np.testing.assert_allclose(logits, want, atol=1e-4 * np.abs(want).max(), rtol=0)
        order = np.argsort(-want, kind="stable")[:top_k]
        assert ids.tolist() == reference.token_ids[order].tolist() and best == ids[0]
        chances = want - np.log(np.exp(want - want.max()).sum()) - want.max()
        np.testing.assert_allclose(logprobs, chances[order], atol=1e-3)
        eager, eager_state = eager_draft(head, features, [*known, *path])
        np.testing.assert_allclose(state, eager_state, atol=1e-4 * np.abs(want_state).max(), rtol=0)
        np.testing.assert_allclose(logits, eager, atol=1e-4 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("mistake", [{"join": 1}, {"skip": ("1.input",)}, {"skip": ("fc_norm.2",)}])
def test_the_reference_tells_joined_variants_apart(
    mistake: dict[str, Any], deep_target: Source, tmp_path: Path
) -> None:
    reference, taps = reference_of("EAGLE-1, joined", deep_target)
    head = read_eagle(folder_of(reference, taps, tmp_path), deep_target)
    streams = [entering(deep_target.model, "model.norm", PROMPT[:-1])[tap] for tap in taps]
    features = eager_features(deep_target, head, PROMPT[:-1])
    _, state = eager_draft(head, features, PROMPT[1:])
    for wrong, changes in ((False, {}), (True, mistake)):
        other = replace(reference, **changes)
        difference = np.abs(other.follow(PROMPT[1:], other.features(streams), [])[0] - state).max()
        assert (difference > 1e-2) if wrong else (difference < 1e-3)


# ---- heads on disk ----


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("name", ["EAGLE-1, fused", "EAGLE-1, joined"])
def test_what_is_ours_is_read_as_it_was_written(name: str, dtype: str, deep_target: Source, tmp_path: Path) -> None:
    reference, taps = reference_of(name, deep_target)
    head = read_eagle(folder_of(reference, taps, tmp_path / "in"), deep_target)
    write_eagle(head, tmp_path / "out", dtype=dtype)
    again = read_eagle(tmp_path / "out", deep_target)
    assert again.form == head.form and again.form.taps == taps and again.form.join == reference.join
    assert again.form.fusion_norm == ("whole" if "fused" in name else "each")
    assert (again.fingerprint == head.fingerprint) == (dtype == "fp16")
    with pytest.raises(CheckpointError, match="no fused features and no draft vocabulary; write this head in the offi"):
        write_eagle(head, tmp_path / "bad", "speculators")
    facts = describe(tmp_path / "out")
    assert (facts["version"], facts["join"], facts["taps"]) == (1, reference.join, list(taps))
    assert facts["reads"] == f"what enters the target's layers {list(taps)}"


@pytest.mark.parametrize("join", [-1, 3, "1", True])
def test_joins_that_are_none(join: object, deep_target: Source, tmp_path: Path) -> None:
    folder = folder_of(*reference_of("EAGLE-1, joined", deep_target), tmp_path)
    edit_config(folder, lambda config: config["speccompile_eagle"]["form"].update(join=join))
    with pytest.raises(CheckpointError, match=rf"form\.join is {join!r}; expected one of the head's layers, 0 \.\. 2"):
        read_eagle(folder, deep_target)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


# ---- heads that have learned something ----


def teach(source: Source, form: EagleForm, token_ids: torch.Tensor | None, layers: int = 1) -> EagleModel:
    """A head that knows by heart what the target says to TEXTS: enough that its guesses are often accepted."""
    ids = []
    for text in TEXTS:
        prompt = source.tokenizer.encode(text)[-40:]
        with torch.no_grad():
            said = source.model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=100 - len(prompt), eos_token_id=None
            )
        ids.append(said[0])
    tokens = torch.stack(ids)
    with torch.no_grad(), tapping(source.model, form.taps) as streams:
        out = source.model(tokens, output_hidden_states=True, use_cache=False)
        read = [streams[tap] for tap in form.taps] or [out.hidden_states[-1]]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=320,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    rows = torch.arange(VOCAB) if token_ids is None else token_ids
    model = EagleModel(config, form, 64, len(rows))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
        model.lm_head.weight.copy_(source.lm_head.weight[rows])  # type: ignore[index]
    model.embed_tokens.weight = nn.Parameter(source.model.get_input_embeddings().weight.detach(), requires_grad=False)
    columns = torch.full((VOCAB,), -100).scatter(0, rows, torch.arange(len(rows)))
    labels, mask = columns[tokens[:, 2:]], torch.full((98, 98), -torch.inf).triu(1)[None, None]
    parameters = [part for name, part in model.named_parameters() if not name.startswith(("embed_tokens", "lm_head"))]
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    for step in range(150):
        features = model.features([stream[:, :-2] for stream in read])
        loss = torch.zeros(())
        for _ in range(1 + (step > 60)):  # with the target's features, then with its own
            out = model(tokens[:, 1:-1], torch.arange(98)[None], features, mask)
            state = out.hidden_states[-1]
            loss = loss + nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
            if not form.taps:
                loss = loss + nn.functional.smooth_l1_loss(state, read[0][:, 1:-1])
            features = torch.cat((features[:, :1], state[:, :-1]), 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="session")
def said(tiny_checkpoint: Path) -> torch.Tensor:
    """Most of what the target says: a draft vocabulary."""
    source = read_model(tiny_checkpoint)
    prompts = [source.tokenizer.encode(text)[-40:] for text in TEXTS]
    texts = [
        source.model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=90, eos_token_id=None) for p in prompts
    ]
    return torch.cat([text.flatten() for text in texts]).unique()


@pytest.fixture(scope="session")
def head1(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """EAGLE-1: nothing but fc and one layer without an input norm."""
    source, folder = read_model(tiny_checkpoint), tmp_path_factory.mktemp("eagle") / "one"
    write_eagle(make_head(folder, teach(source, EagleForm(1), None), source, None), folder)
    return folder


@pytest.fixture(scope="session")
def head3(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, said: torch.Tensor) -> Path:
    """EAGLE-3 on what enters the first and second layer and what leaves the last, over a draft vocabulary."""
    source, folder = read_model(tiny_checkpoint), tmp_path_factory.mktemp("eagle") / "three"
    model = teach(source, EagleForm(3, taps=(0, 1, 3), fusion_norm="each"), said)
    write_eagle(make_head(folder, model, source, said, ("embedding",)), folder)
    return folder


@pytest.fixture(scope="session")
def bundle3(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, head3: Path) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "eagle3.bundle"
    build(tiny_checkpoint, out, method="eagle", head=head3)
    return out


@pytest.fixture(scope="session")
def bundle1(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, head1: Path, tiny_bundle: Path) -> Path:
    """Its target graph is that of `tiny_bundle`, which gives the features that EAGLE-1 reads."""
    out = tmp_path_factory.mktemp("bundle") / "eagle1.bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "write_target", copied_target(tiny_bundle))
        build(tiny_checkpoint, out, method="eagle", head=head1, tree=TREES["static"])
    return out


def copied_target(bundle: Path) -> Callable[..., GraphInfo]:
    def write_target(_source: Any, _found: Any, _tail: Any, plan: building.Plan) -> GraphInfo:
        ir.save(ir.load(bundle / "target.onnx"), plan.folder / "target.onnx", external_data="target.onnx.data")
        return Bundle.open(bundle).manifest.graphs["target"]

    return write_target


@pytest.fixture(scope="session")
def decoder1(bundle1: Path) -> Decoder:
    return load(bundle1, threads=1)


@pytest.fixture(scope="session")
def decoder3(bundle3: Path) -> Decoder:
    return load(bundle3, threads=1)


# ---- bundles ----

FIGURES = {"prefill", "tree", "path", "commit", "row", "hidden", "eagle", "eagle_int8", "eagle_topk", "tokens"}


def test_manifests(decoder1: Decoder, decoder3: Decoder, head1: Path, head3: Path, tiny_checkpoint: Path) -> None:
    source = read_model(tiny_checkpoint)
    for decoder, folder in ((decoder1, head1), (decoder3, head3)):
        manifest, head = decoder.bundle.manifest, read_eagle(folder, source)
        assert (manifest.schema, manifest.method, manifest.heads, manifest.draft) == (4, "eagle", None, None)
        info = manifest.eagle
        assert info is not None and manifest.drafting is info
        assert (info.fingerprint, info.target_fingerprint) == (head.fingerprint, source.fingerprint)
        assert (info.architecture, info.layers, info.top_k) == ("official", 1, 10)
        assert (info.version, tuple(info.taps)) == (head.version, head.form.taps)
        assert info.max_length == manifest.target.max_length == 128
        assert set(manifest.graphs) == {"target", "eagle"} and manifest.graphs["eagle"].precision == "int8"
        assert set(manifest.proof) == FIGURES
        for name in FIGURES - {"tokens"}:
            figure = manifest.proof[name]
            assert 0 <= figure["difference"] <= figure["bound"]
            assert figure["difference"] > 0 or name == "eagle_topk"
        # The head's products are large enough to be rounded, and rounding shows.
        assert manifest.proof["eagle_int8"]["difference"] > 10 * manifest.proof["eagle"]["difference"]
        tokens = manifest.proof["tokens"]
        assert tokens["ties"] == 0 and tokens["compared"] == tokens["emitted"] > 100
    assert decoder3.tree == building.EAGLE_TREE and decoder1.tree == TREES["static"]
    info3 = decoder3.bundle.manifest.eagle
    assert info3 is not None and info3.taps == [0, 1, 3] and info3.draft_vocabulary < VOCAB
    assert decoder3.draft_tokens is not None and len(decoder3.draft_tokens) == info3.draft_vocabulary
    # What is shared is stored once.
    graph = ir.load(decoder1.bundle.path / "eagle.onnx").graph
    table = next(node for node in graph if node.op_type == "Gather").inputs[0]
    assert table is not None and isinstance(table.const_value, ir.ExternalTensor)
    assert table.const_value.location == "target.onnx.data"


def every(decoder1: Decoder, decoder3: Decoder) -> Iterator[tuple[str, Decoder]]:
    for version, decoder in ((1, decoder1), (3, decoder3)):
        for name, tree in TREES.items():
            yield f"EAGLE-{version}, {name}", changed(decoder, tree, [])
        for name in ("static", "dynamic"):
            yield f"EAGLE-{version}, {name}, also", changed(decoder, TREES[name], [], lookup=LookupSettings())


def test_greedy_tokens_are_those_of_plain_decoding(decoder1: Decoder, decoder3: Decoder) -> None:
    prompts = [decoder1.encode(text)[-40:] for text in TEXTS]
    for name, decoder in every(decoder1, decoder3):
        rounds = accepted = 0
        for prompt in prompts:
            ours, plain = (answer(decoder, prompt, max_new_tokens=50, speculate=s) for s in (True, False))
            assert ours.token_ids == plain.token_ids, name
            rounds, accepted = rounds + ours.stats.rounds, accepted + ours.stats.accepted
        assert accepted > rounds / 2, name


def test_chosen_drafts_do_not_change_what_a_seed_draws(decoder1: Decoder, decoder3: Decoder) -> None:
    prompt, drafted = decoder1.encode(TEXTS[1]), 0
    for name, decoder in every(decoder1, decoder3):
        if not isinstance(decoder.tree, DynamicTree) and "also" not in name:
            continue  # these draw their guesses from the same numbers
        for seed in range(3):
            options: dict[str, Any] = {"max_new_tokens": 25, "temperature": 0.8, "top_p": 0.95, "seed": seed}
            ours, plain = (answer(decoder, prompt, speculate=s, **options) for s in (True, False))
            assert ours.token_ids == plain.token_ids, name
            drafted += ours.stats.drafted
    assert drafted > 100


def test_a_second_turn_and_a_long_prompt(decoder1: Decoder, decoder3: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, too, are those of a fresh sequence, and of a prompt that was run at once."""

    def facts(got: Any) -> tuple[Any, ...]:
        return got.token_ids, got.stats.rounds, got.stats.drafted, got.stats.accepted

    for decoder in (decoder1, decoder3):
        decoder = changed(decoder, decoder.tree, [])
        text, sequence = decoder.encode(TEXTS[0]), decoder.new_sequence()
        first = decoder.generate(text, max_new_tokens=20, sequence=sequence)
        longer = [*text, *first.token_ids, 7, 8, 9]
        second = decoder.generate(longer, max_new_tokens=20, sequence=sequence)
        # The head's last row had not seen the token behind it, so the target gives that feature again.
        assert second.stats.reused_tokens >= len(longer) - 8
        fresh = answer(decoder, longer, max_new_tokens=20)
        assert facts(second) == facts(fresh)
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "PREFILL_CHUNK", 7)
            patch.setattr(growing, "CATCH_UP_CHUNK", 3)
            assert facts(answer(decoder, longer, max_new_tokens=20)) == facts(fresh)


# ---- the command line ----


def test_eagle_from_the_command_line(
    speccompile: Cli, tiny_checkpoint: Path, said: torch.Tensor, tmp_path: Path
) -> None:
    """A head of two layers, the first of which reads tokens alone, with prompt lookup beside it."""
    source, head, out = read_model(tiny_checkpoint), tmp_path / "head", tmp_path / "out"
    form = EagleForm(1, taps=(1, 3), join=1, fusion_norm="each", input_norm=True, output_norm=True)
    write_eagle(make_head(head, teach(source, form, said, layers=2), source, said), head, dtype="int8")
    limits = ("--nodes", 9, "--depth", 4, "--top-k", 3)
    options = ("--method", "eagle", "--head", head, *limits, "--also", "prompt-lookup")
    status, stdout, err = speccompile("build", tiny_checkpoint, *options, "--out", out, "--json")
    assert (status, err) == (0, "")
    manifest = json.loads(stdout)
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest["tree"] == {"dynamic": {"nodes": 9, "floor": 0.0, "depth": 4, "top_k": 3}}
    assert manifest["lookup"] == {"ngram": 3, "guesses": 3, "newest": True}
    assert (manifest["eagle"]["version"], manifest["eagle"]["taps"], manifest["eagle"]["layers"]) == (1, [1, 3], 2)
    assert set(manifest["proof"]) == FIGURES

    arguments = ("run", out, "--prompt", TEXTS[2], "--max-new-tokens", 40, "--threads", 1, "--json")
    ours, plain = (json.loads(speccompile(*arguments, *more)[1]) for more in ((), ("--plain",)))
    assert ours["token_ids"] == plain["token_ids"] and ours["stats"]["accepted"] > ours["stats"]["rounds"] / 2
    facts = json.loads(speccompile(*arguments, "--stats")[1])
    assert facts["compared"]["cost_of_a_draft_step"][1] > 0
    status, stdout, _ = speccompile("inspect", out)
    assert status == 0
    for word in ("eagle.onnx", "features", "taps", "[1, 3]", "at most 9 nodes"):
        assert word in " ".join(stdout.split())

    status, stdout, err = speccompile(
        "verify", out, "--against", tiny_checkpoint, "--head", head, "--threads", 1, "--json"
    )
    assert (status, err) == (0, "")
    assert set(json.loads(stdout)) == FIGURES - {"eagle"}  # the graph before rounding is not in the bundle
    status, _, err = speccompile("verify", out, "--threads", 1)
    assert status == 0 and "commit" in err


def test_a_draft_model_and_prompt_lookup(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--method", "draft", "--draft", tiny_checkpoint, "--also", "prompt-lookup", "--tree", "dynamic-8")
    status, stdout, err = speccompile("build", tiny_checkpoint, *options, "--out", out, "--json")
    assert status == 0, err
    assert json.loads(stdout)["lookup"] == {"ngram": 3, "guesses": 3, "newest": True}
    arguments = ("run", out, "--prompt", TEXTS[2], "--max-new-tokens", 40, "--threads", 1, "--json")
    ours, plain = (json.loads(speccompile(*arguments, *more)[1]) for more in ((), ("--plain",)))
    assert ours["token_ids"] == plain["token_ids"] and ours["stats"]["accepted"] > ours["stats"]["rounds"] / 2


def test_a_graph_names_as_many_tokens_as_a_node_has_children() -> None:
    wide = TokenTree.from_paths([[rank] for rank in range(15)])
    for tree, wanted in (
        (wide, 15),
        (DynamicTree(40, depth=3, top_k=13), 13),
        (DynamicTree(40), 10),
        (AdaptiveChain(4), 10),
    ):
        assert building._top_k(tree, 320) == building._top_k(tree, None) == wanted
        assert building._top_k(tree, 8) == 8


# ---- proofs that fail ----


@pytest.fixture
def source(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """The target, and one prompt to prove it with."""
    monkeypatch.setattr(proving, "PROMPTS", proving.PROMPTS[2:3])
    return read_model(tiny_checkpoint)


def fails(check: str, blame: str, decoder: Decoder, source: Source, head: EagleHead) -> None:
    with pytest.raises(ProofError, match=rf"^proof '{check}': .*{blame}"):
        prove(decoder, source, eagle=head)


def with_form(head: EagleHead, **changes: Any) -> EagleHead:
    model = copy.deepcopy(head.model)
    model.form = replace(model.form, **changes)
    return replace(head, model=model)


def test_what_holds(decoder1: Decoder, decoder3: Decoder, source: Source, head1: Path, head3: Path) -> None:
    for decoder, folder in ((decoder1, head1), (decoder3, head3)):
        assert set(prove(decoder, source, eagle=read_eagle(folder, source))) == FIGURES - {"eagle"}
    assert set(prove(decoder3, None)) == {"path", "commit", "row", "tokens"}


def test_another_head_or_form(decoder3: Decoder, source: Source, head3: Path) -> None:
    head = read_eagle(head3, source)
    for taps in ((0, 2, 3), (1, 2, 3), (0, 1, 2)):  # off by one
        fails("hidden", "the feature output of the target graph", decoder3, source, with_form(head, taps=taps))
    blame = "rounding to int8"  # all that is left to blame where the exact graph is not at hand
    fails("eagle_int8", blame, decoder3, source, with_form(head, norm_output=True))  # the state before the norm
    normed = with_form(head)
    normed.model.layers[0].residual_normed = True
    fails("eagle_int8", blame, decoder3, source, normed)


def exact_graph(decoder: Decoder) -> Decoder:
    """The decoder, its head's graph held to the bounds of float32."""
    graphs = decoder.bundle.manifest.graphs
    return changed(decoder, decoder.tree, graphs={**graphs, "eagle": replace(graphs["eagle"], precision="fp32")})


Calls = Callable[[dict[str, Any], bool], None]


def alter_calls(monkeypatch: pytest.MonkeyPatch, change: Calls) -> None:
    """Have the head called with other arguments; `change` also learns whether a level of a tree is run."""
    run = OrtCache.run

    def altered(self: OrtCache, ids: Array, positions: Array, mask: Array, rows: Array, **beside: Any) -> Any:
        given = {"ids": ids, "positions": positions, "mask": mask, "rows": rows, **beside}
        if self.target.features:
            change(given, mask.shape[1] > mask.shape[0] or bool(positions[0] >= self.length > 0))
        return run(self, given.pop("ids"), given.pop("positions"), given.pop("mask"), given.pop("rows"), **given)

    monkeypatch.setattr(OrtCache, "run", altered)


def shift_features(given: dict[str, Any], _level: bool) -> None:
    given["features"] = np.roll(given["features"], 1, axis=0)


def ignore_an_ancestor(given: dict[str, Any], _level: bool) -> None:
    older = given["mask"].shape[1] - given["mask"].shape[0]
    if older:
        given["mask"] = given["mask"].copy()
        given["mask"][:, older - 1] = False


def see_everything(given: dict[str, Any], level: bool) -> None:
    if level:
        given["mask"] = np.ones_like(given["mask"])


def start_at_one(given: dict[str, Any], level: bool) -> None:
    if level:  # rope does not care where all begin
        given["positions"] = given["positions"] + 1


def feed_nothing(given: dict[str, Any], level: bool) -> None:
    if level:
        given["features"] = np.zeros_like(given["features"])


@pytest.mark.parametrize("change", [shift_features, ignore_an_ancestor, see_everything, start_at_one, feed_nothing])
def test_a_head_that_is_called_wrongly(
    change: Calls, decoder1: Decoder, source: Source, head1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake shows in the exact graph, within the bounds of float32."""
    head = read_eagle(head1, source)
    tail = DraftTail(None, 10, with_state=True)
    exact = graph_of(head.model, tail, tmp_path, 64)
    decoder = exact_graph(decoder1)
    decoder.draft = exact
    assert "eagle" in prove(decoder, source, eagle=head)
    alter_calls(monkeypatch, change)
    fails("eagle", "its tree mask, positions or states", decoder, source, head)


def test_draft_tokens_that_are_others(decoder3: Decoder, source: Source, head3: Path) -> None:
    head = read_eagle(head3, source)
    assert head.token_ids is not None and decoder3.draft_tokens is not None
    other = copy.copy(decoder3)
    count = len(decoder3.draft_tokens)
    other.draft_tokens = np.sort(np.random.default_rng(0).permutation(VOCAB)[:count])
    fails("eagle_topk", "the bundle's list of draft tokens is another than in", other, source, head)
    wrong = replace(head, token_ids=torch.from_numpy(other.draft_tokens))  # the list is the head's, the graph's is not
    fails("eagle_topk", "differs by inf, .* or the target's ids for them", other, source, wrong)


def test_a_failed_proof_publishes_nothing(
    speccompile: Cli,
    tiny_bundle: Path,
    tiny_checkpoint: Path,
    head1: Path,
    source: Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(building, "write_target", copied_target(tiny_bundle))
    alter_calls(monkeypatch, shift_features)
    options = ("--method", "eagle", "--head", head1, "--out", tmp_path / "out", "--json")
    status, out, err = speccompile("build", tiny_checkpoint, *options)
    assert (status, out) == (1, "") and re.match(r"error: proof 'eagle': .* Nothing was published\.\n", err)
    assert not list(tmp_path.iterdir())


# ---- bundles that are wrong ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["eagle"].pop("version"), "field 'eagle.version' is missing"),
        (lambda m: m["eagle"].pop("taps"), "field 'eagle.taps' is missing"),
        (lambda m: m["eagle"].update(taps="0,1"), "field 'eagle.taps' is '0,1'; expected list"),
        (lambda m: m["eagle"].update(version=True), "field 'eagle.version' is True; expected int"),
        (lambda m: m.update(eagle=None), "method is 'eagle' but eagle is null"),
        (lambda m: m["graphs"].pop("eagle"), "graphs lacks an entry that method 'eagle' needs"),
        (lambda m: m.update(method="draft"), "graphs lacks an entry that method 'draft' needs"),
        (lambda m: m["eagle"].update(target_fingerprint="0" * 64), "eagle.target_fingerprint is 000000000000... but"),
        (lambda m: m["eagle"].update(token_map="ids.npy"), "file 'ids.npy' has no entry under files"),
        (lambda m: m["eagle"].update(top_k=3), "eagle.onnx gives"),
        (lambda m: m.update(draft={**m["eagle"]}), "field 'draft' is set, but method 'eagle' has no use for it"),
        (lambda m: m["tree"].update(dynamic={"nodes": 8, "floor": 0.1, "depth": 0}), "field 'tree' is not usable"),
    ],
)
def test_manifests_that_contradict_themselves(
    bundle3: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    copied = shutil.copytree(bundle3, tmp_path / "copy")
    edit_manifest(copied, change)
    with pytest.raises(BundleError, match=re.escape(words)):
        load(copied, threads=1)


def test_a_head_graph_of_another_width(bundle1: Path, bundle3: Path, tmp_path: Path) -> None:
    """A target that gives no features, and heads that read none."""
    copied = shutil.copytree(bundle1, tmp_path / "copy")
    graph = ir.load(copied / "target.onnx")
    graph.graph.outputs[:] = [value for value in graph.graph.outputs if value.name != "hidden"]
    ir.save(graph, copied / "target.onnx")
    rehash(copied, "target.onnx")
    with pytest.raises(BundleError, match=r"takes features 64 wide and gives states 64 wide, but should .* None"):
        load(copied, threads=1)


# ---- bad input ----


def stopped(*_: Any) -> Any:
    raise SpecCompileError("the head was read.")


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("which", "change", "words"),
    [
        ("head1", lambda t, c: c.update(hidden_size=32), "'fc.weight' has shape [64, 128] but config.json makes it"),
        ("head1", lambda t, c: c.update(vocab_size=400), "for a vocabulary of 400 tokens but the target has 320"),
        ("head3", lambda t, c: c.update(target_hidden_size=48), "target_hidden_size 48 but the target's are 64 wide"),
        ("head3", lambda t, c: t["d2t"].add_(200), "outside the target's 320 tokens"),
        ("head3", lambda t, c: t.pop("d2t"), "tensor 'd2t' is missing"),
        ("head3", lambda t, c: c["speccompile_eagle"].update(taps=[0, 1, 4]), "ascending, out of the target's 3"),
        ("head3", lambda t, c: c["speccompile_eagle"].update(taps=[0, 3]), "fc.weight reads 192 numbers but 2 layers"),
        ("head3", lambda t, c: c.update(rope_scaling={"rope_type": "spiral"}), "rope type 'spiral' is unknown"),
        ("head3", lambda t, c: c.update(num_attention_heads=8), "config.json makes it"),
        ("head3", lambda t, c: t["norm.weight"].fill_(torch.nan), "'norm.weight' holds NaN"),
    ],
)
def test_bad_heads(
    speccompile: Cli,
    tiny_checkpoint: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    which: str,
    change: Change,
    words: str,
) -> None:
    folder = request.getfixturevalue(which)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save(tmp_path / "head", tensors, config)
    out = tmp_path / "out"
    options = ("--method", "eagle", "--head", tmp_path / "head", "--out", out, "--json")
    status, stdout, err = speccompile("build", tiny_checkpoint, *options)
    assert (status, stdout) == (1, "") and err.startswith(f"error: {tmp_path / 'head'}") and err.count("\n") == 1
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_head_of_another_size_or_target(
    speccompile: Cli, tiny_checkpoint: Path, other_checkpoint: Path, head3: Path, tmp_path: Path
) -> None:
    source = read_model(tiny_checkpoint)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    narrow = make_head(tmp_path, EagleModel(config, EagleForm(1), 48, VOCAB).eval(), source, None, ())
    write_eagle(narrow, tmp_path / "narrow")
    for model, head, words in (
        (tiny_checkpoint, tmp_path / "narrow", "features of hidden_size 48 but the target's are 64 wide"),
        (other_checkpoint, head3, f"made for the target with fingerprint {source.fingerprint} but this target's is"),
        (tiny_checkpoint, tmp_path / "nowhere", "no EAGLE head found"),
        (tiny_checkpoint, tiny_checkpoint, "no EAGLE head: neither 'midlayer.*' nor an fc.weight"),
    ):
        options = ("--method", "eagle", "--head", head, "--out", tmp_path / "out", "--json")
        status, stdout, err = speccompile("build", model, *options)
        assert (status, stdout) == (1, "") and err.count("\n") == 1 and words in err
        assert not (tmp_path / "out").exists()


def test_a_head_whose_rope_changes_with_the_length(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, head1: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(head1, tmp_path / "head")
    edit_config(copied, lambda config: config.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    options = ("--method", "eagle", "--head", copied, "--out", tmp_path / "out", "--json")
    status, stdout, err = speccompile("build", tiny_checkpoint, *options)
    assert (status, stdout) == (1, "") and "rope type 'dynamic' changes with the length of the text" in err


def test_norms_that_are_open_must_be_named(
    speccompile: Cli, tiny_checkpoint: Path, head3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "survey", stopped)
    source, folder = read_model(tiny_checkpoint), tmp_path / "head"
    write_eagle(read_eagle(head3, source), folder, "speculators")
    edit_config(folder, lambda config: config.pop("norm_before_residual"))

    def call(*more: object) -> tuple[int, str]:
        options = ("--method", "eagle", "--head", folder, "--out", tmp_path / "out", "--json", *more)
        status, _, err = speccompile("build", tiny_checkpoint, *options)
        return status, err

    status, err = call()
    assert status == 1 and "say --norm norm_before_residual=true or --norm norm_before_residual=false" in err
    assert call("--norm", "norm_before_residual=false") == (1, "error: the head was read.\n")
    status, err = call("--norm", "fc_norm=true")
    assert status == 1 and "--norm fc_norm: not a norm that a head leaves open" in err
    for wrong in ("norm_before_residual", "norm_before_residual=yes", "=", "norm_before_residual=true=false"):
        status, err = call("--norm", wrong)
        assert status == 2 and f"--norm: '{wrong}' is not NAME=true or NAME=false" in err


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--method", "eagle"), 1, "--head: method eagle needs a head; give its folder"),
        (("--method", "draft", "--head", "x"), 2, "--head does not go with --method draft"),
        (("--method", "medusa", "--norm", "norm_output=true"), 2, "--norm does not go with --method medusa"),
        (("--method", "eagle", "--head", "x", "--heads", "y"), 2, "--heads does not go with --method eagle"),
        (("--method", "eagle", "--head", "x", "--depth", 3), 2, "--depth goes with --nodes"),
        (("--method", "eagle", "--head", "x", "--top-k", 3), 2, "--top-k goes with --nodes"),
        (("--method", "eagle", "--head", "x", "--nodes", 8, "--tree", "chain-3"), 2, "and so does --tree; give one"),
        (("--method", "eagle", "--head", "x", "--nodes", 1), 1, "dynamic-1 leaves no room for a guess"),
        (("--method", "eagle", "--head", "x", "--nodes", 8, "--depth", 0), 1, "a depth of 0 leaves no room"),
        (("--method", "eagle", "--head", "x", "--nodes", 8, "--top-k", 0), 1, "a top_k of 0 leaves no room"),
        (("--method", "plain", "--nodes", 8), 2, "--nodes does not go with --method plain"),
        (("--method", "eagle", "--head", "x", "--tree", "dynamic-8-d0"), 1, "a depth of 0 leaves no room"),
    ],
)
def test_options(
    speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path, options: tuple[Any, ...], status: int, words: str
) -> None:
    got, out, err = speccompile("build", tiny_checkpoint, *options, "--out", tmp_path / "out", "--json")
    assert (got, out) == (status, "") and words in err
    assert not (tmp_path / "out").exists()


def test_options_through_the_library(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"method": "eagle"}, "--head: method eagle needs a head"),
        ({"method": "draft", "head": tmp_path}, "--head: of no use to method draft; it goes with eagle"),
        ({"method": "plain", "norms": {"norm_output": True}}, "--norm: of no use to method plain; it goes with eagle"),
    ):
        with pytest.raises(SpecCompileError, match=re.escape(words)):
            build(tiny_checkpoint, tmp_path / "out", **options)  # type: ignore[arg-type]


def test_verify_with_another_head(
    speccompile: Cli, bundle3: Path, tiny_bundle: Path, tiny_checkpoint: Path, head1: Path, head3: Path
) -> None:
    source = read_model(tiny_checkpoint)
    ours, theirs = (read_eagle(path, source).fingerprint for path in (head3, head1))
    with pytest.raises(BundleError) as caught:
        verify(bundle3, tiny_checkpoint, head=head1, threads=1)
    for word in (str(bundle3), ours[:12], str(head1), theirs[:12], "give the EAGLE head it was built with"):
        assert word in str(caught.value)
    status, _, err = speccompile("verify", tiny_bundle, "--against", tiny_checkpoint, "--head", head1, "--json")
    assert status == 1 and "method medusa has no EAGLE head to compare with" in err
    status, _, err = speccompile("verify", bundle3, "--head", head3)
    assert status == 2 and "--head goes with --against" in err
