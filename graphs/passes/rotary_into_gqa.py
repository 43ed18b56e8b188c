"""Let GroupQueryAttention rotate its own queries and keys."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.graphs.contract import MICROSOFT
from speccompile.graphs.passes.matching import only_use, producer

# GroupQueryAttention's input slots (com.microsoft, version 1).
QUERY, KEY, COS, SIN, POSITIONS = 0, 1, 7, 8, 9
INPUT_COUNT = 11
TABLE_STEP = 8  # its kernels refuse tables whose width is no multiple of this


class RotaryIntoGqa(ir.passes.InPlacePass):
    """Accepts GroupQueryAttention whose query and key each come as

        [B,T,N*D] -> Reshape [B,T,N,D] -> Transpose [B,N,T,D] -> RotaryEmbedding -> Transpose -> Reshape [B,T,N*D]

    with the same tables, positions and pairing. The chain is dropped and the operator gets the tables, positions
    and do_rotary. A partial rotation is kept: the operator rotates as many channels as the tables are wide.
    Q/K norms between projection and rotation, anything else in the chain, and tables of a width that the operator
    refuses (heads of 24 or 120 channels), leave the graph as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in list(model.graph):
            if node.op_type != "GroupQueryAttention" or node.domain != MICROSOFT or len(node.inputs) < INPUT_COUNT:
                continue
            query, key = _match(node.inputs[QUERY]), _match(node.inputs[KEY])
            if query is None or key is None or query[1:] != key[1:]:
                continue
            _, cos, sin, positions, interleaved = query
            for slot, value in ((QUERY, query[0]), (KEY, key[0]), (COS, cos), (SIN, sin), (POSITIONS, positions)):
                node.replace_input_with(slot, value)
            node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
            node.attributes["rotary_interleaved"] = ir.AttrInt64("rotary_interleaved", interleaved)
            modified = True
        return ir.passes.PassResult(model, modified)


def _match(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, int] | None:
    """(source [B,T,N*D], cos, sin, positions, interleaved) of a rotated query or key."""
    to_flat = producer(value, "Reshape")
    to_rows = producer(to_flat.inputs[0], "Transpose") if to_flat else None
    rotary = producer(to_rows.inputs[0], "RotaryEmbedding") if to_rows else None
    to_heads = producer(rotary.inputs[0], "Transpose") if rotary else None
    to_split = producer(to_heads.inputs[0], "Reshape") if to_heads else None
    if to_flat is None or to_rows is None or rotary is None or to_heads is None or to_split is None:
        return None
    source = to_split.inputs[0]
    swaps = all(list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3] for node in (to_rows, to_heads))
    if not swaps or only_use(rotary.outputs[0]) is None or source is None or source.shape is None or value is None:
        return None
    if value.shape is None or source.shape != value.shape:
        return None
    if len(rotary.inputs) != 4:  # without positions the tables are [B,T,rotary_dim/2] instead
        return None
    cos, sin, positions = rotary.inputs[1:]
    assert cos is not None and sin is not None and positions is not None
    if cos.shape is None or not isinstance(cos.shape[1], int) or cos.shape[1] % TABLE_STEP:
        return None
    interleaved = rotary.attributes.get("interleaved")
    return source, cos, sin, positions, interleaved.as_int() if interleaved else 0
