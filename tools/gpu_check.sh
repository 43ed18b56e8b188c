#!/usr/bin/env bash
# What this machine can run, on a GPU and without one, whether it is right, and how fast:
#
#   bash tools/gpu_check.sh [OUT.json] [OPTIONS OF tools/gpu_check.py]
#
# Needs only python3 (3.11+). Exit status: 0 all is well, 1 something failed, 2 an option was refused, 3 nothing failed,
# and nothing was run on a GPU. After installing (2 GB where there is a driver) it takes at most 8 minutes; bundles and
# packages are kept in build/gpu_check, so a second run gets further.
# Without network: SPECCOMPILE_WHEELS=FOLDER, which holds the wheels, is then the only place that pip looks in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh

if [[ -n ${SPECCOMPILE_WHEELS:-} ]]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$SPECCOMPILE_WHEELS
fi
use_venv compile,cpu torch onnxruntime transformers

# What only this check needs is kept out of the environment: a folder for each requirement, as pip skips what a folder
# already has parts of (nvidia/, cuda/).
packages=$PWD/build/gpu_check/packages
mkdir -p "$packages"

install() { # FOLDER REQUIREMENT: what cannot be had is named and left out
    echo "installing $2"
    python -m pip install --quiet --upgrade --target "$1" "$2" || echo "'$2' cannot be installed here" >&2
}
need() { # MODULE REQUIREMENT: install unless it can be imported
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$packages/$1
    python -c "import $1" 2>/dev/null || install "$packages/$1" "$2"
}
has_driver() { python -c "import ctypes; ctypes.CDLL('libcuda.so.1')" 2>/dev/null; }

need cuda.bindings.runtime "cuda-python>=13"
need tensorrt_rtx "tensorrt-rtx>=1.7,<2"
# Its module is called onnxruntime, too, so only the lines that use it have it on their path. The wheel has no cuBLAS and
# no cuDNN; its extras bring them, and its other dependencies come along once more.
onnxruntime_gpu=$packages/onnxruntime-gpu
if has_driver; then
    need tensorrt "tensorrt>=11.4,<12"
    [[ -d $onnxruntime_gpu/onnxruntime ]] || install "$onnxruntime_gpu" "onnxruntime-gpu[cuda,cudnn]>=1.31,<1.33"
fi

exec python -m speccompile.tools.gpu_check --onnxruntime-gpu "$onnxruntime_gpu" "$@"
