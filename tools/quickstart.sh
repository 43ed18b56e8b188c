#!/usr/bin/env bash
# From a bare clone to a running Medusa bundle of a real model: `bash tools/quickstart.sh [FOLDER]`.
# Needs only python3 (3.11+). FOLDER (default build/quickstart) receives the bundle; delete it to build again.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/build/quickstart}
mkdir -p "$folder"
bundle=$(cd "$folder" && pwd)/smollm2-medusa.bundle
cd "$root"
source tools/venv.sh

use_venv compile,cpu torch onnxruntime transformers

if [[ -e $bundle/manifest.json ]]; then
    echo "using $bundle, built earlier"
else
    model=$(speccompile zoo fetch smollm2-135m-instruct)
    speccompile build --method medusa "$model" --heads tools/zoo/smollm2-135m-instruct-medusa --out "$bundle"
fi

speccompile run "$bundle" --chat --max-new-tokens 128 --prompt "Explain in three sentences why the sky is blue."
python -m speccompile.tools.bench "$bundle" --prompts 3 --max-new-tokens 64
