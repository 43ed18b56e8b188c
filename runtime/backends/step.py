"""What backends share: what the decoding loop and the drafters see of a graph, its cache and its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from speccompile.graphs import contract
from speccompile.graphs.errors import GenerationError

Array = npt.NDArray[Any]
Lazy = Array | Callable[[], Array]
"""An array, or what copies it from a device when it is asked for."""

Shapes = dict[str, tuple[type[np.generic], tuple[int, ...]]]
"""By name, dtype and shape."""


class StepOutput:
    """What one call of a target leaves: views into buffers that the next call with the same cache overwrites. What
    still lies on a device must be asked for before that call.

    Args:
        next_ids: int64 [B,R]. In the scatter dialect -1 where a row's largest logit is no finite number.
        logits: float32 [B,R,V].
        hidden: float32 [B,T,F], or None when the graph does not give it.
        topk_ids, topk_logprobs: int64 and float32 [B,R,K], of a draft model or EAGLE head only.
    """

    __slots__ = ("_hidden", "_logits", "next_ids", "topk_ids", "topk_logprobs")

    def __init__(
        self,
        next_ids: npt.NDArray[np.int64],
        logits: Lazy,
        hidden: Lazy | None = None,
        topk_ids: npt.NDArray[np.int64] | None = None,
        topk_logprobs: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.next_ids, self.topk_ids, self.topk_logprobs = next_ids, topk_ids, topk_logprobs
        self._logits, self._hidden = logits, hidden

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        return self._logits() if callable(self._logits) else self._logits

    @property
    def hidden(self) -> npt.NDArray[np.float32] | None:
        return self._hidden() if callable(self._hidden) else self._hidden

    def finite(self, rows: Sequence[int]) -> bool:
        """Whether the largest logit of each of `rows` is a finite number. Logits on a device stay there: only graphs
        of the scatter dialect leave them there, and those say it in `next_ids`."""
        if any(self.next_ids[0, row] < 0 for row in rows):
            return False
        # The maximum, not the logit of the argmax: ONNX Runtime's ArgMax passes over NaN, numpy's max does not.
        return callable(self._logits) or all(math.isfinite(self._logits[0, row].max()) for row in rows)


class Cache(Protocol):
    """Keys and values of one sequence (or of a batch of rows). `length` rows are committed; `seconds` were spent inside
    the backend in the last call."""

    capacity: int
    length: int
    seconds: float

    def run(
        self,
        input_ids: Array,
        position_ids: Array,
        tree_mask: Array,
        logit_rows: Array,
        past_length: Array | None = None,
        features: Array | None = None,
    ) -> StepOutput:
        """One call of the model; new rows are written behind those that are there, but not committed.

        Args:
            tree_mask: bool [T,M]; M - T of the rows it speaks about are uncommitted ones, which earlier calls have left
                behind `length`.
            past_length: rows before the new ones; default: this cache's length and those M - T.
            features: what an EAGLE head reads, and nothing else does; it may be a view of the last output.
            others: shapes as in `graphs.contract`; a [T], [T,M] or [T,F] argument stands for batch 1.

        Raises:
            GenerationError: when the new rows would not fit the cache.
        """

    def commit(self, nodes: Sequence[int]) -> None:
        """Keep the rows `nodes` (ascending, relative to the current length) of the last calls, in this order, and
        advance the length. A path that is the first rows costs no move."""

    def truncate(self, length: int) -> None:
        """Forget everything behind `length`; the rows are simply overwritten later."""


class Target(Protocol):
    """A target, draft model or EAGLE head on the graph contract. Weights live here, once; each sequence opens its own
    cache.

    `vocab_size` is the width of the logits: V, or a draft model's Vd; `top_k` is K, 0 for a target; `width` is F of
    the output `hidden` and `features` F of the input of that name, None where there is none. `max_tokens` and
    `max_masked` are the largest T and M of one call; None sets no limit.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    width: int | None
    features: int | None
    top_k: int
    max_tokens: int | None
    max_masked: int | None

    def open(self, capacity: int, batch: int = 1) -> Cache:
        """A fresh, empty cache of `capacity` tokens for `batch` rows."""


class Heads(Protocol):
    """A Medusa heads graph: one feature row in, the best tokens of each head out."""

    width: int
    heads: int
    top_k: int
    seconds: float

    def run(self, hidden: Array) -> tuple[Array, Array]:
        """hidden float32 [F] -> ids int64 [heads,K], logprobs float32 [heads,K], which no later call overwrites. All
        sequences share the heads, so several threads may call this."""


class Graphs(Protocol):
    """The graphs of one bundle, as one backend runs them."""

    @property
    def capacity(self) -> int | None:
        """C where it is fixed."""

    def target(self, name: str = "target") -> Target:
        """The target, or the draft model or EAGLE head of that name."""

    def heads(self) -> Heads:
        """The Medusa heads."""


def check_room(past: int | Array, tokens: int, capacity: int) -> None:
    """Refuse new rows that would not fit.

    Raises:
        GenerationError: as in `Cache.run`.
    """
    longest = past if isinstance(past, int) else int(past.max())
    if longest + tokens > capacity:
        raise GenerationError(f"cache: {tokens} new tokens behind {longest} do not fit its capacity of {capacity}.")


def call_shapes(target: Target, batch: int, tokens: int, masked: int, rows: int) -> Shapes:
    """All that a call reads and writes beside keys and values, inputs first and in the order of `Cache.run`."""
    shapes: Shapes = {
        contract.INPUT_IDS: (np.int64, (batch, tokens)),
        contract.POSITION_IDS: (np.int64, (batch, tokens)),
        contract.TREE_MASK: (np.bool_, (batch, tokens, masked)),
        contract.PAST_LENGTH: (np.int64, (batch,)),
        contract.LOGIT_ROWS: (np.int64, (rows,)),
    }
    if target.features:
        shapes[contract.FEATURES] = (np.float32, (batch, tokens, target.features))
    shapes[contract.NEXT_IDS] = (np.int64, (batch, rows))
    shapes[contract.LOGITS] = (np.float32, (batch, rows, target.vocab_size))
    if target.width:
        shapes[contract.HIDDEN] = (np.float32, (batch, tokens, target.width))
    if target.top_k:
        shapes[contract.TOPK_IDS] = (np.int64, (batch, rows, target.top_k))
        shapes[contract.TOPK_LOGPROBS] = (np.float32, (batch, rows, target.top_k))
    return shapes
