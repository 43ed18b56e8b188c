"""What processes of the GPU check run in its tests. They start anew, so nothing large is imported here."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from speccompile.graphs.errors import BundleError


def answer(value: int) -> dict[str, Any]:
    print("this must not be seen")
    return {"value": value, "process": os.getpid()}


def refuse() -> dict[str, Any]:
    raise BundleError("a.bundle: not for this GPU; build it again.")


def stumble() -> dict[str, Any]:
    raise ValueError("first line\nsecond line")


def crash() -> dict[str, Any]:
    print("about to crash", flush=True)
    os.abort()


def hang(marker: str) -> dict[str, Any]:
    try:
        time.sleep(600)
    finally:
        Path(marker).write_text("cleaned up")
    return {}


def place_of(module: str) -> dict[str, Any]:
    return {"place": importlib.import_module(module).__file__}
