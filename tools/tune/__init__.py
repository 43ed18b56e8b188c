"""`speccompile tune`: what calls cost here, what guesses are accepted, and the setting that follows from both.

`costs` times the calls of the target and of what drafts. `texts` lets the model answer prompts, `recording` notes what
the drafter proposes at every position of the answers, and `replay` counts the rounds that any smaller setting would
have taken. `search` finds the setting of the most tokens a second, and `tuning` does all of it, measures what was
predicted and writes the manifest.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speccompile.tools.tune.tuning import tune as tune


def __getattr__(name: str) -> Any:  # the command line imports this package, and must not wait for ONNX Runtime
    if name == "tune":
        from speccompile.tools.tune.tuning import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
