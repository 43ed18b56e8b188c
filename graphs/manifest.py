"""manifest.json: what a bundle holds and what was proved about it. Written by the compiler, read by the runtime.

Version policy: `schema` is one number. A reader refuses any other number than its own; fields may be added to
`proof`, `measured` and `versions` without a new number, because nothing decides on them.

    schema 4   manifest.json
               {"schema": 4, "method": "plain" | "medusa" | "draft" | "eagle" | "lookahead" | "prompt-lookup",
                "target":    {architecture, fingerprint, config_fingerprint, vocab_size, layers, kv_heads, head_dim,
                              width, max_length},
                "heads":     null | {fingerprint, layout, count, blocks, draft_vocabulary, top_k, target_fingerprint},
                "draft":     null | {fingerprint, architecture, layers, draft_vocabulary, token_map, top_k, max_length,
                              target_fingerprint},
                "eagle":     null | {what "draft" has, architecture naming the layout, and version, taps},
                "lookahead": null | {window, ngram, guesses, from_prompt},
                "lookup":    null | {ngram, guesses, newest}; with another method than prompt-lookup: --also
                "graphs":    {"target": {file, dialect, opset, precision, nodes, traced_nodes}, ...},
                "files":     {relative path: {sha256, bytes}},
                "tokenizer": {fingerprint, special_tokens}, "eos_ids": [...],
                "tree":      {"paths": [[rank, ...], ...]} | {"dynamic": {nodes, floor[, depth][, top_k]}} |
                             {"adaptive": {longest, confidence}},
                "costs":     null | {tokens, pasts, target, draft, host}, by `speccompile tune`
                "proof": {...}, "measured": {...}, "versions": {...}}
    schema 3   had no costs, nothing measured, and precisions other than fp32 for graphs that draft only
    schema 2   had no method eagle, and no depth and top_k of dynamic trees
    schema 1   had the methods plain and medusa only
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from speccompile.graphs.costs import Costs
from speccompile.graphs.errors import BundleError, SettingsError
from speccompile.graphs.settings import LookaheadSettings, LookupSettings

SCHEMA = 4
MANIFEST_FILE = "manifest.json"
# method -> what it needs besides the target: a field of the manifest, and a graph
METHODS: dict[str, tuple[str | None, str | None]] = {
    "plain": (None, None),
    "medusa": ("heads", "medusa"),
    "draft": ("draft", "draft"),
    "eagle": ("eagle", "eagle"),
    "lookahead": ("lookahead", None),
    "prompt-lookup": ("lookup", None),
}


@dataclass(frozen=True)
class TargetInfo:
    """The target model: `width` is F, `max_length` the most tokens (prompt and answer) the graph can hold."""

    architecture: str
    fingerprint: str
    config_fingerprint: str
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    width: int
    max_length: int


@dataclass(frozen=True)
class HeadsInfo:
    """Medusa heads: `target_fingerprint` is what they were trained for, None when their checkpoint does not say."""

    fingerprint: str
    layout: str
    count: int
    blocks: int
    draft_vocabulary: int
    top_k: int
    target_fingerprint: str | None


@dataclass(frozen=True)
class DraftInfo:
    """A draft model.

    Args:
        draft_vocabulary: width of its logits.
        token_map: file with the target's id of each logit, int64 [draft_vocabulary]; None when they are the same.
        max_length: positions it can hold; behind them there is no drafting.
        target_fingerprint: the target it was made from; None for a model of its own.
    """

    fingerprint: str
    architecture: str
    layers: int
    draft_vocabulary: int
    token_map: str | None
    top_k: int
    max_length: int
    target_fingerprint: str | None


@dataclass(frozen=True)
class EagleInfo(DraftInfo):
    """An EAGLE head; its `architecture` names the layout it was read from.

    Args:
        version: 1 (EAGLE-1 and EAGLE-2) or 3.
        taps: the target layers whose incoming residual stream it reads; empty for the post-norm hidden state.
    """

    version: int
    taps: list[int]


@dataclass(frozen=True)
class GraphInfo:
    """One ONNX graph. `traced_nodes` is the count before fusing."""

    file: str
    dialect: str
    opset: int
    precision: str
    nodes: int
    traced_nodes: int


@dataclass(frozen=True)
class FileInfo:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class TokenizerInfo:
    """`special_tokens` are the strings a chat template may name (bos_token, eos_token, ...)."""

    fingerprint: str
    special_tokens: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """See the module. `proof`, `measured` and `versions` are for people: nothing is decided by them."""

    schema: int
    method: str
    target: TargetInfo
    graphs: dict[str, GraphInfo]
    files: dict[str, FileInfo]
    tokenizer: TokenizerInfo
    eos_ids: list[int]
    tree: dict[str, Any]
    heads: HeadsInfo | None = None
    draft: DraftInfo | None = None
    eagle: EagleInfo | None = None
    lookahead: LookaheadSettings | None = None
    lookup: LookupSettings | None = None
    costs: Costs | None = None
    proof: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def drafting(self) -> DraftInfo | None:
        """The draft model or EAGLE head."""
        return self.draft or self.eagle

    def graph_sha256(self, name: str) -> str:
        """Of a graph and of its weights, which may lie beside the target's."""
        file, target = self.graphs[name].file, self.graphs["target"].file
        read = sorted({file, f"{file}.data", f"{target}.data"} & set(self.files))
        return hashlib.sha256("".join(self.files[part].sha256 for part in read).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object, source: str) -> Manifest:
        """Check and read.

        Args:
            source: what errors call the file.

        Raises:
            BundleError: for another schema number, or a field that is missing or of the wrong kind.
        """
        if not isinstance(data, dict):
            raise BundleError(f"{source}: expected a JSON object, found {type(data).__name__}.")
        if data.get("schema") != SCHEMA:
            raise BundleError(
                f"{source}: schema is {data.get('schema')!r} but this version of speccompile reads schema {SCHEMA}; "
                "rebuild the bundle or install the matching version."
            )
        manifest = cls(
            schema=SCHEMA,
            method=_value(data, "method", str, source),
            target=_record(TargetInfo, data.get("target"), "target", source),
            graphs=_records(GraphInfo, data, "graphs", source),
            files=_records(FileInfo, data, "files", source),
            tokenizer=_record(TokenizerInfo, data.get("tokenizer"), "tokenizer", source),
            eos_ids=_value(data, "eos_ids", list, source),
            tree=_value(data, "tree", dict, source),
            heads=_optional(HeadsInfo, data, "heads", source),
            draft=_optional(DraftInfo, data, "draft", source),
            eagle=_optional(EagleInfo, data, "eagle", source),
            lookahead=_optional(LookaheadSettings, data, "lookahead", source),
            lookup=_optional(LookupSettings, data, "lookup", source),
            costs=_optional(Costs, data, "costs", source),
            proof=_value(data, "proof", dict, source),
            measured=_value({"measured": {}, **data}, "measured", dict, source),
            versions=_value(data, "versions", dict, source),
        )
        if manifest.method not in METHODS:
            raise BundleError(f"{source}: method is '{manifest.method}'; this version runs {', '.join(METHODS)}.")
        needed, graph_name = METHODS[manifest.method]
        if not {"target", graph_name or "target"} <= set(manifest.graphs):
            raise BundleError(
                f"{source}: graphs lacks an entry that method '{manifest.method}' needs; rebuild the bundle."
            )
        if needed is not None and getattr(manifest, needed) is None:
            raise BundleError(f"{source}: method is '{manifest.method}' but {needed} is null; rebuild the bundle.")
        joined = "lookup" if manifest.heads or manifest.drafting else None
        unused = {"heads", "draft", "eagle", "lookahead", "lookup"} - {needed, joined}
        for name in sorted(unused):
            if getattr(manifest, name) is not None:
                raise BundleError(
                    f"{source}: field '{name}' is set, but method '{manifest.method}' has no use for it; "
                    "rebuild the bundle."
                )
        for token in manifest.eos_ids:
            if type(token) is not int:
                raise BundleError(f"{source}: field 'eos_ids' holds {token!r}; expected token ids.")
        for name in ("heads", "draft", "eagle"):
            made_for = getattr(getattr(manifest, name), "target_fingerprint", None)
            if made_for is not None and made_for != manifest.target.fingerprint:
                raise BundleError(
                    f"{source}: {name}.target_fingerprint is {made_for[:12]}... but target.fingerprint is "
                    f"{manifest.target.fingerprint[:12]}...; it was made for another model, rebuild the bundle."
                )
        used = [graph.file for graph in manifest.graphs.values()]
        if manifest.drafting is not None and manifest.drafting.token_map is not None:
            used.append(manifest.drafting.token_map)
        for file in used:
            if file not in manifest.files:
                raise BundleError(f"{source}: file '{file}' has no entry under files; rebuild the bundle.")
        return manifest


def file_info(path: Path) -> FileInfo:
    """Hash and size of a file."""
    with path.open("rb") as stream:
        return FileInfo(hashlib.file_digest(stream, "sha256").hexdigest(), path.stat().st_size)


def _value(data: Mapping[str, Any], name: str, kind: Any, source: str, where: str = "") -> Any:
    if name not in data:
        raise BundleError(f"{source}: field '{where}{name}' is missing; rebuild the bundle.")
    value = data[name]
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BundleError(
            f"{source}: field '{where}{name}' is {value!r}; expected {getattr(kind, '__name__', 'float')}."
        )
    return value


def _record(kind: type, data: object, where: str, source: str) -> Any:
    if not isinstance(data, dict):
        raise BundleError(f"{source}: field '{where}' is {data!r}; expected an object.")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for item in fields(kind):
        if hints[item.name] == (str | None) and data.get(item.name) is None:
            values[item.name] = None
        else:
            values[item.name] = _value(data, item.name, _kind(hints[item.name]), source, f"{where}.")
    try:
        return kind(**values)
    except SettingsError as error:
        raise BundleError(f"{source}: field '{where}' is not usable: {error}") from error


def _kind(hint: Any) -> Any:
    """What JSON has for a field of this type."""
    if get_origin(hint) is list:
        return list
    return {str: str, str | None: str, int: int, bool: bool, float: int | float}.get(hint, dict)


def _optional(kind: type, data: Mapping[str, Any], name: str, source: str) -> Any:
    return None if data.get(name) is None else _record(kind, data[name], name, source)


def _records(kind: type, data: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    return {
        key: _record(kind, value, f"{name}.{key}", source) for key, value in _value(data, name, dict, source).items()
    }
