"""python -m speccompile.tools.bench: the same as `speccompile bench`."""

import sys

from speccompile.graphs.errors import SpecCompileError
from speccompile.tools.bench.command import bench

if __name__ == "__main__":
    try:
        bench(prog_name="python -m speccompile.tools.bench")
    except SpecCompileError as error:
        sys.exit(f"error: {error}")
