"""engines.json: what a folder of TensorRT engines holds. Written by the compiler, read by the runtime.

An engine cannot be opened without a GPU of its target, so all that must be known of it beforehand lies beside it:

    BUNDLE/engines/<runtime>-<version>-<target>/     runtime is the module's name: tensorrt or tensorrt_rtx
        target.engine, medusa.engine | draft.engine | eagle.engine
        engines.json   {"schema": 1, "runtime": ..., "version": ..., "target": "sm89",
                        "capacity": C, "batch": largest B, "max_tokens": largest T, "lean": false,
                        "engines": {"target": {file, bytes, sha256, graph_sha256, inputs, outputs, aliases}, ...},
                        "measured": {...}}

`graph_sha256` is of the graph and the weights the engine was made from (`Manifest.graph_sha256`), so that engines of
another build of the bundle are refused. As with the manifest, a reader refuses any other schema number than its own,
and nothing decides on `measured`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from speccompile.graphs.errors import BundleError

ENGINES_FOLDER = "engines"
SIDECAR_FILE = "engines.json"
ENGINES_SCHEMA = 1
RUNTIMES = ("tensorrt", "tensorrt_rtx")
DTYPES = ("int64", "int32", "bool", "float32", "float16", "bfloat16")
REMEDY = "build the engines again with 'speccompile engine --force'."


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of an engine.

    Args:
        dtype: one of `DTYPES`.
        shape: with -1 for each size that is chosen at run time.
        smallest, usual, largest: shapes of the engine's one optimisation profile; `shape` itself for an input without
            -1, and empty for outputs.
    """

    name: str
    dtype: str
    shape: list[int]
    smallest: list[int] = field(default_factory=list)
    usual: list[int] = field(default_factory=list)
    largest: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EngineInfo:
    """One engine.

    Args:
        file: its name in the folder of the sidecar.
        graph_sha256: of the ONNX file it was made from and its weights.
        aliases: cache input -> the output that is the same buffer.
    """

    file: str
    bytes: int
    sha256: str
    graph_sha256: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    aliases: dict[str, str]


@dataclass(frozen=True)
class EngineSet:
    """The engines of a bundle for one library version and one GPU architecture.

    Args:
        runtime: one of `RUNTIMES`.
        version: of the library that built them.
        target: such as "sm89".
        capacity: rows C of their caches.
        batch, max_tokens: largest B and T.
        lean: whether tensorrt_lean can run them, too.
        engines: by the manifest's name of the graph: "target", "medusa", ...
        measured: seconds, memory peak; for people.
    """

    schema: int
    runtime: str
    version: str
    target: str
    capacity: int
    batch: int
    max_tokens: int
    lean: bool
    engines: dict[str, EngineInfo]
    measured: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object, source: str) -> EngineSet:
        """Check and read.

        Args:
            source: what errors call the file.

        Raises:
            BundleError: for another schema number, or a field that is missing or odd.
        """
        whole = _object(data, "", source)
        if whole.get("schema") != ENGINES_SCHEMA:
            raise BundleError(
                f"{source}: schema is {whole.get('schema')!r} but this version of speccompile reads schema "
                f"{ENGINES_SCHEMA}; {REMEDY}"
            )
        engines = _object(_field(whole, "engines", "", source), "engines", source)
        if "target" not in engines:
            raise BundleError(f"{source}: field 'engines' has no entry 'target'; {REMEDY}")
        return cls(
            schema=ENGINES_SCHEMA,
            runtime=_one_of(RUNTIMES, whole, "runtime", "", source),
            version=_text(whole, "version", "", source),
            target=_text(whole, "target", "", source),
            capacity=_count(whole, "capacity", "", source),
            batch=_count(whole, "batch", "", source),
            max_tokens=_count(whole, "max_tokens", "", source),
            lean=_flag(whole, "lean", "", source),
            engines={name: _engine(entry, f"engines.{name}", source) for name, entry in engines.items()},
            measured=dict(_object(_field(whole, "measured", "", source), "measured", source)),
        )


def folder_name(runtime: str, version: str, target: str) -> str:
    """What the folder of these engines is called."""
    return f"{runtime}-{version}-{target}"


def read_engines(folder: Path) -> EngineSet:
    """The sidecar of a folder of engines.

    Raises:
        BundleError: when there is none, or it cannot be read.
    """
    source = folder / SIDECAR_FILE
    try:
        return EngineSet.from_json(json.loads(source.read_text("utf-8")), str(source))
    except FileNotFoundError:
        raise BundleError(f"{folder}: has no {SIDECAR_FILE}; {REMEDY}") from None
    except OSError as error:
        raise BundleError(f"{source}: cannot be read ({error.strerror}); {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: not valid JSON ({error}); {REMEDY}") from error


def _engine(data: object, where: str, source: str) -> EngineInfo:
    entry, inside = _object(data, where, source), f"{where}."
    file = _text(entry, "file", inside, source)
    if any(sign in file for sign in "/\\:\0") or file in (".", ".."):
        raise BundleError(f"{source}: file '{file}' leaves the folder of the engines; refusing to read it.")
    inputs, outputs = (_tensors(entry, name, inside, source) for name in ("inputs", "outputs"))
    aliases = _object(_field(entry, "aliases", inside, source), f"{inside}aliases", source)
    known = {tensor.name for tensor in inputs}, {tensor.name for tensor in outputs}
    for past, present in aliases.items():
        if past not in known[0] or present not in known[1]:
            raise BundleError(
                f"{source}: field '{inside}aliases' pairs {past!r} with {present!r}, which are no input and output of "
                f"this engine; {REMEDY}"
            )
    return EngineInfo(
        file=file,
        bytes=_count(entry, "bytes", inside, source),
        sha256=_text(entry, "sha256", inside, source),
        graph_sha256=_text(entry, "graph_sha256", inside, source),
        inputs=inputs,
        outputs=outputs,
        aliases=dict(aliases),
    )


def _tensors(entry: Mapping[str, Any], name: str, where: str, source: str) -> list[TensorInfo]:
    values = _field(entry, name, where, source)
    if not isinstance(values, list):
        raise BundleError(f"{source}: field '{where}{name}' is {values!r}; expected a list.")
    profiled = name == "inputs"
    return [_tensor(value, f"{where}{name}[{place}]", source, profiled) for place, value in enumerate(values)]


def _tensor(data: object, where: str, source: str, profiled: bool) -> TensorInfo:
    entry, inside = _object(data, where, source), f"{where}."
    shapes = {
        name: _shape(entry, name, inside, source, least=-1 if name == "shape" else 0)
        for name in ("shape", "smallest", "usual", "largest")
    }
    shape, profile = shapes["shape"], [shapes[name] for name in ("smallest", "usual", "largest")]
    if profiled or any(profile):
        ranks = {len(bound) for bound in profile}
        sizes = zip(shape, *profile, strict=False)
        if ranks != {len(shape)} or any(not a <= b <= c or (s >= 0 and not a == c == s) for s, a, b, c in sizes):
            raise BundleError(
                f"{source}: field '{where}' has shape {shape} but a profile of {', '.join(map(str, profile))}; {REMEDY}"
            )
    return TensorInfo(_text(entry, "name", inside, source), _one_of(DTYPES, entry, "dtype", inside, source), **shapes)


def _shape(entry: Mapping[str, Any], name: str, where: str, source: str, least: int) -> list[int]:
    values = _field(entry, name, where, source)
    if not isinstance(values, list) or any(type(size) is not int or size < least for size in values):
        raise BundleError(f"{source}: field '{where}{name}' is {values!r}; expected a list of sizes.")
    return list(values)


def _object(data: object, where: str, source: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        found = f"field '{where}' is {data!r}; expected an object." if where else f"expected a JSON object; {REMEDY}"
        raise BundleError(f"{source}: {found}")
    return data


def _field(data: Mapping[str, Any], name: str, where: str, source: str) -> Any:
    if name not in data:
        raise BundleError(f"{source}: field '{where}{name}' is missing; {REMEDY}")
    return data[name]


def _text(data: Mapping[str, Any], name: str, where: str, source: str) -> str:
    value = _field(data, name, where, source)
    if not isinstance(value, str) or not value:
        raise BundleError(f"{source}: field '{where}{name}' is {value!r}; expected a text.")
    return value


def _one_of(known: tuple[str, ...], data: Mapping[str, Any], name: str, where: str, source: str) -> str:
    value = _text(data, name, where, source)
    if value not in known:
        raise BundleError(f"{source}: field '{where}{name}' is '{value}'; expected one of {', '.join(known)}.")
    return value


def _count(data: Mapping[str, Any], name: str, where: str, source: str) -> int:
    value = _field(data, name, where, source)
    if type(value) is not int or value < 1:
        raise BundleError(f"{source}: field '{where}{name}' is {value!r}; expected a positive whole number.")
    return value


def _flag(data: Mapping[str, Any], name: str, where: str, source: str) -> bool:
    value = _field(data, name, where, source)
    if type(value) is not bool:
        raise BundleError(f"{source}: field '{where}{name}' is {value!r}; expected true or false.")
    return value
