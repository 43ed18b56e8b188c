"""All passes in their order on a freshly traced model: what is left of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from speccompile.graphs import contract
from speccompile.graphs.errors import TraceError
from speccompile.graphs.gqa import trace_gqa
from speccompile.graphs.passes import FoldWeights, clean, finish_gqa_target
from speccompile.graphs.target import TargetTail, survey
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import OrtTarget
from tests.tiny.models import BASE, tiny_model
from tests.tiny.passes import kinds

LAYERS, POSITIONS = 2, 128


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_llama_comes_down_to_its_products_and_kernels(name: str) -> None:
    model = tiny_model(name, num_hidden_layers=LAYERS)
    graph = trace_gqa(model, survey(model, POSITIONS), TargetTail(True))
    clean(graph)
    traced = len(list(graph.graph))
    finish_gqa_target(graph)
    FoldWeights()(graph)
    clean(graph)
    counts = kinds(graph)
    tied = name == "llama-tied"
    # Per layer: packed QKV, attention's output, gate and up, down.
    assert counts["MatMul"] == 4 * LAYERS + 1
    assert counts["GroupQueryAttention"] == LAYERS
    assert counts["SkipSimplifiedLayerNormalization"] == 2 * LAYERS
    assert counts["RMSNormalization"] == 1  # the first one has no residual before it
    assert counts["Split"] == LAYERS  # gate and up
    assert counts.get("Add", 0) == (4 * LAYERS if tied else 0) + 2  # biases, and two for the lengths
    assert not {"Transpose", "RotaryEmbedding", "Identity", "Constant"} & set(counts)
    assert len(list(graph.graph)) < 0.6 * traced
    for node in graph.graph:
        if node.op_type == "GroupQueryAttention":
            assert list(node.inputs[1:3]) == [None, None]
            assert node.attributes["do_rotary"].as_int() == 1
    assert [value.name for value in graph.graph.inputs] == [*contract.TARGET_INPUTS, *contract.past_names(LAYERS)]
    outputs = [contract.NEXT_IDS, contract.LOGITS, contract.HIDDEN, *contract.present_names(LAYERS)]
    assert [value.name for value in graph.graph.outputs] == outputs
    # No weight is lost, and none stored twice but a tied table; cos and sin count once.
    stored = sum(value.const_value.size for value in graph.graph.initializers.values() if value.const_value is not None)
    wanted = sum(parameter.numel() for parameter in model.parameters()) + (POSITIONS + 1) * BASE["head_dim"]
    wanted += tied * model.get_input_embeddings().weight.numel()
    assert wanted <= stored <= wanted + 100  # and small constants


def test_heads_that_only_the_separate_rotary_operator_takes(tmp_path: Path) -> None:
    """24 channels a head: attention takes them, but not their tables of 12."""
    model = tiny_model("llama", num_hidden_layers=1, head_dim=24)
    graph = trace_gqa(model, survey(model, POSITIONS), TargetTail(False))
    finish_gqa_target(graph)
    assert kinds(graph)["RotaryEmbedding"] == 2
    ir.save(graph, tmp_path / "target.onnx")
    chain, ids = TokenTree.chain(6), np.arange(5, 12)
    cache = OrtTarget(tmp_path / "target.onnx", threads=1).open(16)
    logits = cache.run(ids, chain.depths, chain.mask, chain.nodes).logits[0]
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


def test_heads_that_attention_does_not_take_are_refused_by_name() -> None:
    model = tiny_model("llama", num_hidden_layers=1, head_dim=20)
    with pytest.raises(TraceError, match="LlamaForCausalLM: heads have 20 channels"):
        trace_gqa(model, survey(model, POSITIONS), TargetTail(False))
