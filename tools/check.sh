#!/usr/bin/env bash
# Lint, types and all tests, from a bare clone: `bash tools/check.sh [PYTEST ARGUMENTS]`. Needs only python3 (3.11+).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh

use_venv test torch onnxruntime transformers tensorrt_rtx ruff mypy pytest
python -c 'from speccompile.tools.zoo.fetch import fetch; print("model:", fetch("smollm2-135m-instruct"))'

echo "== ruff"
python -m ruff check .

echo "== mypy"
# The folders are called graphs, not speccompile/graphs, so mypy is shown the import names as links.
rooms=(graphs runtime compiler tools)
mkdir -p .mypy_cache/src/speccompile
for room in "${rooms[@]}"; do ln -sfn "../../../$room" ".mypy_cache/src/speccompile/$room"; done
MYPYPATH=.mypy_cache/src python -m mypy --explicit-package-bases "${rooms[@]/#/--package=speccompile.}"

echo "== pytest"
exec python -m pytest -n auto --dist loadfile "$@"
