"""ONNX-to-ONNX passes, one per file, and the order in which a freshly traced target goes through them.

Each pass says which graphs it accepts, changes the model in place and reports whether it did anything.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from speccompile.graphs.passes.cancel_layout import CancelLayout
from speccompile.graphs.passes.derive_gqa_inputs import DeriveGqaInputs
from speccompile.graphs.passes.fix_capacity import FixCapacity
from speccompile.graphs.passes.fold_weights import FoldWeights
from speccompile.graphs.passes.for_tensorrt import ForTensorrt
from speccompile.graphs.passes.fuse_parallel_matmuls import FuseParallelMatMuls
from speccompile.graphs.passes.fuse_silu import FuseSilu
from speccompile.graphs.passes.fuse_skip_norm import FuseSkipNorm
from speccompile.graphs.passes.integer_products import IntegerProducts
from speccompile.graphs.passes.pack_qkv import PackQkv
from speccompile.graphs.passes.pack_tables import PackTables
from speccompile.graphs.passes.pack_weights import PackWeights
from speccompile.graphs.passes.rotary_into_gqa import RotaryIntoGqa
from speccompile.graphs.passes.smooth import Smooth, smoothable
from speccompile.graphs.passes.weight_only import WeightOnly


def clean(model: ir.Model) -> None:
    """Drop what nothing reads: identities, repeated subexpressions, dead nodes, unused initializers and opsets."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.IdentityEliminationPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)


def finish_gqa_target(model: ir.Model, one_as_two: bool = False) -> None:
    """Turn a target fresh from `graphs.gqa.trace_gqa` into a graph on the contract, fused for ONNX Runtime. Its
    weights are still as torch keeps them: `FoldWeights` or a quantising pass comes next.

    Args:
        one_as_two: see `DeriveGqaInputs`.
    """
    clean(model)
    CancelLayout()(model)
    FuseParallelMatMuls()(model)
    FuseSilu()(model)
    RotaryIntoGqa()(model)
    common.RemoveUnusedNodesPass()(model)  # the rotation chains still read the parts of the Split
    PackQkv()(model)
    FuseSkipNorm()(model)
    DeriveGqaInputs(one_as_two)(model)
    clean(model)
    common.ClearMetadataAndDocStringPass()(model)


def finish_scatter(model: ir.Model) -> None:
    """Turn a graph fresh from `graphs.scatter.trace_scatter` into one on the contract. Nothing in it is for one backend
    only, and weights stay as torch keeps them: a tied table is stored once, and TensorRT reads it either way."""
    clean(model)
    CancelLayout()(model)
    FuseParallelMatMuls()(model)
    clean(model)
    common.ClearMetadataAndDocStringPass()(model)


def quantise(model: ir.Model) -> None:
    """Weights of a finished drafting graph in int8."""
    PackWeights()(model)
    common.RemoveUnusedNodesPass()(model)


__all__ = [
    "CancelLayout",
    "DeriveGqaInputs",
    "FixCapacity",
    "FoldWeights",
    "ForTensorrt",
    "FuseParallelMatMuls",
    "FuseSilu",
    "FuseSkipNorm",
    "IntegerProducts",
    "PackQkv",
    "PackTables",
    "PackWeights",
    "RotaryIntoGqa",
    "Smooth",
    "WeightOnly",
    "clean",
    "finish_gqa_target",
    "finish_scatter",
    "quantise",
    "smoothable",
]
