#!/usr/bin/env bash
# What this machine can run, on a GPU and without one, whether it is right, and how fast:
#
#   bash tools/gpu_check.sh [OUT.json] [OPTIONS OF tools/gpu_check.py]
#
# Needs only python3 (3.11+). Exit status: 0 all is well, 1 something failed, 3 all is well but there is no GPU. After
# installing it takes at most 8 minutes; bundles and packages are kept in build/gpu_check, so a second run gets further.
# Without network: SPECCOMPILE_WHEELS=FOLDER, which holds the wheels, is then the only place that pip looks in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh

if [[ -n ${SPECCOMPILE_WHEELS:-} ]]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$SPECCOMPILE_WHEELS
fi
use_venv compile,cpu torch onnxruntime transformers

# What only this check needs lies in a folder of its own, in front of the environment's packages, which stay as they are.
packages=build/gpu_check/packages
mkdir -p "$packages"
export PYTHONPATH=$PWD/$packages${PYTHONPATH:+:$PYTHONPATH}

need() { # MODULE REQUIREMENT...: install unless it can be imported; what cannot be had is named and left out
    local module=$1
    shift
    if ! python -c "import $module" 2>/dev/null; then
        echo "installing $*"
        python -m pip install --quiet --target "$packages" "$@" || echo "no $module: '$*' cannot be installed here" >&2
    fi
}
has_driver() { python -c "import ctypes; ctypes.CDLL('libcuda.so.1')" 2>/dev/null; }

need cuda.bindings.runtime "cuda-python>=13"
need tensorrt_rtx "tensorrt-rtx>=1.7,<2"
if has_driver; then
    need tensorrt "tensorrt>=11.4,<12"
    if ! python -c "import onnxruntime as o, sys; sys.exit('CUDAExecutionProvider' not in o.get_available_providers())"; then
        # Its libraries of CUDA come along; numpy and the like are those of the environment.
        version=$(python -c "import onnxruntime; print(onnxruntime.__version__)")
        python -m pip install --quiet --target "$packages" --no-deps --upgrade "onnxruntime-gpu==$version" ||
            echo "no onnxruntime-gpu $version: it cannot be installed here" >&2
    fi
fi

exec python -m speccompile.tools.gpu_check "$@"
