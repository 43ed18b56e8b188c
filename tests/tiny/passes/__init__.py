"""Small graphs written by hand, run in ONNX Runtime before and after a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
import onnxruntime

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]

HEADER = '<ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]>'


def graph(text: str, **weights: Array) -> ir.Model:
    """A model from ONNX's text syntax (signature, shapes of inner values, body); `weights` become initializers."""
    proto = onnx.parser.parse_model(HEADER + text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return ir.from_proto(proto)


def run(model: ir.Model, feed: Feed) -> list[Array]:
    """All outputs, from ONNX Runtime without optimisations of its own."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = serialized(model)
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, dict(feed))
    return outputs


def serialized(model: ir.Model) -> bytes:
    data: bytes = ir.serde.serialize_model(model).SerializeToString()
    return data


def apply(rewrite: ir.passes.InPlacePass, model: ir.Model, feeds: Sequence[Feed], atol: float = 2e-6) -> bool:
    """Run the pass; no output may change for any of `feeds`.

    Returns:
        whether the pass says that it modified the model, which must be so.
    """
    before, results = serialized(model), [run(model, feed) for feed in feeds]
    names = [[value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)]
    modified = rewrite(model).modified
    assert modified == (serialized(model) != before), "the pass must say whether it changed anything"
    onnx.checker.check_model(ir.serde.serialize_model(model))
    assert [[value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)] == names
    for feed, wanted in zip(feeds, results, strict=True):
        for got, want in zip(run(model, feed), wanted, strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, atol=atol, rtol=0)
    return modified


def kinds(model: ir.Model) -> dict[str, int]:
    """How many nodes of each operator there are."""
    return dict(Counter(node.op_type for node in model.graph))


def only(model: ir.Model, op_type: str) -> ir.Node:
    """The single node of an operator."""
    (node,) = (node for node in model.graph if node.op_type == op_type)
    return node


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
