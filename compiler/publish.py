"""Atomic publishing: a bundle is made in a folder beside its target and appears with one rename, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccompile.graphs.errors import BundleError


@contextmanager
def staged(target: Path, replace: bool = False) -> Iterator[Path]:
    """A fresh folder to fill; it becomes `target` when the block ends without an error, and is removed otherwise.

    Folders that killed runs left beside the same target are removed first.

    Raises:
        BundleError: when `target` exists and may not be replaced, its parent cannot be written, or the disk is full.
    """
    if target.exists() and not replace:
        raise BundleError(f"{target}: already exists; give another --out, or --force to replace it.")
    prefix = f".{target.name}.partial-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(f"{prefix}*"):
            if not _alive(stale.name.removeprefix(prefix)):
                shutil.rmtree(stale, ignore_errors=True)
        folder = target.parent / f"{prefix}{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        raise BundleError(f"{target.parent}: cannot write there ({error.strerror}).") from error
    try:
        yield folder
        _swap(folder, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BundleError(f"{target.parent}: the disk is full; nothing was published, free some space.") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _swap(folder: Path, target: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if target.exists():
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(target)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
