"""The graph contract: names, shapes and dtypes that every drafter, backend and attention dialect shares.

`B` batch, `T` new tokens, `R` rows wanted, `C` cache capacity, `V` vocabulary, `F` feature width, `M` rows
that a mask speaks about, `K` best tokens.

Target (and draft model) inputs:
    input_ids      int64 [B,T]     the new tokens, parents before children
    position_ids   int64 [B,T]     past length + depth in the tree
    tree_mask      bool  [B,T,M]   [i,j]: new token i sees row j of the newest M rows, which end with the new tokens
                                   (so M >= T); older rows are always visible, window limits are derived in the graph.
                                   A target's M is T. A draft model grows a tree level by level: the M - T rows before
                                   the new ones are the levels it has drafted, and each node is computed once
    past_length    int64 [B]       rows in the cache before the new ones
    logit_rows     int64 [R]       rows whose logits are wanted
    past_key_values.{i}.key/.value [B,Hkv,C,D]  the cache, committed rows first
outputs:
    next_ids       int64 [B,R]     argmax of each wanted row
    logits         float [B,R,V]   the same rows
    hidden         float [B,T,F]   only if the method needs it
    present.{i}.key/.value         the same buffers, new rows written at past_length .. past_length+T-1

A draft model has the same inputs; its outputs speak of a draft vocabulary of Vd tokens, named by target ids:
    next_ids       int64 [B,R]     the best token of each wanted row
    logits         float [B,R,Vd]
    topk_ids       int64 [B,R,K]   the best tokens, best first
    topk_logprobs  float [B,R,K]   their log-probabilities over the draft vocabulary
    present                        as above

An EAGLE head is a draft model with one more input, and a cache of its own. Its row i reads the token t_(i+1) beside
the feature f_i, at position i, and guesses t_(i+2). f_i is the target's `hidden` at i where the target has run, and
behind that the head's own `hidden` of the row before:
    features       float [B,T,F]   in: F is as wide as the target's `hidden`
    hidden         float [B,T,F]   out: the states passed on, features of the rows that follow

Medusa heads: hidden [B,R,F] -> topk_ids int64 [B,R,heads,K], topk_logprobs float [B,R,heads,K].
"""

from __future__ import annotations

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
TREE_MASK = "tree_mask"
PAST_LENGTH = "past_length"
LOGIT_ROWS = "logit_rows"
FEATURES = "features"
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
