#!/usr/bin/env bash
# From a bare clone to a running Medusa bundle of a real model: `bash tools/quickstart.sh [FOLDER]`.
# Needs only python3 (3.10+). FOLDER (default build/quickstart) receives the bundle.
set -euo pipefail
mkdir -p "${1:-$(dirname "${BASH_SOURCE[0]}")/../build/quickstart}"
folder=$(cd "${1:-$(dirname "${BASH_SOURCE[0]}")/../build/quickstart}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh

use_venv compile,cpu torch onnxruntime transformers
bundle=$folder/smollm2-medusa.bundle

if [[ ! -e $bundle/manifest.json ]]; then
    model=$(speccompile zoo fetch smollm2-135m-instruct)
    speccompile build --method medusa "$model" --heads tools/zoo/smollm2-135m-instruct-medusa --out "$bundle"
fi

speccompile run "$bundle" --chat --max-new-tokens 128 --prompt "Explain in three sentences why the sky is blue."
python -m speccompile.tools.bench_medusa "$bundle" --prompts 3 --max-new-tokens 64
