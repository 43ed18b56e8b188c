"""Engines of SmolLM2-135M-Instruct, built for real for three generations of GPUs by TensorRT-RTX, without one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx
import pytest

import speccompile.compiler.build as building
from speccompile.compiler.build import build
from speccompile.compiler.engine import Parsed, build_engines, choose_limits, collecting_log, prepare
from speccompile.compiler.engine_checks import attentions
from speccompile.graphs.engines import TensorInfo, folder_name, read_engines
from speccompile.graphs.manifest import GraphInfo
from speccompile.runtime.bundle import Bundle
from speccompile.tools.zoo.fetch import draft, eagle, heads
from tests.real.conftest import NAME

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for Linux and Windows only")
pytestmark = pytest.mark.real

TARGETS = ["sm86", "sm89", "sm120"]
CAPACITY = 1024
DTYPES = {
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
}
# Of draft model and head the graphs alone: they stand beside the target of the first bundle.
DRAFTING: dict[str, dict[str, Any]] = {"draft": {"draft": draft}, "eagle": {"head": eagle}}


@pytest.fixture(scope="session")
def medusa_bundle(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target in sixteen bits with its heads, proved."""
    out = tmp_path_factory.mktemp("engines") / "smollm2-medusa.bundle"
    manifest = build(smollm2, out, method="medusa", dialect="scatter", precision="fp16", heads=heads(NAME))
    # Against eager transformers in float32, relative to the largest logit.
    assert 0 < manifest.proof["tree"]["difference"] < 0.5 * manifest.proof["tree"]["bound"]
    assert manifest.proof["tokens"]["compared"] > 150
    return out


@pytest.fixture(scope="session")
def unproved() -> Iterator[pytest.MonkeyPatch]:
    """Builds end before their proof: what they share with the first bundle has been proved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "load", lambda *_, **__: None)
        patch.setattr(building, "prove", lambda *_, **__: {})
        yield patch


@pytest.fixture(scope="session")
def int4_bundle(smollm2: Path, unproved: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "smollm2-int4.bundle"
    build(smollm2, out, method="prompt-lookup", dialect="scatter", precision="int4", calibrate=False)
    return out


@pytest.mark.parametrize("which", ["medusa_bundle", "int4_bundle"])
def test_engines_for_three_generations(
    which: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    bundle: Path = request.getfixturevalue(which)
    sets = build_engines(trt, bundle, targets=TARGETS, max_length=CAPACITY)
    manifest = Bundle.open(bundle).manifest
    assert [made.target for made in sets] == TARGETS
    for made in sets:
        folder = bundle / "engines" / folder_name("tensorrt_rtx", trt.__version__, made.target)
        assert read_engines(folder) == made
        assert set(made.engines) == set(manifest.graphs)
        for name, info in made.engines.items():
            require_contract(bundle / manifest.graphs[name].file, info.inputs, info.outputs, info.aliases)
            require_weights(bundle / manifest.graphs[name].file, info.bytes)
            assert (folder / info.file).stat().st_size == info.bytes
            seconds, peak = made.measured["seconds"][name], made.measured["peak_bytes"]
            precision = manifest.graphs[name].precision
            record_property(
                "measured",
                f"engine of SmolLM2's {name} in {precision} for {made.target}: {info.bytes / 1e6:.1f} MB, "
                f"{seconds:.1f} s, peak of the process {peak / 1e6:.0f} MB",
            )
        assert made.measured["peak_bytes"] < 8e9
    require_attention(bundle, "target", 30)


@pytest.mark.parametrize("method", DRAFTING)
def test_engines_that_draft(
    method: str,
    smollm2: Path,
    medusa_bundle: Path,
    unproved: pytest.MonkeyPatch,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    def copied(_source: object, _found: object, _tail: object, plan: building.Plan) -> GraphInfo:
        for file in medusa_bundle.glob("target.onnx*"):
            shutil.copy(file, plan.folder)
        return Bundle.open(medusa_bundle).manifest.graphs["target"]

    unproved.setattr(building, "write_target", copied)
    options = {name: value(NAME) for name, value in DRAFTING[method].items()}
    bundle = tmp_path / "out"
    build(smollm2, bundle, method=method, dialect="scatter", precision="fp16", **options)
    manifest = Bundle.open(bundle).manifest
    assert manifest.drafting is not None
    parsed = require_attention(bundle, method, manifest.drafting.layers)
    limits = choose_limits(manifest.target.max_length, 16, CAPACITY, 1, None)
    for target in TARGETS:
        file, began = tmp_path / f"{target}.engine", perf_counter()
        inputs = parsed.build(limits, target, file, lambda _: None)
        require_contract(bundle / f"{method}.onnx", inputs, parsed.outputs(), parsed.aliases)
        size = file.stat().st_size
        require_weights(bundle / f"{method}.onnx", size)
        seconds = perf_counter() - began
        record_property(
            "measured", f"engine of SmolLM2's {method} in fp16 for {target}: {size / 1e6:.1f} MB, {seconds:.1f} s"
        )


def require_contract(path: Path, inputs: list[TensorInfo], outputs: list[TensorInfo], aliases: dict[str, str]) -> None:
    """What an engine reads and gives is what its graph does."""
    graph = onnx.load(path, load_external_data=False).graph
    for ours, theirs in ((inputs, graph.input), (outputs, graph.output)):
        assert {t.name: t.dtype for t in ours} == {t.name: DTYPES[t.type.tensor_type.elem_type] for t in theirs}
    assert len(aliases) == sum(t.name.startswith("past_key_values.") for t in graph.input)
    assert all(t.shape[2] == CAPACITY for t in inputs if t.name in aliases)


def require_weights(path: Path, size: int) -> None:
    """An engine holds its graph's weights, about once."""
    weights = sum(_bytes(tensor) for tensor in onnx.load(path, load_external_data=False).graph.initializer)
    assert weights < size * 1.01 and size < 1.6 * weights + 10e6


def require_attention(bundle: Path, name: str, layers: int) -> Parsed:
    """Every attention layer of the parsed network has its mask and lengths, and is not causal."""
    file = Bundle.open(bundle).manifest.graphs[name].file
    model = prepare(bundle / file, CAPACITY)
    parsed = Parsed.of(trt, collecting_log(trt), name, model, bundle)
    parsed.check(model.graph)
    found = [attention for _, attention in attentions(trt, parsed.network)]
    assert len(found) == layers
    for attention in found:
        assert attention.causal_kind == trt.CausalMaskKind.NONE and not attention.decomposable
        assert attention.mask.dtype == trt.float16
        assert list(attention.mask.shape) == [-1, 1, -1, CAPACITY]
        assert attention.key_value_lengths.dtype == trt.int32
    return parsed


def _bytes(tensor: onnx.TensorProto) -> int:
    external = {entry.key: entry.value for entry in tensor.external_data}
    return int(external["length"]) if external else len(tensor.raw_data)
