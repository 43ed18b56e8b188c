"""A bundle that is damaged, unsafe or of another version is refused before anything in it is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from speccompile.graphs.errors import BundleError, GenerationError, SpecCompileError
from speccompile.graphs.manifest import (
    FileInfo,
    GraphInfo,
    HeadsInfo,
    Manifest,
    TargetInfo,
    TokenizerInfo,
    file_info,
)
from speccompile.graphs.medusa import MedusaModule, export_medusa
from speccompile.runtime import load
from speccompile.runtime.bundle import Bundle
from tests.tiny.conftest import Cli

FILES = (
    "target.onnx",
    "target.onnx.data",
    "medusa.onnx",
    "medusa.onnx.data",
    "tokenizer.json",
    "chat_template.jinja",
    "generation_config.json",
)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bundle` to damage."""
    return shutil.copytree(tiny_bundle, tmp_path / "copy.bundle")


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def rehash(bundle: Path, *names: str) -> None:
    """Make the manifest agree with changed files, as someone who means it would."""

    def change(manifest: dict[str, Any]) -> None:
        for name in names:
            info = file_info(bundle / name)
            manifest["files"][name] = {"sha256": info.sha256, "bytes": info.bytes}

    edit_manifest(bundle, change)


def poison(bundle: Path, name: str, element: int = 0) -> None:
    """Write NaN over one number of a weight of the target."""
    graph = onnx.load(bundle / "target.onnx", load_external_data=False).graph
    weight = next(weight for weight in graph.initializer if weight.name == name)
    place = {entry.key: entry.value for entry in weight.external_data}
    with (bundle / place["location"]).open("r+b") as stream:
        stream.seek(int(place["offset"]) + 4 * element)
        stream.write(np.float32(np.nan).tobytes())
    rehash(bundle, place["location"])


def refused(speccompile: Cli, bundle: Path, *words: str, error: type[SpecCompileError] = BundleError) -> None:
    """`load` raises `error`, and `run` prints the same sentence, holding `words`."""
    with pytest.raises(error) as caught:
        load(bundle, threads=1).generate("Hello", max_new_tokens=4)
    sentence = str(caught.value)
    for word in words:
        assert word in sentence
    assert speccompile("run", bundle, "--prompt", "Hello", "--json") == (1, "", f"error: {sentence}\n")
    assert "\n" not in sentence


def test_the_manifest_lists_every_file_of_the_bundle(tiny_bundle: Path) -> None:
    assert set(Bundle.open(tiny_bundle).manifest.files) == set(FILES)
    assert {file.name for file in tiny_bundle.iterdir()} == {*FILES, "manifest.json"}


def test_a_bundle_may_be_reached_through_a_link_or_a_relative_path(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(bundle)
    assert Bundle.open(tmp_path / "link").manifest.method == "medusa"
    monkeypatch.chdir(bundle)
    assert Bundle.open(".").manifest.method == "medusa"


# ---- files ----


@pytest.mark.parametrize("name", FILES)
def test_truncated(speccompile: Cli, bundle: Path, name: str) -> None:
    size = (bundle / name).stat().st_size
    os.truncate(bundle / name, size - 1)
    refused(speccompile, bundle, str(bundle / name), f"{size - 1} bytes", f"says {size};", "copy or build")


@pytest.mark.parametrize("name", FILES)
def test_altered(speccompile: Cli, bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    was = file_info(bundle / name).sha256
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    now = file_info(bundle / name).sha256
    refused(speccompile, bundle, str(bundle / name), f"sha256 is {now[:12]}", f"says {was[:12]}", "altered")


def test_sizes_are_compared_even_without_hashes(bundle: Path) -> None:
    os.truncate(bundle / "target.onnx.data", 100)
    with pytest.raises(BundleError, match="truncated"):
        load(bundle, check_hashes=False)


def test_missing_file(speccompile: Cli, bundle: Path) -> None:
    (bundle / "medusa.onnx").unlink()
    refused(speccompile, bundle, str(bundle / "medusa.onnx"), "missing")


def test_no_bundle(speccompile: Cli, bundle: Path, tmp_path: Path) -> None:
    (bundle / "manifest.json").unlink()
    refused(speccompile, bundle, str(bundle), "no manifest.json", "speccompile build")
    refused(speccompile, tmp_path / "nowhere", str(tmp_path / "nowhere"), "not a bundle")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_file_that_is_read_but_not_listed(speccompile: Cli, bundle: Path, name: str) -> None:
    edit_manifest(bundle, lambda manifest: manifest["files"].pop(name))
    refused(speccompile, bundle, str(bundle / name), "not listed")


# ---- the manifest ----


@pytest.mark.parametrize("schema", [1, 2, 3, 5, "4", None])
def test_unknown_schema(speccompile: Cli, bundle: Path, schema: object) -> None:
    edit_manifest(bundle, lambda manifest: manifest.update(schema=schema))
    refused(speccompile, bundle, str(bundle / "manifest.json"), f"schema is {schema!r}", "reads schema 4", "rebuild")


def test_no_schema(speccompile: Cli, bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest.pop("schema"))
    refused(speccompile, bundle, str(bundle / "manifest.json"), "schema is None")


OPTIONAL = ["heads", "draft", "eagle", "lookahead", "lookup"]  # what the method does not use is null


def required_fields() -> list[str]:
    top = [item.name for item in fields(Manifest) if item.name not in ("schema", "costs", "measured", *OPTIONAL)]
    records = {
        "target": TargetInfo,
        "heads": HeadsInfo,
        "graphs.medusa": GraphInfo,
        "files.target.onnx": FileInfo,
        "tokenizer": TokenizerInfo,
    }
    nested = [f"{name}|{item.name}" for name, kind in records.items() for item in fields(kind)]
    return top + [name for name in nested if name != "heads|target_fingerprint"]


def record(manifest: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The object that holds a field named as in `required_fields`, and its key in there."""
    *outer, key = name.split("|")
    for part in outer[0].split(".", 1) if outer else ():
        manifest = manifest[part]
    return manifest, key


@pytest.mark.parametrize("name", required_fields())
def test_missing_field(bundle: Path, name: str) -> None:
    def remove(manifest: dict[str, Any]) -> None:
        holder, key = record(manifest, name)
        del holder[key]

    edit_manifest(bundle, remove)
    with pytest.raises(BundleError, match=rf"manifest\.json: field '{re.escape(name.replace('|', '.'))}' is "):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", [*required_fields(), *OPTIONAL, "costs", "measured", "heads|target_fingerprint"])
def test_field_of_another_kind(bundle: Path, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        holder, key = record(manifest, name)
        holder[key] = 1.5

    edit_manifest(bundle, change)
    with pytest.raises(BundleError, match=rf"manifest\.json: field '{re.escape(name.replace('|', '.'))}' is 1\.5; exp"):
        Bundle.open(bundle)


def test_missing_field_through_the_command_line(speccompile: Cli, bundle: Path) -> None:
    edit_manifest(bundle, lambda manifest: manifest["target"].pop("max_length"))
    refused(speccompile, bundle, str(bundle / "manifest.json"), "'target.max_length' is missing", "rebuild")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(method="telepathy"), ("method is 'telepathy'", "plain, medusa")),
        (lambda m: m.update(heads=None), ("method is 'medusa' but heads is null",)),
        (lambda m: m["graphs"].pop("target"), ("graphs lacks an entry",)),
        (lambda m: m["graphs"].pop("medusa"), ("graphs lacks an entry",)),
        (lambda m: m["graphs"]["target"].update(file="other.onnx"), ("'other.onnx'", "files")),
        (lambda m: m.update(tree={"paths": [[0, 0]]}), ("field 'tree'", "[0, 0]", "[0]")),
        (lambda m: m.update(tree={"paths": [[0], [-1]]}), ("field 'tree'", "rank -1")),
        (lambda m: m.update(eos_ids=["</s>"]), ("eos_ids", "'</s>'")),
    ],
)
def test_manifest_that_contradicts_itself(
    speccompile: Cli, bundle: Path, change: Callable[[dict[str, Any]], object], words: tuple[str, ...]
) -> None:
    edit_manifest(bundle, change)
    refused(speccompile, bundle, str(bundle / "manifest.json"), *words)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"schema": 1', b"\xff\xfe{}", b"[" * 100_000],
    ids=["empty", "open", "truncated", "binary", "deep"],
)
def test_not_json(speccompile: Cli, bundle: Path, content: bytes) -> None:
    (bundle / "manifest.json").write_bytes(content)
    refused(speccompile, bundle, str(bundle / "manifest.json"), "not valid JSON", "rebuild")


def test_json_but_no_object(speccompile: Cli, bundle: Path) -> None:
    (bundle / "manifest.json").write_text("[1]")
    refused(speccompile, bundle, str(bundle / "manifest.json"), "expected a JSON object, found list")


# ---- paths ----


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "a/../../secret", "..\\secret", "C:secret", "target.onnx\0"]
)
def test_path_that_leaves_the_bundle(speccompile: Cli, bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_bytes(b"secret")
    info = file_info(bundle.parent / "secret")
    entry = {"sha256": info.sha256, "bytes": info.bytes}
    edit_manifest(bundle, lambda manifest: manifest["files"].update({name: entry}))
    refused(speccompile, bundle, str(bundle / "manifest.json"), name, "leaves the bundle")


def test_graph_file_that_leaves_the_bundle(speccompile: Cli, bundle: Path) -> None:
    (bundle / "target.onnx").rename(bundle.parent / "target.onnx")

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["../target.onnx"] = manifest["files"].pop("target.onnx")
        manifest["graphs"]["target"]["file"] = "../target.onnx"

    edit_manifest(bundle, change)
    refused(speccompile, bundle, str(bundle / "manifest.json"), "../target.onnx", "leaves the bundle")


def test_link_that_leaves_the_bundle(speccompile: Cli, bundle: Path) -> None:
    (bundle / "medusa.onnx").rename(bundle.parent / "medusa.onnx")
    (bundle / "medusa.onnx").symlink_to(bundle.parent / "medusa.onnx")
    refused(speccompile, bundle, str(bundle / "manifest.json"), "medusa.onnx", "leaves the bundle")


def test_weights_that_a_graph_keeps_outside_the_bundle(speccompile: Cli, bundle: Path) -> None:
    (bundle / "medusa.onnx.data").rename(bundle.parent / "medusa.onnx.data")
    model = onnx.load(bundle / "medusa.onnx", load_external_data=False)
    for weight in model.graph.initializer:
        for entry in weight.external_data:
            if entry.key == "location":
                entry.value = "../medusa.onnx.data"
    (bundle / "medusa.onnx").write_bytes(model.SerializeToString())
    edit_manifest(bundle, lambda manifest: manifest["files"].pop("medusa.onnx.data"))
    rehash(bundle, "medusa.onnx")
    refused(speccompile, bundle, str(bundle / "medusa.onnx"), "cannot load")


def test_name_too_long_for_a_file(speccompile: Cli, bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m["files"].update({"x" * 5000: {"sha256": "", "bytes": 0}}))
    refused(speccompile, bundle, "cannot be read", "too long")


# ---- graphs that are whole but wrong ----


def test_graph_that_is_no_onnx(speccompile: Cli, bundle: Path) -> None:
    (bundle / "target.onnx").write_bytes(b"not a graph")
    rehash(bundle, "target.onnx")
    refused(speccompile, bundle, str(bundle / "target.onnx"), "onnxruntime cannot load")


def test_graph_of_another_contract(speccompile: Cli, bundle: Path) -> None:
    model = onnx.load(bundle / "target.onnx", load_external_data=False)
    for holder in model.graph.input:
        if holder.name == "tree_mask":
            holder.name = "mask"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "tree_mask":
                node.input[index] = "mask"
    (bundle / "target.onnx").write_bytes(model.SerializeToString())
    rehash(bundle, "target.onnx")
    refused(speccompile, bundle, str(bundle / "target.onnx"), "'mask', 'tree_mask'", "rebuild")


@pytest.mark.parametrize("paths", [[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], [[0], [10]]], ids=["deeper", "wider"])
def test_tree_that_its_heads_cannot_fill(speccompile: Cli, bundle: Path, paths: list[list[int]]) -> None:
    edit_manifest(bundle, lambda manifest: manifest.update(tree={"paths": paths}))
    refused(speccompile, bundle, "tree: depth", "3 heads", "top 10", "rebuild")


@pytest.mark.parametrize("element", [0, 7])
@pytest.mark.parametrize("weight", ["model.model.layers.1.self_attn.o_proj.weight.T", "model.lm_head.weight.T"])
def test_nan_logits(speccompile: Cli, bundle: Path, weight: str, element: int) -> None:
    poison(bundle, weight, element)  # every logit, or that of token `element` alone
    refused(speccompile, bundle, "logits", "not finite", "NaN", error=GenerationError)


def test_heads_graph_of_another_width(speccompile: Cli, bundle: Path) -> None:
    narrow = MedusaModule([[(torch.eye(48), torch.zeros(48))]] * 3, [torch.ones(320, 48)], 10)
    ir.save(export_medusa(narrow), bundle / "medusa.onnx", external_data="medusa.onnx.data")
    rehash(bundle, "medusa.onnx", "medusa.onnx.data")
    refused(speccompile, bundle, str(bundle), "64 wide", "takes 48", "rebuild")


def test_a_graphs_hash_covers_its_weights_and_the_targets(tiny_bundle: Path) -> None:
    manifest = Bundle.open(tiny_bundle).manifest
    before = {name: manifest.graph_sha256(name) for name in ("target", "medusa")}
    assert before["target"] != before["medusa"]

    def changed(file: str) -> set[str]:
        files = {**manifest.files, file: replace(manifest.files[file], sha256="0" * 64)}
        other = replace(manifest, files=files)
        return {name for name in before if other.graph_sha256(name) != before[name]}

    assert changed("target.onnx") == {"target"}
    assert changed("target.onnx.data") == {"target", "medusa"}  # heads may read the lm_head there
    assert changed("medusa.onnx") == changed("medusa.onnx.data") == {"medusa"}
    assert changed("tokenizer.json") == set()
