"""The lean runtime: numpy, tokenizers, jinja2 and one backend library; never torch, transformers or onnx.

from speccompile.runtime import load
decoder = load("smollm2.bundle")
answer = decoder.generate([{"role": "user", "content": "Why is the sky blue?"}], max_new_tokens=128)
print(answer.text, answer.stats.mean_accepted_tokens)
"""

from speccompile.runtime.decoder import Decoder, Generation, Piece, SequenceState, load
from speccompile.runtime.stats import Stats


def share_threads(threads: int | None = None) -> None:
    """See `backends.ort.share_threads`."""
    from speccompile.runtime.backends import ort

    ort.share_threads(threads)


__all__ = ["Decoder", "Generation", "Piece", "SequenceState", "Stats", "load", "share_threads"]
