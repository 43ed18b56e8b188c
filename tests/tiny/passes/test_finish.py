"""All passes in their order on a freshly traced model: what is left of it."""

from __future__ import annotations

import pytest

from speccompile.graphs import contract
from speccompile.graphs.passes import clean, finish_gqa_target
from speccompile.graphs.target import survey, trace_gqa
from tests.tiny.models import BASE, tiny_model
from tests.tiny.passes import kinds, only

LAYERS, POSITIONS = 2, 128


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_llama_comes_down_to_its_products_and_kernels(name: str) -> None:
    model = tiny_model(name, num_hidden_layers=LAYERS)
    graph = trace_gqa(model, survey(model, POSITIONS), with_hidden=True)
    clean(graph)
    traced = len(list(graph.graph))
    finish_gqa_target(graph)
    counts = kinds(graph)
    tied = name == "llama-tied"
    # Per layer: packed QKV, attention's output, gate and up, down.
    assert counts["MatMul"] == 4 * LAYERS + (not tied)
    assert counts.get("Gemm", 0) == tied
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
    # No weight is lost, and none stored twice: a tied table counts once, and so do cos and sin.
    stored = sum(value.const_value.size for value in graph.graph.initializers.values() if value.const_value is not None)
    wanted = sum(parameter.numel() for parameter in model.parameters()) + POSITIONS * BASE["head_dim"]
    assert wanted <= stored <= wanted + 100  # and small constants
    if tied:
        embedding = next(node for node in graph.graph if node.op_type == "Gather")
        assert embedding.inputs[0] is only(graph, "Gemm").inputs[1]
