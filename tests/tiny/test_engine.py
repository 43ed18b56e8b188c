"""Engines, built for real by TensorRT-RTX, which needs no GPU; and what it says nothing about, caught."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner

from speccompile.compiler import engine as engines
from speccompile.compiler.build import build
from speccompile.compiler.engine import (
    Limits,
    Parsed,
    build_engines,
    choose_limits,
    choose_targets,
    prepare,
    supported_targets,
)
from speccompile.compiler.engine_checks import (
    attentions,
    check_attention,
    check_cache,
    check_contract,
    check_inputs_used,
    check_log,
    check_nodes,
)
from speccompile.compiler.engine_command import engine, engines_table, load_module
from speccompile.compiler.write_graph import write_graph
from speccompile.graphs import contract
from speccompile.graphs.engines import EngineSet, folder_name, read_engines
from speccompile.graphs.errors import BundleError, EngineError
from speccompile.graphs.manifest import FileInfo, file_info
from speccompile.graphs.passes import finish_scatter
from speccompile.graphs.scatter import cast_model, trace_scatter
from speccompile.graphs.target import TargetTail, survey
from speccompile.runtime.backends.tensorrt import collecting_log
from speccompile.runtime.bundle import Bundle
from tests.tiny.conftest import TREE
from tests.tiny.models import VOCAB, tiny_model

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for Linux and Windows only")

HEADS, SHARED, SIZE, SLOTS = 4, 2, 32, 64
LIMITS = Limits(capacity=SLOTS, batch=2, tokens=16, nodes=8)
KEY, VALUE = contract.past_names(1)
Slots = Sequence[str | None]


@pytest.fixture(autouse=True)
def empty_log() -> None:
    """All tests have the process's one."""
    collecting_log(trt).take_errors()
    collecting_log(trt).take_warnings()


def layer(
    inputs: Slots = ("q", "keys", "values", "mask", None, "lengths"),
    attributes: dict[str, Any] | None = None,
    op_type: str = "TRT_Attention",
    *,
    dtype: ir.DataType = ir.DataType.FLOAT16,
    through_identity: bool = False,
) -> ir.Model:
    """A cache of one layer and an attention over it. `lengths` is an input, so that one sees when nothing reads it."""

    def value(name: str, kind: ir.DataType, *shape: int | str) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))

    whole, kind64 = ir.DataType.INT32, ir.DataType.INT64
    given = {
        "past_length": value("past_length", kind64, "B"),
        "q": value("q", dtype, "B", HEADS, "T", SIZE),
        "new_keys": value("new_keys", dtype, "B", SHARED, "T", SIZE),
        "new_values": value("new_values", dtype, "B", SHARED, "T", SIZE),
        "mask": value("mask", dtype, "B", 1, "T", SLOTS),
        "lengths": value("lengths", kind64 if op_type == "Attention" else whole, "B"),
        KEY: value(KEY, dtype, "B", SHARED, SLOTS, SIZE),
        VALUE: value(VALUE, dtype, "B", SHARED, SLOTS, SIZE),
    }
    nodes, written = [], []
    for past, new in ((KEY, "new_keys"), (VALUE, "new_values")):
        scatter = ir.node(
            "TensorScatter", [given[past], given[new], given["past_length"]], {"axis": -2, "mode": "linear"}
        )
        scatter.outputs[0].shape, scatter.outputs[0].type = given[past].shape, ir.TensorType(dtype)
        nodes.append(scatter)
        written.append(scatter.outputs[0])
    known = {**given, "keys": written[0], "values": written[1]}
    attention = ir.node(
        op_type,
        [None if name is None else known[name] for name in inputs],
        {"causal_kind": "none"} if attributes is None else attributes,
        domain="trt" if op_type.startswith("TRT") else "",
        name="attention",
    )
    nodes.append(attention)
    attention.outputs[0].name = "y"
    attention.outputs[0].shape, attention.outputs[0].type = given["q"].shape, ir.TensorType(dtype)
    if through_identity:
        for place in range(2):
            nodes.append(ir.node("Identity", [written[place]]))
            written[place] = nodes[-1].outputs[0]
            written[place].shape, written[place].type = given[KEY].shape, ir.TensorType(dtype)
    for tensor, name in zip(written, contract.present_names(1), strict=True):
        tensor.name = name
    read = {*inputs, KEY, VALUE, "new_keys", "new_values", "past_length", "lengths"}
    graph = ir.Graph(
        [tensor for name, tensor in given.items() if name in read],
        [attention.outputs[0], *written],
        nodes=nodes,
        opset_imports={"": 24, "trt": 1},
        name="layer",
    )
    return ir.Model(graph, ir_version=11)


def parsed(model: ir.Model, tmp_path: Path) -> Parsed:
    return Parsed.of(trt, collecting_log(trt), "target", model, tmp_path)


def build_it(made: Parsed, tmp_path: Path, **axes: str) -> None:
    """An engine for sm89; inputs of hand-made graphs have sizes of their own."""
    own = {"q": "BHTD", "new_keys": "BHTD", "new_values": "BHTD", "mask": "BHTC", "lengths": "B"}
    before = dict(engines.AXES)
    engines.AXES.update(own)
    try:
        made.build(LIMITS, "sm89", tmp_path / "made.engine", lambda _: None)
    finally:
        engines.AXES.clear()
        engines.AXES.update(before)


# ---- what is right passes ----


@pytest.mark.parametrize(
    ("dtype", "attributes"),
    [
        (ir.DataType.FLOAT16, {"causal_kind": "none"}),
        (ir.DataType.BFLOAT16, {"causal_kind": "none"}),
        (ir.DataType.FLOAT, {"causal_kind": "none", "TRT_decomposable": 1}),
    ],
    ids=["fp16", "bf16", "fp32"],
)
def test_what_the_pass_writes_is_accepted_and_built(
    dtype: ir.DataType, attributes: dict[str, Any], tmp_path: Path
) -> None:
    model = layer(attributes=attributes, dtype=dtype)
    made = parsed(model, tmp_path)
    made.check(model.graph)
    ((_, attention),) = attentions(trt, made.network)
    assert attention.mask.name == "mask" and list(attention.key_value_lengths.shape) == [-1]
    assert attention.decomposable == (dtype == ir.DataType.FLOAT)
    build_it(made, tmp_path)
    assert (tmp_path / "made.engine").stat().st_size > 1000


# ---- the silent traps: the parser says nothing, the check does ----


def test_dropped_lengths_of_a_standard_attention(tmp_path: Path) -> None:
    model = layer(("q", "keys", "values", "mask", None, None, "lengths"), {"scale": 1.0}, "Attention")
    made = parsed(model, tmp_path)
    with pytest.raises(EngineError, match="input 'lengths' feeds nothing in the network; the parser has dropped"):
        check_inputs_used("target", made.network)
    with pytest.raises(EngineError, match=r"attention layer .* has no key_value_lengths; every step would"):
        check_attention(trt, "target", made.network, 1)
    with pytest.raises(EngineError, match="attention is an Attention that knows no lengths; run the pass ForTensorrt"):
        check_nodes("target", model.graph)


def test_lengths_in_the_slot_of_the_published_document(tmp_path: Path) -> None:
    model = layer(("q", "keys", "values", "mask", None, None, None, "lengths"))
    made = parsed(model, tmp_path)
    with pytest.raises(EngineError, match="input 'lengths' feeds nothing"):
        check_inputs_used("target", made.network)
    with pytest.raises(EngineError, match="has no key_value_lengths"):
        check_attention(trt, "target", made.network, 1)
    with pytest.raises(EngineError, match=r"input 7 of attention .* would be ignored; lengths belong in input 5"):
        check_nodes("target", model.graph)


def test_ignored_causality(tmp_path: Path) -> None:
    model = layer(("q", "keys", "values", None, None, "lengths"), {"is_causal": 1})
    made = parsed(model, tmp_path)
    ((_, attention),) = attentions(trt, made.network)
    assert attention.causal_kind == trt.CausalMaskKind.NONE
    with pytest.raises(EngineError, match="has no mask, so that every token sees all others"):
        check_attention(trt, "target", made.network, 1)
    with pytest.raises(EngineError, match=r"attribute 'is_causal' of attention .* would be ignored"):
        check_nodes("target", model.graph)


def test_ignored_scale(tmp_path: Path) -> None:
    scaled = layer(attributes={"causal_kind": "none", "scale": 0.25})
    counts = [parsed(model, tmp_path).network.num_layers for model in (scaled, layer())]
    assert counts[0] == counts[1], "the trap is gone: the parser reads the scale"
    with pytest.raises(EngineError, match=r"attribute 'scale' of attention .* a scale belongs into the queries"):
        check_nodes("target", scaled.graph)
    check_nodes("target", layer().graph)


def test_causality_alone_is_counted_from_the_wrong_corner(tmp_path: Path) -> None:
    model = layer(("q", "keys", "values"), {"is_causal": 1}, "Attention")
    made = parsed(model, tmp_path)
    with pytest.raises(EngineError, match=r"has the causal mask UPPER_LEFT; tree masks need NONE and a mask input"):
        check_attention(trt, "target", made.network, 1)


def test_a_mask_on_a_causal_attention_of_the_network_is_lost() -> None:
    log = collecting_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    q, k, v = (
        network.add_input(name, trt.float16, (-1, heads, -1, SIZE))
        for name, heads in zip("qkv", (4, 2, 2), strict=True)
    )
    mask = network.add_input("mask", trt.float16, (-1, 1, -1, -1))
    attention = network.add_attention_v2(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.LOWER_RIGHT)
    attention.mask = mask
    network.mark_output(attention.get_output(0))
    assert attention.mask is None
    with pytest.raises(EngineError, match="target: building it, TensorRT said: IAttention::setMask: "):
        check_log("target", "building it", log.take_errors())
    with pytest.raises(EngineError, match="has the causal mask LOWER_RIGHT"):
        check_attention(trt, "target", network, 1)
    with pytest.raises(EngineError, match="input 'mask' feeds nothing"):
        check_inputs_used("target", network)


@pytest.mark.parametrize("op_type", ["Attention", "TRT_Attention"])
def test_a_mask_on_a_causal_attention_of_a_graph(op_type: str, tmp_path: Path) -> None:
    causal = {"is_causal": 1} if op_type == "Attention" else {"causal_kind": "lower_right"}
    model = layer(("q", "keys", "values", "mask"), causal, op_type)
    with pytest.raises(EngineError, match=r"target: parsing it, TensorRT said: |has the causal mask LOWER_RIGHT"):
        check_attention(trt, "target", parsed(model, tmp_path).network, 1)


def test_a_cache_output_through_identity(tmp_path: Path) -> None:
    model = layer(through_identity=True)
    with pytest.raises(EngineError) as caught:
        made = parsed(model, tmp_path)
        check_cache(trt, "target", made.network, made.aliases)
    assert "'present.0.key' is not made by a cache update of 'past_key_values.0.key'" in str(caught.value)
    made = parsed(model, tmp_path)
    with pytest.raises(EngineError, match="target: building it for sm89, TensorRT said: "):
        build_it(made, tmp_path)


def test_attention_in_float32_without_leave_to_take_it_apart(tmp_path: Path) -> None:
    model = layer(dtype=ir.DataType.FLOAT)
    made = parsed(model, tmp_path)
    made.check(model.graph)
    with pytest.raises(EngineError, match="target: building it for sm89, TensorRT said: "):
        build_it(made, tmp_path)


def test_attention_that_went_missing(tmp_path: Path) -> None:
    made = parsed(layer(), tmp_path)
    with pytest.raises(EngineError, match="1 attention layers in the network, but 2 in the graph"):
        check_attention(trt, "target", made.network, 2)


def test_other_inputs_and_outputs_than_the_contract_has(tmp_path: Path) -> None:
    made, graph = parsed(layer(), tmp_path), layer().graph
    check_contract("target", made.network, graph)
    graph.inputs[1].type = ir.TensorType(ir.DataType.FLOAT)
    with pytest.raises(EngineError, match=r"input 'q' is float16 \[-1, 4, -1, 32\] in the network but float32"):
        check_contract("target", made.network, graph)
    graph = layer().graph
    graph.outputs[1].shape = ir.Shape(["B", SHARED, SLOTS + 1, SIZE])
    with pytest.raises(EngineError, match=r"output 'present.0.key' is .* but float16 \[-1, 2, 65, 32\] in the graph"):
        check_contract("target", made.network, graph)
    graph = layer().graph
    graph.outputs[0].name = "z"
    with pytest.raises(EngineError, match="output 'y' is not in both the graph and the network"):
        check_contract("target", made.network, graph)


def test_a_present_that_is_missing(tmp_path: Path) -> None:
    made = parsed(layer(), tmp_path)
    with pytest.raises(EngineError, match=r"output 'present\.1\.key' is missing in the network"):
        check_cache(trt, "target", made.network, {"past_key_values.1.key": "present.1.key"})
    with pytest.raises(EngineError, match=r"output 'present\.0\.value' is not made by a cache update of 'past_key"):
        check_cache(trt, "target", made.network, {KEY: "present.0.value"})


# ---- whole bundles ----

TARGETS = ["sm86", "sm89", "sm120"]


@pytest.fixture(scope="session")
def scatter_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, tuned_heads: Path) -> Path:
    """The tiny bundle in dialect scatter, in sixteen bits. Do not change it: copy it."""
    out = tmp_path_factory.mktemp("scatter") / "tiny.bundle"
    build(tiny_checkpoint, out, heads=tuned_heads, tree=TREE, dialect="scatter", precision="fp16")
    return out


@pytest.fixture
def bundle(scatter_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scatter_bundle, tmp_path / "tiny.bundle"))


def test_engines_of_a_bundle(bundle: Path) -> None:
    said: list[str] = []
    sets = build_engines(trt, bundle, targets=TARGETS, max_length=96, batch=2, report=said.append)
    assert [made.target for made in sets] == TARGETS and not any(made.lean for made in sets)
    manifest = Bundle.open(bundle).manifest
    folders = sorted((bundle / "engines").iterdir())
    assert [f.name for f in folders] == sorted(f"tensorrt_rtx-{trt.__version__}-{target}" for target in TARGETS)
    for made in sets:
        folder = bundle / "engines" / folder_name(made.runtime, made.version, made.target)
        assert read_engines(folder) == made
        assert {file.name for file in folder.iterdir()} == {"engines.json", "target.engine", "medusa.engine"}
        assert (made.runtime, made.version, made.capacity, made.batch) == ("tensorrt_rtx", trt.__version__, 128, 2)
        assert made.max_tokens == 64 > len(TREE)
        for name, info in made.engines.items():
            file = folder / info.file
            assert file_info(file) == FileInfo(info.sha256, info.bytes)
            graph = manifest.graphs[name]
            assert info.graph_sha256 == manifest.graph_sha256(name)
            weights = manifest.files[f"{graph.file}.data"].bytes
            assert weights < info.bytes, "an engine holds the weights"
        assert min(made.measured["seconds"].values()) > 0 and made.measured["peak_bytes"] > 10**8
    target = sets[1].engines["target"]
    inputs = {tensor.name: tensor for tensor in target.inputs}
    assert list(inputs) == [*contract.TARGET_INPUTS, *contract.past_names(3)]
    ids, mask, rows, key = (inputs[n] for n in ("input_ids", "tree_mask", "logit_rows", "past_key_values.2.key"))
    assert (ids.dtype, ids.shape, ids.smallest, ids.usual, ids.largest) == ("int64", [-1, -1], [1, 1], [1, 8], [2, 64])
    assert (mask.dtype, mask.largest) == ("bool", [2, 64, 64])
    assert (rows.shape, rows.usual, rows.largest) == ([-1], [8], [64])
    assert (key.dtype, key.shape, key.usual, key.largest) == (
        "float16",
        [-1, 2, 128, 16],
        [1, 2, 128, 16],
        [2, 2, 128, 16],
    )
    outputs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in target.outputs}
    assert outputs["next_ids"] == ("int64", [-1, -1]) and outputs["logits"] == ("float32", [-1, -1, VOCAB])
    assert outputs["hidden"] == ("float32", [-1, -1, 64]) and outputs["present.2.value"] == ("float16", key.shape)
    assert target.aliases == dict(zip(contract.past_names(3), contract.present_names(3), strict=True))
    heads = sets[1].engines["medusa"]
    assert [(t.name, t.shape, t.usual, t.largest) for t in heads.inputs] == [
        ("hidden", [-1, -1, 64], [1, 1, 64], [2, 64, 64])
    ]
    assert heads.aliases == {}
    assert any("building the target for sm120: " in text for text in said), "progress is shown"
    Bundle.open(bundle)  # engines are no files of the manifest


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), ("gemma2", torch.float16), ("qwen3", torch.bfloat16)],
    ids=["llama", "gemma2", "qwen3"],
)
def test_engines_of_other_architectures(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """gemma2 has soft caps, and windows in every other layer; qwen3 norms its queries."""
    model = cast_model(tiny_model(name), dtype)
    graph = trace_scatter(model, survey(model, 64), TargetTail(False))
    finish_scatter(graph)
    write_graph(graph, tmp_path, "target")
    prepared = prepare(tmp_path / "target.onnx", SLOTS)
    made = Parsed.of(trt, collecting_log(trt), "target", prepared, tmp_path)
    made.check(prepared.graph)
    layers = list(attentions(trt, made.network))
    assert len(layers) == (0 if name == "gemma2" else 3)
    kind = {torch.float32: trt.float32, torch.float16: trt.float16, torch.bfloat16: trt.bfloat16}[dtype]
    for _, attention in layers:
        assert attention.causal_kind == trt.CausalMaskKind.NONE
        assert attention.decomposable == (dtype == torch.float32)
        assert attention.mask.dtype == kind and list(attention.mask.shape) == [-1, 1, -1, SLOTS]
        assert attention.key_value_lengths.dtype == trt.int32 and list(attention.key_value_lengths.shape) == [-1]
    weights = (tmp_path / "target.onnx.data").stat().st_size
    for target in TARGETS:
        made.build(LIMITS, target, tmp_path / "made.engine", lambda _: None)
        assert weights < (tmp_path / "made.engine").stat().st_size


def test_a_mask_of_the_newest_rows_reaches_further_where_a_tree_grows_level_by_level() -> None:
    limits = choose_limits(4096, 100, None, 1, None)
    assert limits == Limits(capacity=4096, batch=1, tokens=100, nodes=100)
    assert limits.ranges("target")["M"] == (1, 8, 100) and limits.ranges("draft")["M"] == (1, 8, 200)
    assert choose_limits(9000, 3, None, 1, None) == Limits(4096, 1, 64, 3)
    assert choose_limits(32, 40, None, 1, None) == Limits(64, 1, 32, 32), "rows are rounded up, what fits is not"
    assert choose_limits(9000, 3, 65, 1, None) == Limits(128, 1, 64, 3)
    assert choose_limits(9000, 3, 8000, 4, 5) == Limits(8000, 4, 5, 3)
    assert choose_limits(9000, 3, 8000, 4, 5).ranges("target") == {
        "B": (1, 1, 4),
        "T": (1, 5, 5),
        "M": (1, 5, 5),
        "R": (1, 5, 5),
    }


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((64, 4, 65, 1, None), "--max-length: 65 is out of range; use 1 to 64."),
        ((64, 4, 0, 1, None), "--max-length: 0 is out of range"),
        ((64, 4, None, 0, None), "--batch: 0 is out of range; use 1 or more."),
        ((64, 4, 32, 1, 33), "--max-tree: 33 is out of range; use 1 to 32."),
    ],
)
def test_limits_out_of_range_are_refused(given: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(EngineError) as caught:
        choose_limits(*given)
    assert sentence in str(caught.value)


# ---- targets ----


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "gpu_architecture", lambda: None)


def test_targets_that_rtx_builds_for() -> None:
    assert supported_targets(trt) == ["sm75", "sm80", "sm86", "sm89", "sm120", "sm121"]
    assert choose_targets(trt, ["sm89", "sm86", "sm89"]) == ["sm89", "sm86"]


@pytest.mark.parametrize("target", ["sm90", "SM89", "ampere", "sm"])
def test_other_targets_are_refused_with_the_list(target: str) -> None:
    with pytest.raises(EngineError) as caught:
        choose_targets(trt, ["sm89", target])
    said = (
        f"--target: '{target}' is not supported by tensorrt_rtx {trt.__version__}; it builds for sm75, sm80, sm86, sm89"
    )
    assert str(caught.value).startswith(said)


def test_without_a_target_there_must_be_a_gpu(no_gpu: None) -> None:
    with pytest.raises(EngineError, match="--target: there is no GPU to build for; name one or more of sm75, sm80"):
        choose_targets(trt, None)


def test_the_gpu_that_is_there_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "gpu_architecture", lambda: "sm89")
    full = SimpleNamespace(__name__="tensorrt", __version__="11.4")
    assert choose_targets(trt, ()) == choose_targets(full, None) == choose_targets(full, ["sm89"]) == ["sm89"]
    with pytest.raises(EngineError, match="--target: TensorRT builds for the GPU that is there, which is sm89, not"):
        choose_targets(full, ["sm86"])
    monkeypatch.setattr(engines, "gpu_architecture", lambda: "sm90")
    with pytest.raises(EngineError, match="--target: 'sm90' is not supported by tensorrt_rtx"):
        choose_targets(trt, None)


def test_the_full_library_needs_a_gpu(no_gpu: None) -> None:
    full = SimpleNamespace(__name__="tensorrt", __version__="11.4")
    with pytest.raises(EngineError, match=r"there is none .* or use --runtime tensorrt-rtx, which needs no GPU"):
        choose_targets(full, None)


def test_this_machine_has_no_gpu_or_says_which(capfd: pytest.CaptureFixture[str]) -> None:
    there = engines.gpu_architecture()
    assert there is None or there.removeprefix("sm").isdigit()


# ---- refusals and failures of a whole build ----


def test_a_bundle_of_the_other_dialect_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(EngineError, match="its graph 'target' is in the dialect 'gqa', which TensorRT cannot read"):
        build_engines(trt, tiny_bundle, targets=["sm89"])
    assert not (tiny_bundle / "engines").exists()


def test_eight_bit_floats_on_what_has_none_are_refused(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["graphs"]["target"]["precision"] = "fp8"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"--target: sm86 cannot multiply in fp8, .* it takes sm89 or newer"):
        build_engines(trt, bundle, targets=["sm89", "sm86"])


def test_an_altered_graph_is_refused(bundle: Path) -> None:
    data = bytearray((bundle / "target.onnx.data").read_bytes())
    data[-1] ^= 1
    (bundle / "target.onnx.data").write_bytes(data)
    with pytest.raises(BundleError, match="the file was altered"):
        build_engines(trt, bundle, targets=["sm89"])


def test_engines_are_replaced_only_with_force(bundle: Path) -> None:
    (first,) = build_engines(trt, bundle, targets=["sm89"], max_length=64)
    folder = bundle / "engines" / folder_name(first.runtime, first.version, "sm89")
    with pytest.raises(EngineError, match="already exists; give --force to replace it"):
        build_engines(trt, bundle, targets=["sm86", "sm89"], max_length=32)
    assert [entry.name for entry in (bundle / "engines").iterdir()] == [folder.name]
    assert read_engines(folder) == first
    (second,) = build_engines(trt, bundle, targets=["sm89"], max_length=65, force=True)
    assert read_engines(folder) == second and second.capacity == 128
    (folder / "engines.json").unlink()
    with pytest.raises(EngineError, match="already exists; remove it first"):
        build_engines(trt, bundle, targets=["sm89"], force=True)


def test_a_failure_leaves_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads fail after the target was built."""

    def refuse(self: Parsed, graph: ir.Graph) -> None:
        if self.name == "medusa":
            raise EngineError("medusa: refused.")

    monkeypatch.setattr(Parsed, "check", refuse)
    with pytest.raises(EngineError, match="refused"):
        build_engines(trt, bundle, targets=["sm86", "sm89"], max_length=64)
    assert not (bundle / "engines").exists() or not list((bundle / "engines").iterdir())


def test_a_full_disk_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback of TensorRT raises would be lost, or end the process."""
    opening = Path.open

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_full(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return (
            Full(path, "w") if path.suffix == ".engine" and mode == "wb" else opening(path, mode, *arguments, **options)
        )

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(BundleError, match="the disk is full; nothing was published"):
        build_engines(trt, bundle, targets=["sm89"], max_length=64)
    assert not list((bundle / "engines").iterdir())


def test_an_interrupt_ends_the_build_and_leaves_nothing(bundle: Path) -> None:
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        if text.startswith("building the target for sm86: ") and len(said) < 1000:
            said.extend([""] * 1000)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build_engines(trt, bundle, targets=["sm86", "sm89"], max_length=64, report=report)
    assert len(said) > 1000 and not any(text.startswith("building the target for sm89") for text in said)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (bundle / "engines").exists() or not list((bundle / "engines").iterdir())


def test_what_tensorrt_warns_of_is_kept() -> None:
    log = collecting_log(trt)
    assert collecting_log(trt) is log, "the library may call the first one at any time"
    for severity, text in ((trt.ILogger.WARNING, "w"), (trt.ILogger.WARNING, "w"), (trt.ILogger.INFO, "i")):
        log.log(severity, text)
    log.log(trt.ILogger.ERROR, "e")
    log.log(trt.ILogger.INTERNAL_ERROR, "f")
    assert log.take_warnings() == ["w"] and log.take_warnings() == []
    errors = log.take_errors()
    with pytest.raises(EngineError, match=r"target: parsing it, TensorRT said: e \(and 1 more\)"):
        check_log("target", "parsing it", errors)
    check_log("target", "parsing it", log.take_errors())


def test_what_was_logged_before_is_no_failure(bundle: Path) -> None:
    log = collecting_log(trt)
    log.log(trt.ILogger.ERROR, "something that ran earlier in this process")
    log.log(trt.ILogger.WARNING, "the same")
    (made,) = build_engines(trt, bundle, targets=["sm89"], max_length=64)
    assert "the same" not in str(made.measured["warnings"])


# ---- how engines are built ----


def test_float32_is_multiplied_as_float32(tmp_path: Path) -> None:
    """TensorRT would round what products are made of to 10 bits."""
    made = parsed(layer(), tmp_path)
    assert made.builder.create_builder_config().get_flag(trt.BuilderFlag.TF32)
    config = made.config([], "sm89", lean=False)
    assert not config.get_flag(trt.BuilderFlag.TF32)
    assert not config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)


def test_rtx_has_no_lean_runtime(bundle: Path) -> None:
    said = "--lean: tensorrt_rtx has no lean runtime; leave the option out, or use --runtime tensorrt."
    with pytest.raises(EngineError) as caught:
        build_engines(trt, bundle, targets=["sm89"], lean=True)
    assert str(caught.value) == said
    done = CliRunner().invoke(engine, [str(bundle), "--target", "sm89", "--lean"])
    assert str(done.exception) == said
    assert not (bundle / "engines").exists()


def test_engines_for_the_lean_runtime(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX plays TensorRT: all but what makes engines version compatible, which it cannot, is real."""
    full = ModuleType("tensorrt")
    full.__dict__.update({name: value for name, value in vars(trt).items() if name != "ComputeCapability"})
    full.__name__ = "tensorrt"
    flags, asked, config = trt.BuilderFlag, list[list[bool]](), Parsed.config

    def take_back(self: Parsed, *given: Any) -> Any:
        made = config(self, *given)
        asked.append([made.get_flag(flag) for flag in (flags.VERSION_COMPATIBLE, flags.EXCLUDE_LEAN_RUNTIME)])
        made.clear_flag(flags.EXCLUDE_LEAN_RUNTIME)
        made.clear_flag(flags.VERSION_COMPATIBLE)
        return made

    monkeypatch.setattr(Parsed, "config", take_back)
    monkeypatch.setattr(engines, "gpu_architecture", lambda: "sm89")
    (made,) = build_engines(full, bundle, max_length=64, lean=True)
    assert asked == [[True, True]] * 2
    assert made.lean and read_engines(bundle / "engines" / folder_name("tensorrt", full.__version__, "sm89")) == made
    (made,) = build_engines(full, bundle, max_length=64, force=True)
    assert asked[2:] == [[False, False]] * 2 and not made.lean


# ---- the command ----


def test_the_command(bundle: Path) -> None:
    arguments = [str(bundle), "--runtime", "tensorrt-rtx", "--target", "sm89", "--max-length", "64", "--max-tree", "8"]
    done = CliRunner().invoke(engine, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    (data,) = json.loads(done.stdout)
    made = EngineSet.from_json(data, "stdout")
    assert made == read_engines(bundle / "engines" / folder_name("tensorrt_rtx", trt.__version__, "sm89"))
    assert (made.capacity, made.batch, made.max_tokens) == (64, 1, 8)
    again = CliRunner().invoke(engine, arguments)
    assert isinstance(again.exception, EngineError) and "--force" in str(again.exception)
    table = engines_table([made])
    assert [column.header for column in table.columns] == ["target", "engine", "MB", "seconds", "peak memory MB"]
    assert list(table.columns[1].cells) == ["target", "medusa"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, module in (("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(EngineError, match=rf"--runtime: {module} cannot be imported .* pip install {package}\."):
            load_module(package)
