"""engines.json: what is written is read back, and what is odd is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speccompile.graphs.engines import EngineInfo, EngineSet, TensorInfo, folder_name, read_engines
from speccompile.graphs.errors import BundleError

PAST, PRESENT = "past_key_values.0.key", "present.0.key"
ENGINES = EngineSet(
    schema=1,
    runtime="tensorrt_rtx",
    version="1.7.1.116",
    target="sm89",
    capacity=128,
    batch=2,
    max_tokens=16,
    lean=True,
    engines={
        "target": EngineInfo(
            file="target.engine",
            bytes=10,
            sha256="ab",
            graph_sha256="cd",
            inputs=[
                TensorInfo("input_ids", "int64", [-1, -1], [1, 1], [1, 8], [2, 16]),
                TensorInfo(PAST, "float16", [-1, 2, 128, 32], [1, 2, 128, 32], [1, 2, 128, 32], [2, 2, 128, 32]),
            ],
            outputs=[TensorInfo("next_ids", "int64", [-1, -1]), TensorInfo(PRESENT, "float16", [-1, 2, 128, 32])],
            aliases={PAST: PRESENT},
        )
    },
    measured={"peak_bytes": 5, "seconds": {"target": 0.5}},
)
Change = Callable[[dict[str, Any]], None]


def test_what_is_written_is_read_back() -> None:
    text = json.dumps(ENGINES.to_json())
    assert EngineSet.from_json(json.loads(text), "engines.json") == ENGINES


def test_folders_are_named_for_library_version_and_gpu() -> None:
    assert folder_name(ENGINES.runtime, ENGINES.version, ENGINES.target) == "tensorrt_rtx-1.7.1.116-sm89"


def target(data: dict[str, Any]) -> Any:
    return data["engines"]["target"]


def first(data: dict[str, Any]) -> Any:
    return target(data)["inputs"][0]


CHANGES: list[tuple[Change, str]] = [
    (lambda data: data.update(schema=2), "schema is 2 but this version of speccompile reads schema 1"),
    (lambda data: data.pop("schema"), "schema is None"),
    (lambda data: data.pop("capacity"), "field 'capacity' is missing"),
    (lambda data: data.update(capacity=0), "field 'capacity' is 0; expected a positive whole number"),
    (lambda data: data.update(batch=True), "field 'batch' is True"),
    (lambda data: data.update(max_tokens=8.5), "field 'max_tokens' is 8.5"),
    (
        lambda data: data.update(runtime="tensorrt_lean"),
        "field 'runtime' is 'tensorrt_lean'; expected one of tensorrt,",
    ),
    (lambda data: data.update(lean=0), "field 'lean' is 0; expected true or false"),
    (lambda data: data.pop("lean"), "field 'lean' is missing; build the engines again"),
    (lambda data: data.update(version=""), "field 'version' is ''"),
    (lambda data: data.update(target=89), "field 'target' is 89"),
    (lambda data: data.update(engines=[]), "field 'engines' is []; expected an object"),
    (lambda data: data["engines"].clear(), "field 'engines' has no entry 'target'"),
    (lambda data: data["engines"].update(medusa=3), "field 'engines.medusa' is 3"),
    (lambda data: data.update(measured=None), "field 'measured' is None"),
    (lambda data: target(data).pop("graph_sha256"), "field 'engines.target.graph_sha256' is missing"),
    (lambda data: target(data).update(file="../target.engine"), "file '../target.engine' leaves the folder"),
    (lambda data: target(data).update(file=".."), "file '..' leaves the folder"),
    (lambda data: target(data).update(file="a\\b"), "leaves the folder"),
    (lambda data: target(data).update(inputs={}), "field 'engines.target.inputs' is {}; expected a list"),
    (lambda data: target(data).update(aliases={PAST: "present.1.key"}), "pairs 'past_key_values.0.key' with"),
    (lambda data: first(data).update(dtype="float64"), "field 'engines.target.inputs[0].dtype' is 'float64'"),
    (lambda data: first(data).update(shape=[-2, 1]), "field 'engines.target.inputs[0].shape' is [-2, 1]"),
    (lambda data: first(data).update(shape=[True, 1]), "field 'engines.target.inputs[0].shape' is [True, 1]"),
    (lambda data: first(data).update(usual=[-1, 8]), "field 'engines.target.inputs[0].usual' is [-1, 8]"),
    (lambda data: first(data).update(largest=[1, 4]), "has shape [-1, -1] but a profile of [1, 1], [1, 8], [1, 4]"),
    (lambda data: first(data).update(largest=[1]), "has shape [-1, -1] but a profile of [1, 1], [1, 8], [1]"),
    (lambda data: first(data).update(shape=[3, -1]), "has shape [3, -1] but a profile of"),
    (lambda data: first(data).update(smallest=[], usual=[], largest=[]), "but a profile of [], [], []"),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES, ids=[sentence[:40] for _, sentence in CHANGES])
def test_what_is_odd_is_refused_by_name(change: Change, sentence: str) -> None:
    data = copy.deepcopy(ENGINES.to_json())
    change(data)
    with pytest.raises(BundleError) as caught:
        EngineSet.from_json(data, "there/engines.json")
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("there/engines.json: ")


@pytest.mark.parametrize("data", [None, [], "text"])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(BundleError, match=r"engines\.json: expected a JSON object"):
        EngineSet.from_json(data, "engines.json")


def test_a_folder_without_a_readable_sidecar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no engines\.json; build the engines again with 'speccompile engine"):
        read_engines(tmp_path)
    (tmp_path / "engines.json").write_text('{"schema": 1', "utf-8")
    with pytest.raises(BundleError, match=r"engines\.json: not valid JSON"):
        read_engines(tmp_path)
    (tmp_path / "engines.json").write_text(json.dumps(ENGINES.to_json()), "utf-8")
    assert read_engines(tmp_path) == ENGINES
