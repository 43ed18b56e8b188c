"""The graph contract: names, shapes and dtypes that every drafter, backend and attention dialect shares.

`B` batch, `T` new tokens, `R` rows wanted, `C` cache capacity, `V` vocabulary, `F` feature width.

Target (and draft model) inputs:
    input_ids      int64 [B,T]     the new tokens, parents before children
    position_ids   int64 [B,T]     past length + depth in the tree
    tree_mask      bool  [B,T,T]   [i,j]: new token i sees new token j (itself and its ancestors);
                                   the past is always visible, window limits are derived in the graph
    past_length    int64 [B]       committed tokens in the cache
    logit_rows     int64 [R]       rows whose logits are wanted
    past_key_values.{i}.key/.value [B,Hkv,C,D]  the cache, committed rows first
outputs:
    next_ids       int64 [B,R]     argmax of each wanted row
    logits         float [B,R,V]   the same rows
    hidden         float [B,T,F]   only if the method needs it
    present.{i}.key/.value         the same buffers, new rows written at past_length .. past_length+T-1

Medusa heads: hidden [B,R,F] -> topk_ids int64 [B,R,heads,K], topk_logprobs float [B,R,heads,K].
"""

from __future__ import annotations

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
TREE_MASK = "tree_mask"
PAST_LENGTH = "past_length"
LOGIT_ROWS = "logit_rows"
NEXT_IDS = "next_ids"
LOGITS = "logits"
HIDDEN = "hidden"
TOPK_IDS = "topk_ids"
TOPK_LOGPROBS = "topk_logprobs"

TARGET_INPUTS = (INPUT_IDS, POSITION_IDS, TREE_MASK, PAST_LENGTH, LOGIT_ROWS)

MICROSOFT = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

PARTS = ("key", "value")


def past_names(layers: int) -> list[str]:
    """Names of the cache inputs, layer by layer, key before value."""
    return [f"past_key_values.{layer}.{part}" for layer in range(layers) for part in PARTS]


def present_names(layers: int) -> list[str]:
    """Names of the cache outputs, in the order of `past_names`."""
    return [f"present.{layer}.{part}" for layer in range(layers) for part in PARTS]
