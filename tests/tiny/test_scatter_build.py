"""Bundles of dialect scatter, built by `build` and run by the same runtime as others: every precision, every method."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
import torch

import speccompile.compiler.build as building
import speccompile.compiler.prove as proving
from speccompile.compiler.build import build
from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.quantise import quantise_scatter
from speccompile.compiler.write_graph import write_graph
from speccompile.graphs.errors import BundleError, ProofError, SpecCompileError, TraceError
from speccompile.graphs.manifest import Manifest
from speccompile.graphs.passes import finish_scatter
from speccompile.graphs.scatter import cast_model, trace_scatter
from speccompile.graphs.target import TargetTail, survey
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.decoder import Decoder, load
from tests.tiny.conftest import EOS_IDS, Cli, save_tiny_model, write_tokenizer
from tests.tiny.models import tiny_model
from tests.tiny.test_precision import Case, save_model

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1]])
PROMPT = [5, 9, 40, 7, 7, 31, 12]


@dataclass(frozen=True)
class Wanted:
    method: str
    precision: str
    dtype: ir.DataType
    """Of the cache."""


WANTED = {
    "fp32": Wanted("medusa", "fp32", ir.DataType.FLOAT),
    "fp16": Wanted("eagle", "fp16", ir.DataType.FLOAT16),
    "bf16": Wanted("draft", "bf16", ir.DataType.BFLOAT16),
    "int4": Wanted("prompt-lookup", "int4", ir.DataType.FLOAT16),
    "int8": Wanted("plain", "int8", ir.DataType.FLOAT16),
    "fp8": Wanted("plain", "fp8", ir.DataType.FLOAT16),
}
LEVELS = {"int4": ir.DataType.INT4, "int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}


@pytest.fixture(scope="module")
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Wanted, Path, Path]:
    """(what was wanted, the model, the bundle)."""
    wanted = WANTED[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    parts: dict[str, Any] = {}
    if wanted.precision in LEVELS:  # wide enough for rounding to be worth it
        model = save_model(folder / "model", Case(wanted.precision, wanted.method))
    else:
        model = request.getfixturevalue("tiny_checkpoint")
    if wanted.method == "medusa":
        parts = {"heads": request.getfixturevalue("tuned_heads"), "tree": TREE}
    if wanted.method == "eagle":
        parts = {"head": request.getfixturevalue("scatter_head"), "tree": TREE}
    if wanted.method == "draft":
        parts = {"draft": save_tiny_model(folder / "draft", seed=1), "tree": TREE}
    build(model, folder / "out", method=wanted.method, dialect="scatter", precision=wanted.precision, **parts)
    return wanted, model, folder / "out"


@pytest.fixture(scope="session")
def scatter_head(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """EAGLE-3, whose fusion lies in the target's graph, with random weights."""
    from speccompile.graphs.eagle import EagleForm
    from tests.tiny.test_eagle_build import make_head, teach, write_eagle

    source, folder = read_model(tiny_checkpoint), tmp_path_factory.mktemp("eagle") / "three"
    model = teach(source, EagleForm(3, taps=(0, 1, 3), fusion_norm="each"), None)
    write_eagle(make_head(folder, model, source, None), folder)
    return folder


def inputs_of(path: Path) -> dict[str, ir.Value]:
    return {str(value.name): value for value in ir.load(path).graph.inputs}


def generated(model: Path, count: int) -> list[int]:
    """transformers' greedy tokens."""
    source = read_model(model)
    with torch.no_grad():
        out = source.model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=count, eos_token_id=None)
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("bundle", WANTED, indirect=True)
def test_what_was_wanted_is_what_was_built(bundle: tuple[Wanted, Path, Path]) -> None:
    wanted, _, out = bundle
    manifest = Manifest.from_json(json.loads((out / "manifest.json").read_text()), "manifest.json")
    graphs = manifest.graphs
    assert graphs["target"].precision == wanted.precision
    assert {info.dialect for name, info in graphs.items() if name != "medusa"} == {"scatter"}
    drafting = {info.precision for name, info in graphs.items() if name != "target"}
    assert drafting <= {wanted.precision}
    assert not list(out.glob("exact*")) and not list(out.glob("*.probe.onnx"))
    for name in set(graphs) - {"medusa"}:
        inputs = inputs_of(out / f"{name}.onnx")
        cache = inputs["past_key_values.0.key"]
        assert cache.dtype == wanted.dtype and [str(size) for size in cache.shape or ()][2] == "C"
        assert "features" not in inputs or inputs["features"].dtype == ir.DataType.FLOAT
    if wanted.precision in LEVELS:
        target = ir.load(out / "target.onnx").graph
        kinds = [value.dtype for value in target.initializers.values()]
        assert LEVELS[wanted.precision] in kinds
        assert wanted.precision != "int4" or ir.DataType.INT8 in kinds  # around attention, and the lm_head
        quality = manifest.proof["quality"]
        assert 0 < quality["kl_per_token"] < 0.1 and quality["top1_agreement"] > 0.7
    else:
        assert "quality" not in manifest.proof
    assert manifest.proof["tokens"]["compared"] > 50
    for check in ("prefill", "tree", "path", "commit", "row"):
        figure = manifest.proof[check]
        assert 0 <= figure["difference"] <= figure["bound"]


@pytest.mark.parametrize("bundle", ["fp32"], indirect=True)
def test_answers_are_transformers_own(bundle: tuple[Wanted, Path, Path]) -> None:
    _, model, out = bundle
    decoder = load(out, threads=1)
    assert not decoder.in_order
    want = generated(model, 40)
    for speculate in (True, False):
        got = decoder.generate(PROMPT, max_new_tokens=40, speculate=speculate, sequence=decoder.new_sequence())
        ended = next((n for n, token in enumerate(want, 1) if token in decoder.bundle.manifest.eos_ids), None)
        assert got.token_ids == want[:ended]


@pytest.mark.parametrize("bundle", ["fp16", "int4"], indirect=True)
def test_sixteen_bit_answers_are_those_of_plain_decoding(bundle: tuple[Wanted, Path, Path]) -> None:
    _, _, out = bundle
    decoder = load(out, threads=1)
    assert not decoder.in_order, "nothing rounds activations to integers here"
    plain, drafted = (
        decoder.generate(PROMPT * 2, max_new_tokens=60, speculate=speculate, sequence=decoder.new_sequence())
        for speculate in (False, True)
    )
    place = proving.first_difference(drafted.token_ids, plain.token_ids)
    if place is not None:
        gap = proving.top_two_gap(decoder, [*PROMPT * 2, *plain.token_ids[:place]])
        assert gap < proving.tie_gap(decoder) == proving.TIE_GAP["fp16"]


@pytest.mark.parametrize("bundle", ["bf16"], indirect=True)
def test_bfloat16_is_published_though_the_cpu_cannot_run_it(bundle: tuple[Wanted, Path, Path]) -> None:
    _, _, out = bundle
    weights = [value for value in ir.load(out / "draft.onnx").graph.initializers.values() if value.dtype is not None]
    assert ir.DataType.BFLOAT16 in {value.dtype for value in weights}
    with pytest.raises(BundleError, match=r"it is in bf16, .* run its engines with --backend tensorrt"):
        load(out, threads=1)
    assert json.loads((out / "manifest.json").read_text())["proof"]["twin"] == {"precision": "fp32"}


def test_twins_must_have_the_same_nodes(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = building.finish_scatter
    seen: list[ir.Model] = []

    def one_more(graph: ir.Model) -> None:
        real(graph)
        seen.append(graph)
        if len(seen) == 2:
            last = graph.graph.outputs[1]
            node = ir.node("Identity", [last])
            graph.graph.append(node)

    monkeypatch.setattr(building, "finish_scatter", one_more)
    with pytest.raises(TraceError, match="its graph in bf16 has other nodes than in fp32; use fp16 or fp32"):
        build(tiny_checkpoint, tmp_path / "out", method="plain", dialect="scatter", precision="bf16")
    assert not list(tmp_path.iterdir())


def test_a_model_that_overflows_in_sixteen_bits_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = EOS_IDS
    with torch.no_grad():
        # float16 holds these weights, but not sums of 64 products with them, which go into the cache.
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e6).clamp_(-6e4, 6e4)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    build(tmp_path / "model", tmp_path / "fp32", method="plain", dialect="scatter", precision="fp32")
    with pytest.raises(ProofError, match=r"^proof 'finite': .*use --precision bf16 .* Nothing was published\.$"):
        build(tmp_path / "model", tmp_path / "fp16", method="plain", dialect="scatter", precision="fp16")
    assert not (tmp_path / "fp16").exists()


def test_altered_weights_fail_the_proof(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = building.write_target

    def altered(source: Any, found: Any, tail: Any, plan: building.Plan) -> Any:
        info = write(source, found, tail, plan)
        weights = np.fromfile(plan.folder / "target.onnx.data", np.float16)
        weights[: 320 * 64] *= 2
        weights.tofile(plan.folder / "target.onnx.data")
        return info

    monkeypatch.setattr(building, "write_target", altered)
    with pytest.raises(ProofError, match=r"proof 'prefill'.*Nothing was published"):
        build(tiny_checkpoint, tmp_path / "out", method="plain", dialect="scatter", precision="fp16")


def test_a_rounded_target_that_verifies_trees_is_proved_on_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact graph is right here; the published one lets every node see every other."""
    model = save_model(tmp_path / "model", Case("int8", "plain"))
    write = building.write_target

    def careless(source: Any, found: Any, tail: Any, plan: building.Plan) -> Any:
        info = write(source, found, tail, plan)
        graph = ir.load(plan.folder / "target.onnx")
        mask = next(value for value in graph.graph.inputs if value.name == "tree_mask")
        every = ir.node("Or", [mask, mask])
        turned = ir.node("Not", [mask])
        whole = ir.node("Or", [every.outputs[0], turned.outputs[0]])
        readers = [(use.node, use.idx) for use in mask.uses() if use.node not in (every, turned)]
        for node, slot in readers:
            node.replace_input_with(slot, whole.outputs[0])
        graph.graph.insert_before(next(iter(graph.graph)), [every, turned, whole])
        ir.save(graph, plan.folder / "target.onnx")
        return info

    monkeypatch.setattr(building, "write_target", careless)
    with pytest.raises(ProofError, match=r"proof '(path|commit)'"):
        build(model, tmp_path / "out", method="plain", dialect="scatter", precision="int8", calibrate=False)


def test_what_fuses_features_for_a_head_keeps_sixteen_bits(
    tiny_checkpoint: Path, scatter_head: Path, tmp_path: Path
) -> None:
    source = read_model(tiny_checkpoint)
    head = building.read_eagle(scatter_head, source)
    tail = building._target_tail(None, head)
    found = survey(source.model, 128)
    graph = trace_scatter(cast_model(source.model, torch.float16), found, cast_model(tail, torch.float16))
    finish_scatter(graph)
    write_graph(graph, tmp_path, "target")
    quantise_scatter(graph, "int4", tmp_path / "target.onnx", [], lambda _: None)
    fusion = [value for name, value in graph.graph.initializers.items() if name.startswith("tail.fusion.fc.")]
    assert [value.dtype for value in fusion] == [ir.DataType.FLOAT16]


def test_guesses_are_held_against_the_same_tokens() -> None:
    want_ids, want = np.array([[7, 3, 9]]), np.array([[-0.5, -1.0, -2.0]])

    def others(ids: list[int], logprobs: list[float]) -> int:
        return proving._other_guesses(np.array([ids]), np.array([logprobs]), want_ids, want, 0.1)

    assert others([7, 3, 9], [-0.55, -1.0, -2.0]) == 0
    assert others([7, 3, 4], [-0.5, -1.0, -2.05]) == 0, "as likely as the last one named"
    assert others([3, 7, 9], [-0.5, -1.0, -2.0]) == 2, "two names changed places"
    assert others([7, 4, 9], [-0.5, -1.0, -2.0]) == 1, "a token that the heads do not name"
    assert others([7, 3, 9], [-0.5, float("nan"), -2.0]) == 1


def test_a_tie_is_what_the_proof_saw_twice_over_and_no_more(tiny_decoder: Decoder) -> None:
    assert proving.tie_gap(tiny_decoder, {"row": {"difference": 1.0}}) == proving.TIE_GAP["fp32"]
    manifest = tiny_decoder.bundle.manifest
    info = replace(manifest.graphs["target"], dialect="scatter", precision="int4")
    decoder = cast(
        Decoder, SimpleNamespace(bundle=SimpleNamespace(manifest=replace(manifest, graphs={"target": info})))
    )
    assert proving.tie_gap(decoder, {"row": {"difference": 0.01}, "path": {"difference": 0.02}}) == 0.04
    assert proving.tie_gap(decoder, {"row": {"difference": 0.3}, "path": {"difference": 0.02}}) == 0.1


@pytest.mark.parametrize("fault", ["weights", "nodes"])
def test_twins_differ_in_nothing_but_rounding(fault: str) -> None:
    model = tiny_model("llama")
    found = survey(model, 128)
    twins = [
        trace_scatter(cast_model(model, dtype), found, TargetTail(False)) for dtype in (torch.bfloat16, torch.float32)
    ]
    for twin in twins:
        finish_scatter(twin)
    building._require_twins(*twins, "it")
    if fault == "weights":
        value = twins[1].graph.initializers["model.lm_head.weight"]
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * 1.02)
    else:
        attention = next(node for node in twins[1].graph if node.op_type == "Attention")
        attention.attributes["scale"] = ir.AttrFloat32("scale", 0.5)
    with pytest.raises(TraceError, match=f"it has other {fault}"):
        building._require_twins(*twins, "it")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dialect": "cuda"}, "--dialect: 'cuda' is unknown; use one of gqa, scatter."),
        (
            {"dialect": "scatter", "draft_precision": "fp32"},
            "--draft-precision: goes with --dialect gqa; in scatter drafts are in fp16, bf16 or fp32.",
        ),
        ({"precision": "fp16"}, "--precision: 'fp16' is unknown in dialect gqa; use one of fp32, int8, int4."),
        (
            {"dialect": "scatter", "precision": "fp4"},
            "--precision: 'fp4' is unknown in dialect scatter; use one of fp32, fp16, bf16, int8, int4, fp8.",
        ),
    ],
)
def test_refusals(options: dict[str, str], sentence: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecCompileError) as refusal:
        build(tiny_checkpoint, tmp_path / "out", method="plain", **options)  # type: ignore[arg-type]
    assert str(refusal.value) == sentence


def test_command_line_defaults(
    speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def record(*_: Any, **options: Any) -> Any:
        asked.append(options)
        raise SpecCompileError("enough.")

    monkeypatch.setattr(building, "build", record)
    for arguments, dialect, precision in (
        ([], "gqa", "fp32"),
        (["--dialect", "scatter"], "scatter", "fp16"),
        (["--dialect", "scatter", "--precision", "int4"], "scatter", "int4"),
    ):
        status, _, error = speccompile("build", str(tiny_checkpoint), "--method", "plain", *arguments)
        assert (status, error) == (1, "error: enough.\n")
        assert (asked[-1]["dialect"], asked[-1]["precision"]) == (dialect, precision)
    status, _, error = speccompile("build", str(tiny_checkpoint), "--method", "plain", "--target", "sm89")
    assert status == 2 and "--target goes with --engine." in error
    for arguments, sentence in (
        (["--dialect", "gqa"], "--dialect: TensorRT cannot read gqa; leave the option out, or give scatter."),
        (["--target", "sm1"], "--target: 'sm1' is not supported by tensorrt_rtx"),
        (["--precision", "fp8", "--target", "sm86"], "--target: sm86 cannot multiply in fp8"),
        ([], "--target: there is no GPU to build for; name one or more of"),
    ):
        count = len(asked)
        status, _, error = speccompile(
            "build", str(tiny_checkpoint), "--method", "plain", "--engine", "tensorrt-rtx", *arguments
        )
        assert status == 1 and sentence in error and len(asked) == count, "refused before anything is built"
