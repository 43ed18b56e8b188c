# Sourced by check.sh and quickstart.sh, which run from the checkout's root.
#
#   use_venv EXTRAS MODULE...   puts a Python with this checkout's speccompile[EXTRAS] first on PATH
#
# An active virtual environment is used as it is when it holds this checkout and the MODULEs. Otherwise other
# people's packages are installed once into <cache>/venv-<key>, the key covering the Python version and
# pyproject.toml down to its [tool] tables. The checkout's own .venv-speccompile sees them through a .pth file and
# holds nothing but the editable install, so checkouts share the downloads without getting in each other's way.

CACHE=${SPECCOMPILE_CACHE:-$HOME/.cache/speccompile}
TORCH=2.13.0

holds_checkout() {
    [[ -n ${VIRTUAL_ENV:-} ]] && python - "$@" <<'PY' 2>/dev/null
import importlib, os, sys
import speccompile.graphs
for module in sys.argv[1:]:
    importlib.import_module(module)
sys.exit(not os.path.samefile(speccompile.graphs.__path__[0], "graphs"))
PY
}

venv_key() {
    python3 - <<'PY'
import hashlib, platform, sys
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    sys.exit("speccompile needs Python 3.11 or newer, and python3 is %s; put a newer python3 first on PATH." % version)
requirements = open("pyproject.toml", encoding="utf-8").read().partition("[tool.")[0]
key = hashlib.sha256((platform.machine() + requirements).encode()).hexdigest()
print("py%s-%s" % (version, key[:16]))
PY
}

make_venv() {
    python3 -m venv "$@" || { echo "python3 cannot make a virtual environment; install it (Debian: apt-get install python3-venv)." >&2; return 1; }
}

# Plain torch would bring several GB of CUDA on Linux. A local "+cpu" build is tried first, then PyTorch's own index of
# them, then the ordinary release (which is a CPU build on macOS).
install_cpu_torch() {
    "$1" -m pip install --quiet "torch==$TORCH+cpu" 2>/dev/null ||
        "$1" -m pip install --quiet "torch==$TORCH+cpu" --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
        "$1" -m pip install --quiet "torch==$TORCH"
}

use_venv() {
    local extras=$1 shared own=.venv-speccompile
    shift
    if holds_checkout "$@"; then
        echo "using the active virtual environment $VIRTUAL_ENV"
        return
    fi
    unset PYTHONPATH
    shared=$(venv_key)
    shared=$CACHE/venv-$shared
    mkdir -p "$CACHE"
    exec 9>"$CACHE/venv.lock"
    if command -v flock >/dev/null; then flock 9; fi

    if [[ ! -e $shared/has-$extras ]]; then
        echo "installing speccompile[$extras] and what it needs into $shared (once)"
        "$shared/bin/python" -m pip --version >/dev/null 2>&1 || make_venv --clear "$shared"
        "$shared/bin/python" -m pip install --quiet "setuptools>=77"
        "$shared/bin/python" -c "import torch" 2>/dev/null || install_cpu_torch "$shared/bin/python"
        "$shared/bin/python" -m pip install --quiet --no-build-isolation --editable ".[$extras]"
        "$shared/bin/python" -m pip uninstall --quiet --yes speccompile
        touch "$shared/has-$extras"
    fi
    touch "$shared"
    find "$CACHE" -maxdepth 1 -name "venv-*" -mtime +30 -exec rm -rf {} +

    if [[ $(cat $own/shared 2>/dev/null) != "$shared" ]]; then
        local folders='import sysconfig; print(*sorted({sysconfig.get_path(p) for p in ("purelib", "platlib")}), sep="\n")'
        make_venv --clear --without-pip $own
        "$shared/bin/python" -c "$folders" >"$($own/bin/python -c "$folders" | head -n 1)/shared.pth"
        $own/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
        echo "$shared" >$own/shared
    fi
    exec 9>&-
    export VIRTUAL_ENV=$PWD/$own PATH=$PWD/$own/bin:$shared/bin:$PATH
    hash -r
    echo "using $VIRTUAL_ENV with the packages of $shared"
}
