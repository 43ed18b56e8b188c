"""TensorRT's flavour of a graph, run: its own operator gets a body of standard ones, written from its documentation.

TensorRT executes nothing without a GPU. What the passes rewrite can still be held against the graph they rewrote.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from speccompile.compiler.engine import prepare
from speccompile.graphs import contract
from speccompile.graphs.passes import finish_scatter
from speccompile.graphs.passes.for_tensorrt import ATTENTION, DOMAIN
from speccompile.graphs.scatter import cast_model, trace_scatter
from speccompile.graphs.target import TargetTail, survey
from speccompile.graphs.tree import TokenTree
from tests.tiny.models import VOCAB, tiny_model

CAPACITY = 32


def attention_body() -> onnx.FunctionProto:
    """TRT_Attention: queries come scaled; keys at and behind `kv_lengths` are not read; the mask is added."""
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[1, 2, 3]),
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Constant", [], ["first"], value_ints=[0]),
        helper.make_node("Shape", ["k"], ["capacity"], start=2, end=3),
        helper.make_node("Squeeze", ["capacity", "first"], ["end"]),
        helper.make_node("Range", ["zero", "end", "one"], ["slots"]),
        helper.make_node("Cast", ["kv_lengths"], ["long"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["long", "axes"], ["lengths"]),
        helper.make_node("Less", ["slots", "lengths"], ["used"]),
        helper.make_node("Constant", [], ["nothing"], value=helper.make_tensor("", TensorProto.FLOAT, [], [-1e30])),
        helper.make_node("CastLike", ["nothing", "mask"], ["never"]),
        helper.make_node("Where", ["used", "mask", "never"], ["limited"]),
        helper.make_node("Attention", ["q", "k", "v", "limited"], ["out"], scale=1.0),
    ]
    return helper.make_function(
        DOMAIN,
        ATTENTION,
        ["q", "k", "v", "mask", "query_lengths", "kv_lengths"],
        ["out"],
        nodes,
        [helper.make_opsetid("", 24)],
        attributes=["causal_kind", "TRT_decomposable"],
    )


def run(path: Path, feed: dict[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.float32]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    logits: npt.NDArray[np.float32] = session.run([contract.LOGITS], feed)[0]
    return logits


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "mistral-window", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_flavour_computes_what_the_graph_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny_model(name)
    found = survey(model, 128)
    graph = trace_scatter(cast_model(model, dtype), found, TargetTail(False))
    finish_scatter(graph)
    ir.save(graph, tmp_path / "scatter.onnx")
    ir.save(prepare(tmp_path / "scatter.onnx", CAPACITY), tmp_path / "flavoured.onnx")
    flavoured = onnx.load(tmp_path / "flavoured.onnx")
    kinds = [node.op_type for node in flavoured.graph.node]
    assert kinds.count("Attention") == 0 and kinds.count(ATTENTION) == (0 if name == "gemma2" else 3)
    if name != "gemma2":
        flavoured.functions.append(attention_body())
    onnx.save(flavoured, tmp_path / "runnable.onnx")

    rng = np.random.default_rng(0)
    tree, lengths = TokenTree((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0)), np.array([9, 3])
    kind = np.float16 if dtype == torch.float16 else np.float32
    shape = (2, found.layers[0].kv_heads, CAPACITY, found.layers[0].head_dim)
    feed: dict[str, npt.NDArray[np.generic]] = {
        contract.INPUT_IDS: rng.integers(3, VOCAB, (2, len(tree))),
        contract.POSITION_IDS: lengths[:, None] + tree.depths,
        contract.TREE_MASK: np.stack([tree.mask] * 2),
        contract.PAST_LENGTH: lengths,
        contract.LOGIT_ROWS: np.arange(len(tree)),
        **{past: rng.standard_normal(shape).astype(kind) for past in contract.past_names(3)},
    }
    want, got = run(tmp_path / "scatter.onnx", feed), run(tmp_path / "runnable.onnx", feed)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max(), rtol=0)

    for past in contract.past_names(3):  # what lies behind a text must not matter
        feed[past][0, :, 9 + len(tree) :] = 7
        feed[past][1, :, 3 + len(tree) :] = 7
    np.testing.assert_array_equal(run(tmp_path / "runnable.onnx", feed), got)
