"""Engines of SmolLM2-135M-Instruct, built for real for three generations of GPUs by TensorRT-RTX, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import speccompile.compiler.build as building
from speccompile.compiler.build import build
from speccompile.compiler.engine import Parsed, build_engines, collecting_log, prepare
from speccompile.compiler.engine_checks import attentions
from speccompile.graphs.engines import folder_name, read_engines
from speccompile.runtime.bundle import Bundle
from speccompile.tools.zoo.fetch import draft, eagle, heads
from tests.real.conftest import NAME

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for Linux and Windows only")
pytestmark = pytest.mark.real

TARGETS = ["sm86", "sm89", "sm120"]
LAYERS = {"target": 30, "medusa": 0}
CAPACITY = 1024
DTYPES = {
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
}
BUNDLES: dict[str, dict[str, Any]] = {
    "medusa": {"heads": heads},
    "draft": {"draft": draft},
    "eagle": {"head": eagle},
    "prompt-lookup": {"precision": "int4", "calibrate": False},
}
PROVED = "medusa"  # what the others share with it need not be proved again


@pytest.fixture(scope="session", params=BUNDLES)
def scatter_bundle(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bundle per graph that drafts, in sixteen bits, and one in four."""
    method = request.param
    options = {name: value(NAME) if callable(value) else value for name, value in BUNDLES[method].items()}
    out = tmp_path_factory.mktemp("engines") / f"smollm2-{method}.bundle"
    with pytest.MonkeyPatch.context() as patch:
        if method != PROVED:
            patch.setattr(building, "load", lambda *_, **__: None)
            patch.setattr(building, "prove", lambda *_, **__: {})
        manifest = build(smollm2, out, method=method, dialect="scatter", **{"precision": "fp16", **options})
    if method == PROVED:  # against eager transformers in float32, relative to the largest logit
        assert manifest.proof["tree"]["difference"] < 0.5 * manifest.proof["tree"]["bound"]
        assert manifest.proof["tokens"]["compared"] > 150
    return out


def test_engines_for_three_generations(scatter_bundle: Path) -> None:
    sets = build_engines(trt, scatter_bundle, targets=TARGETS, max_length=CAPACITY)
    manifest = Bundle.open(scatter_bundle).manifest
    assert [made.target for made in sets] == TARGETS
    for made in sets:
        folder = scatter_bundle / "engines" / folder_name("tensorrt_rtx", trt.__version__, made.target)
        assert read_engines(folder) == made
        assert set(made.engines) == set(manifest.graphs)
        for name, info in made.engines.items():
            file = manifest.graphs[name].file
            graph = onnx.load(scatter_bundle / file, load_external_data=False).graph
            for ours, theirs in ((info.inputs, graph.input), (info.outputs, graph.output)):
                assert {t.name: t.dtype for t in ours} == {t.name: DTYPES[t.type.tensor_type.elem_type] for t in theirs}
            assert len(info.aliases) == sum(t.name.startswith("past_key_values.") for t in graph.input)
            assert all(t.shape[2] == CAPACITY for t in info.inputs if t.name in info.aliases)
            weights = sum(_bytes(tensor) for tensor in graph.initializer)
            assert weights < info.bytes * 1.01 and info.bytes < 1.6 * weights + 10e6
            assert (folder / info.file).stat().st_size == info.bytes
        assert made.measured["peak_bytes"] < 8e9


def test_attention_layers_of_the_parsed_network(scatter_bundle: Path) -> None:
    opened = Bundle.open(scatter_bundle)
    for name, info in opened.manifest.graphs.items():
        model = prepare(scatter_bundle / info.file, CAPACITY)
        made = Parsed.of(trt, collecting_log(trt), name, model, scatter_bundle)
        made.check(model.graph)
        layers = [attention for _, attention in attentions(trt, made.network)]
        drafting = opened.manifest.drafting
        assert len(layers) == (LAYERS.get(name, drafting and drafting.layers))
        for attention in layers:
            assert attention.causal_kind == trt.CausalMaskKind.NONE and not attention.decomposable
            assert attention.mask.dtype == trt.float16
            assert list(attention.mask.shape) == [-1, 1, -1, CAPACITY]
            assert attention.key_value_lengths.dtype == trt.int32


def _bytes(tensor: onnx.TensorProto) -> int:
    external = {entry.key: entry.value for entry in tensor.external_data}
    return int(external["length"]) if external else len(tensor.raw_data)
