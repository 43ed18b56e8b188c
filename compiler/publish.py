"""Atomic publishing: a bundle is made in a folder beside its target and appears with one rename, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccompile.graphs.errors import BundleError
from speccompile.graphs.manifest import MANIFEST_FILE


@contextmanager
def staged(target: Path, replace: bool = False, marker: str = MANIFEST_FILE) -> Iterator[Path]:
    """A fresh folder to fill; it becomes `target` when the block ends without an error, and is removed otherwise.

    What killed runs left beside the same target is cleaned up first.

    Args:
        marker: the file without which a folder is never replaced.

    Raises:
        BundleError: when `target` exists and may not be replaced (only a bundle may ever be), its parent cannot be
            written, or the disk is full.
    """
    target = target.absolute()  # "." has no name
    if target.exists() and not replace:
        raise BundleError(f"{target}: already exists; give another --out, or --force to replace it.")
    if target.exists() and not (target / marker).is_file():
        raise BundleError(f"{target}: is not a bundle, and --force replaces nothing else; give another --out.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(target)
        folder = _beside(target, "partial")
        folder.mkdir()
    except OSError as error:
        raise BundleError(f"{target.parent}: cannot write there ({error.strerror}).") from error
    try:
        yield folder
        _swap(folder, target)
    except Exception as error:
        if _says_disk_full(error):
            raise BundleError(f"{target.parent}: the disk is full; nothing was published, free some space.") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}-{os.getpid()}")


def _clean_up(target: Path) -> None:
    """Remove what dead processes left; put back a bundle whose replacement was killed between its two renames."""
    for stale in list(target.parent.iterdir()):
        name, _, pid = stale.name.rpartition("-")
        if name not in (f".{target.name}.partial", f".{target.name}.old") or _alive(pid):
            continue
        if name.endswith(".old") and not target.exists():
            stale.rename(target)
        else:
            shutil.rmtree(stale, ignore_errors=True)


def _says_disk_full(error: Exception) -> bool:
    """Whether it came from a full disk. tokenizers (Rust) and numpy's tofile say so in their text alone."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in full:
        return True
    return any(text in str(error) for text in (" requested and ", *(f"os error {code}" for code in full)))


def _swap(folder: Path, target: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if target.exists():
        old = _beside(target, "old")
        target.rename(old)
        try:
            folder.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(target)


def _alive(pid: str) -> bool:
    """Whether another process has this id. Ours does not count: in a container every run may have the same one."""
    if pid == str(os.getpid()):
        return False
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
