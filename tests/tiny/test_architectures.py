"""Every supported architecture: tree logits equal eager transformers path by path, and commits keep it so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from speccompile.graphs.gqa import trace_gqa
from speccompile.graphs.passes import finish_gqa_target
from speccompile.graphs.target import TargetTail, survey
from speccompile.graphs.tree import TokenTree
from speccompile.runtime.backends.ort import OrtTarget
from tests.tiny.models import ARCHITECTURES, PARENTS, VOCAB, tiny_model

PROMPT = 11  # longer than the window of the sliding models
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tree_and_commit_equal_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tiny_model(name)
    graph = trace_gqa(model, survey(model, 128), TargetTail(True))
    finish_gqa_target(graph)
    ir.save(graph, tmp_path / "target.onnx")
    cache = OrtTarget(tmp_path / "target.onnx", threads=1).open(64)

    prompt = torch.randint(3, VOCAB, (PROMPT,))
    tree = TokenTree(PARENTS, (0, 0, 1, 0, 0, 0))
    tokens = torch.randint(3, VOCAB, (len(tree),))

    def eager(ids: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=ids[None]).logits[0, -1].float().numpy()

    def run(ids: torch.Tensor, shape: TokenTree) -> np.ndarray:
        rows = np.arange(len(ids))
        return cache.run(ids.numpy(), cache.length + shape.depths, shape.mask, rows).logits[0]

    logits = run(prompt, TokenTree.chain(PROMPT - 1))
    np.testing.assert_allclose(logits[-1], eager(prompt), atol=TOLERANCE, rtol=0)
    cache.commit(range(PROMPT))

    logits = run(tokens, tree).copy()
    for node in range(len(tree)):
        path = tree.ancestry(node)
        np.testing.assert_allclose(logits[node], eager(torch.cat([prompt, tokens[path]])), atol=TOLERANCE, rtol=0)
        assert (
            logits[node].argmax()
            == cache.run(tokens.numpy(), cache.length + tree.depths, tree.mask, np.arange(len(tree))).next_ids[0, node]
        )

    for depth in range(tree.max_depth + 1):  # level by level: each node runs once, behind the levels before it
        level = np.flatnonzero(tree.depths == depth)
        ids, positions = tokens.numpy()[level], cache.length + tree.depths[level]
        out = cache.run(ids, positions, tree.mask[level, : level[-1] + 1], np.arange(len(level))).logits[0]
        np.testing.assert_allclose(out, logits[level], atol=TOLERANCE, rtol=0, err_msg=f"level {depth}")

    accepted = tree.ancestry(5)
    assert accepted != list(range(len(accepted)))
    cache.commit(accepted)
    text = torch.cat([prompt, tokens[accepted]])
    for step in range(3):
        following = torch.randint(3, VOCAB, (1,))
        text = torch.cat([text, following])
        logits = run(following, TokenTree.chain(0))
        np.testing.assert_allclose(logits[0], eager(text), atol=TOLERANCE, rtol=0, err_msg=f"step {step}")
        cache.commit([0])
