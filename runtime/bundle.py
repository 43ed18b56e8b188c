"""Opening a bundle: nothing in it is used before its manifest, paths and hashes have been checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from speccompile.graphs.engines import ENGINES_FOLDER, REMEDY, SIDECAR_FILE, EngineSet, folder_name, read_engines
from speccompile.graphs.errors import BundleError, TreeError
from speccompile.graphs.manifest import MANIFEST_FILE, FileInfo, GraphInfo, Manifest, file_info
from speccompile.graphs.tree import DraftTree, tree_from_json


@dataclass(frozen=True)
class Bundle:
    """A checked bundle: its folder, its manifest and its tree."""

    path: Path
    manifest: Manifest
    tree: DraftTree

    @classmethod
    def open(cls, path: str | Path, check_hashes: bool = True) -> Bundle:
        """Read and check a bundle.

        Args:
            check_hashes: whether to read every file once to compare its sha256 (about a second per GB); sizes
                are compared in any case.

        Raises:
            BundleError: naming the file and field that is missing, altered, unsafe or of another version.
        """
        path = Path(path)
        source = path / MANIFEST_FILE
        if not source.is_file():
            raise BundleError(f"{path}: not a bundle, it has no {MANIFEST_FILE}; make one with 'speccompile build'.")
        try:
            data = json.loads(source.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BundleError(
                f"{source}: not valid JSON ({error}); the file is damaged, rebuild the bundle."
            ) from error
        manifest = Manifest.from_json(data, str(source))
        for name, expected in manifest.files.items():
            file = _inside(path, name, source)
            try:
                _check_file(file, expected, check_hashes)
            except OSError as error:
                raise BundleError(f"{file}: cannot be read ({error.strerror}); copy the bundle again.") from error
        for name in ("tokenizer.json", "chat_template.jinja"):  # read by name, not through the manifest
            if (path / name).exists() and name not in manifest.files:
                raise BundleError(f"{path / name}: not listed in {MANIFEST_FILE}; copy or build the bundle again.")
        try:
            tree = tree_from_json(manifest.tree)
        except TreeError as error:
            raise BundleError(f"{source}: field 'tree' is not usable: {error}") from error
        return cls(path, manifest, tree)

    def draft_tokens(self) -> npt.NDArray[np.int64] | None:
        """int64 [Vd]: the target's id of each logit of the draft model or head; None when they are the same.

        Raises:
            BundleError: when the file does not hold that.
        """
        info = self.manifest.drafting
        if info is None or info.token_map is None:
            return None
        file = self.path / info.token_map
        try:
            ids = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BundleError(f"{file}: not an array of token ids ({error}); rebuild the bundle.") from error
        vocabulary = self.manifest.target.vocab_size
        whole = ids.dtype == np.int64 and ids.shape == (info.draft_vocabulary,) and len(ids) > 0
        # Ascending, so none twice: a repeated id would make q, which acceptance relies on, add up to less than 1.
        if not whole or ids[0] < 0 or ids[-1] >= vocabulary or not (np.diff(ids) > 0).all():
            raise BundleError(
                f"{file}: {ids.dtype} of shape {ids.shape}; expected {info.draft_vocabulary} ascending token ids below "
                f"{vocabulary}, rebuild the bundle."
            )
        return ids

    def graph(self, name: str) -> tuple[Path, GraphInfo]:
        """Path and description of a graph of this bundle."""
        info = self.manifest.graphs[name]
        return self.path / info.file, info

    def engines(self, runtime: str, version: str, target: str, check_hashes: bool = True) -> tuple[Path, EngineSet]:
        """The folder of the engines that `version` of `runtime` runs on a GPU `target`, and what lies in it.

        Raises:
            BundleError: when the bundle has none, or they were altered or made from another build of its graphs.
        """
        if (dialect := self.manifest.graphs["target"].dialect) != "scatter":
            raise BundleError(
                f"{self.path}: its graphs are of the dialect '{dialect}', which TensorRT does not run; build the "
                "bundle again with --dialect scatter, and then its engines."
            )
        place = f"{ENGINES_FOLDER}/{folder_name(runtime, version, target)}"
        folder = self.path / place
        source = folder / SIDECAR_FILE
        if not folder.is_dir():
            lean = ", with --lean for tensorrt_lean" if runtime == "tensorrt" else ""
            there = sorted(file.parent.name for file in (self.path / ENGINES_FOLDER).glob(f"*/{SIDECAR_FILE}"))
            raise BundleError(
                f"{self.path}: it has no engines for {runtime} {version} on {target} (there are: "
                f"{', '.join(there) or 'none'}); make them with 'speccompile engine {self.path} "
                f"--runtime {runtime.replace('_', '-')}'{lean}."
            )
        engines = read_engines(folder)
        for field, found, wanted in (
            ("runtime", engines.runtime, runtime),
            ("version", engines.version, version),
            ("target", engines.target, target),
        ):
            if found != wanted:
                raise BundleError(f"{source}: {field} is '{found}' but here it is '{wanted}'; {REMEDY}")
        for name, graph in self.manifest.graphs.items():
            if (engine := engines.engines.get(name)) is None:
                raise BundleError(f"{source}: field 'engines' has no entry '{name}', which this bundle needs; {REMEDY}")
            made_from = self.manifest.graph_sha256(name)
            if engine.graph_sha256 != made_from:
                raise BundleError(
                    f"{source}: {name} was made from a graph and weights of sha256 {engine.graph_sha256[:12]}... but "
                    f"{graph.file} and its weights have {made_from[:12]}...; {REMEDY}"
                )
            file = _inside(self.path, f"{place}/{engine.file}", source)
            _check_file(file, FileInfo(engine.sha256, engine.bytes), check_hashes, SIDECAR_FILE, REMEDY)
        return folder, engines


def _check_file(
    file: Path,
    expected: FileInfo,
    check_hash: bool,
    lists: str = MANIFEST_FILE,
    remedy: str = "copy or build the bundle again.",
) -> None:
    if not file.is_file():
        raise BundleError(f"{file}: listed in {lists} but missing; {remedy}")
    if file.stat().st_size != expected.bytes:
        raise BundleError(
            f"{file}: {file.stat().st_size} bytes but {lists} says {expected.bytes}; the file is truncated or altered, "
            f"{remedy}"
        )
    if check_hash and (found := file_info(file).sha256) != expected.sha256:
        raise BundleError(
            f"{file}: sha256 is {found[:12]}... but {lists} says {expected.sha256[:12]}...; the file was altered, "
            f"{remedy}"
        )


def _inside(bundle: Path, name: str, source: Path) -> Path:
    """The file `name` of the bundle, refused when it is not a plain relative path that stays inside."""
    relative = PurePosixPath(name)
    file = bundle / relative
    unsafe = relative.is_absolute() or ".." in relative.parts or any(sign in name for sign in "\\:\0")
    if unsafe or not file.resolve().is_relative_to(bundle.resolve()):
        raise BundleError(f"{source}: file '{name}' leaves the bundle; refusing to read it.")
    return file
