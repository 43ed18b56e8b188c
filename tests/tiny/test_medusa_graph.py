"""The heads graph in ONNX Runtime against a float64 computation written from the notes, section 1.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir
import onnxruntime
import pytest
import torch

from speccompile.compiler.medusa_heads import (
    MedusaHeads,
    head_offset,
    read_heads,
    reduce_vocabulary,
    write_heads,
)
from speccompile.graphs import contract
from speccompile.graphs.errors import TraceError
from speccompile.graphs.medusa import MedusaModule, export_medusa

HEADS, HIDDEN, VOCABULARY, TOP_K = 3, 16, 40, 5
Array = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def session_of(model: onnx_ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    data = onnx_ir.serde.serialize_model(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, hidden: Array) -> tuple[Array, Array]:
    ids, logprobs = session.run([contract.TOPK_IDS, contract.TOPK_LOGPROBS], {contract.HIDDEN: hidden})
    return ids, logprobs


def make_heads(layers: int, lm_heads: int, bias: bool = True, seed: int = 0) -> MedusaHeads:
    """Random heads; `lm_heads` 0 for the target's matrix."""
    torch.manual_seed(seed)
    blocks = tuple(
        tuple((torch.randn(HIDDEN, HIDDEN) / 4, torch.randn(HIDDEN) if bias else None) for _ in range(layers))
        for _ in range(HEADS)
    )
    matrices = tuple(torch.randn(VOCABULARY, HIDDEN) for _ in range(lm_heads)) or None
    return MedusaHeads(HIDDEN, blocks, matrices)


def reference(
    heads: MedusaHeads, hidden: Array, target_lm_head: Array, target_bias: Array | None
) -> tuple[Array, Array]:
    """Sorted (target ids, log-probabilities) over the whole draft vocabulary, one head and row at a time."""
    batch, rows, _ = hidden.shape
    draft_ids = np.arange(VOCABULARY) if heads.token_map is None else heads.token_map.numpy()
    ids = np.zeros((batch, rows, HEADS, len(draft_ids)), np.int64)
    logprobs = np.zeros(ids.shape, np.float64)
    for b, r, h in np.ndindex(batch, rows, HEADS):
        y = hidden[b, r].astype(np.float64)
        for weight, block_bias in heads.blocks[h]:
            z = weight.numpy().astype(np.float64) @ y + (0 if block_bias is None else block_bias.numpy())
            y = y + z / (1 + np.exp(-z))
        if heads.lm_heads is None:
            logits = target_lm_head.astype(np.float64) @ y + (0 if target_bias is None else target_bias)
            logits = logits[draft_ids]
        else:
            logits = heads.lm_heads[h if len(heads.lm_heads) > 1 else 0].numpy().astype(np.float64) @ y
        order = np.argsort(-logits, kind="stable")
        ids[b, r, h] = draft_ids[order]
        logprobs[b, r, h] = (logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())[order]
    return ids, logprobs


@pytest.mark.parametrize(
    ("layers", "lm_heads", "mapped"),
    [
        (1, 0, False),
        (1, 0, True),
        (2, 0, True),
        (1, 1, False),
        (2, 1, True),
        (1, HEADS, True),
        (2, HEADS, False),
    ],
)
def test_graph_equals_float64(layers: int, lm_heads: int, mapped: bool) -> None:
    heads = make_heads(layers, lm_heads, bias=(layers, lm_heads) != (2, 1))
    if mapped:
        heads = reduce_vocabulary(heads, VOCABULARY, [39, 2, 30, 4, 17, 21, 8])
    target_lm_head = torch.randn(VOCABULARY, HIDDEN)
    target_bias = torch.randn(VOCABULARY) if layers == 1 else None
    module = MedusaModule(
        heads.blocks,
        heads.lm_heads,
        TOP_K,
        token_map=heads.token_map,
        target_lm_head=target_lm_head,
        target_lm_head_bias=target_bias,
    )
    session = session_of(export_medusa(module))
    for shape in ((1, 1), (1, 4), (3, 2)):
        hidden = np.random.default_rng(sum(shape)).standard_normal((*shape, HIDDEN)).astype(np.float32)
        wanted_ids, wanted = reference(
            heads, hidden, target_lm_head.numpy(), None if target_bias is None else target_bias.numpy()
        )
        ids, logprobs = run(session, hidden)
        assert (str(ids.dtype), str(logprobs.dtype)) == ("int64", "float32")
        np.testing.assert_array_equal(ids, wanted_ids[..., :TOP_K])
        np.testing.assert_allclose(logprobs, wanted[..., :TOP_K], atol=1e-4)
        eager_ids, eager = module(torch.from_numpy(hidden))
        np.testing.assert_array_equal(eager_ids.numpy(), ids)
        np.testing.assert_allclose(eager.numpy(), logprobs, atol=1e-5)


def test_graph_has_the_contract_and_no_wasted_work() -> None:
    """One product for all first blocks, one for the shared lm_head, no transposes, symbolic B and R."""
    heads = make_heads(layers=1, lm_heads=0)
    model = export_medusa(MedusaModule(heads.blocks, None, TOP_K, target_lm_head=torch.randn(VOCABULARY, HIDDEN)))
    assert [(value.name, value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)] == [
        ("hidden", onnx_ir.DataType.FLOAT),
        ("topk_ids", onnx_ir.DataType.INT64),
        ("topk_logprobs", onnx_ir.DataType.FLOAT),
    ]
    hidden_shape, ids_shape = model.graph.inputs[0].shape, model.graph.outputs[0].shape
    assert hidden_shape is not None
    assert ids_shape is not None
    assert hidden_shape[2] == HIDDEN
    assert [ids_shape[2], ids_shape[3]] == [HEADS, TOP_K]
    for shape in (hidden_shape, ids_shape):
        assert all(isinstance(size, onnx_ir.SymbolicDim) for size in (shape[0], shape[1]))
    assert {node.domain for node in model.graph} == {""}
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("MatMul") == 2
    assert "Transpose" not in kinds
    assert len(kinds) <= 20
    two_layers = make_heads(layers=2, lm_heads=HEADS)
    own = export_medusa(MedusaModule(two_layers.blocks, two_layers.lm_heads, TOP_K))
    assert [node.op_type for node in own.graph].count("MatMul") == 3


def test_equal_logits_give_the_lowest_id_first() -> None:
    heads = make_heads(layers=1, lm_heads=0)
    lm_head = torch.randn(VOCABULARY, HIDDEN)
    lm_head[[31, 5, 19, 12]] = 3 * lm_head[31]
    session = session_of(export_medusa(MedusaModule(heads.blocks, None, VOCABULARY, target_lm_head=lm_head)))
    hidden = np.random.default_rng(0).standard_normal((1, 6, HIDDEN)).astype(np.float32)
    ids, logprobs = run(session, hidden)
    assert (np.diff(logprobs, axis=-1) <= 0).all()
    for row in ids.reshape(-1, VOCABULARY):
        assert [int(token) for token in row if token in (5, 12, 19, 31)] == [5, 12, 19, 31]
    np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(-1), 1, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    """SmolLM2's final norm makes logits large; exp of them alone would be infinite in float32."""
    heads = make_heads(layers=1, lm_heads=0)
    lm_head = torch.randn(VOCABULARY, HIDDEN) * 500
    session = session_of(export_medusa(MedusaModule(heads.blocks, None, TOP_K, target_lm_head=lm_head)))
    hidden = np.random.default_rng(0).standard_normal((1, 3, HIDDEN)).astype(np.float32)
    wanted_ids, wanted = reference(heads, hidden, lm_head.numpy(), None)
    ids, logprobs = run(session, hidden)
    assert abs(wanted).max() > 1000
    np.testing.assert_array_equal(ids, wanted_ids[..., :TOP_K])
    np.testing.assert_allclose(logprobs, wanted[..., :TOP_K], rtol=1e-5, atol=0.02)


def test_half_precision_graph_gives_float32_logprobs() -> None:
    heads = make_heads(layers=2, lm_heads=HEADS)
    session = session_of(export_medusa(MedusaModule(heads.blocks, heads.lm_heads, TOP_K).half()))
    hidden = np.random.default_rng(0).standard_normal((2, 3, HIDDEN)).astype(np.float32)
    _, wanted = reference(heads, hidden, np.zeros((VOCABULARY, HIDDEN)), None)
    ids, logprobs = run(session, hidden)
    assert (str(ids.dtype), str(logprobs.dtype)) == ("int64", "float32")
    np.testing.assert_allclose(logprobs, wanted[..., :TOP_K], atol=0.1)


def test_refuses_what_cannot_work() -> None:
    heads = make_heads(layers=1, lm_heads=0)
    with pytest.raises(TraceError, match="no lm_head of their own; pass the target's"):
        MedusaModule(heads.blocks, None, TOP_K)
    lm_head = torch.randn(VOCABULARY, HIDDEN)
    with pytest.raises(TraceError, match="top_k is 41 but the draft vocabulary has 40 tokens"):
        MedusaModule(heads.blocks, None, 41, target_lm_head=lm_head)
    with pytest.raises(TraceError, match="top_k is 5 but the draft vocabulary has 4 tokens"):
        MedusaModule(heads.blocks, None, 5, target_lm_head=lm_head, token_map=torch.arange(4))
    with pytest.raises(TraceError, match="top_k is 0"):
        MedusaModule(heads.blocks, None, 0, target_lm_head=lm_head)


def test_head_offset_on_a_periodic_sequence(tmp_path: Path) -> None:
    """A text that repeats, features that say where in it we are, heads that turn by h+1: all must be right.

    The feature at position t is one-hot in t mod P, the lm_head turns it into token t+1, and head h's block
    adds the feature h+1 places further, with more weight. Eleven heads, so that sorting keys as text shows.
    """
    period, length, count = 13, 100, 11
    tokens = np.random.default_rng(5).permutation(1000)[:period]  # all different
    text = tokens[np.arange(length) % period]
    lm_head = torch.zeros(1000, period)
    for place in range(period):
        lm_head[tokens[(place + 1) % period], place] = 1.0
    blocks = tuple(((2.5 * torch.eye(period).roll(h + 1, dims=0), torch.zeros(period)),) for h in range(count))
    write_heads(MedusaHeads(period, blocks), tmp_path)
    heads = read_heads(tmp_path)
    session = session_of(export_medusa(MedusaModule(heads.blocks, None, 2, target_lm_head=lm_head)))

    hidden = np.eye(period, dtype=np.float32)[np.arange(length) % period][None]
    np.testing.assert_array_equal(text[1:], (hidden[0] @ lm_head.numpy().T).argmax(-1)[:-1])  # t gives t+1
    ids, _ = run(session, hidden)
    for head in range(count):
        guesses = ids[0, :, head, 0]
        for offset, share in (
            (head_offset(head), 1.0),
            (head_offset(head) - 1, 0.0),
            (head_offset(head) + 1, 0.0),
        ):
            assert (guesses[: length - offset] == text[offset:]).mean() == share, (head, offset)
