"""Medusa heads as one graph: a hidden state in, the best tokens of every head out.

    hidden [B,R,H]  ->  topk_ids int64 [B,R,heads,K] (target ids), topk_logprobs float32 [B,R,heads,K]

Each head is residual blocks `y = x + SiLU(W x + b)`, then a matrix to the vocabulary (FasterDecoding/Medusa
`medusa/model/medusa_model.py`). `hidden` is the target's state after its final norm; head h at position t
predicts token t+2+h. Candidates are sorted, best first; of equal logits the lower draft id comes first (so
says the ONNX definition of TopK; eager torch.topk promises no order).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir
import torch
from torch.nn.functional import silu

from speccompile.graphs import contract
from speccompile.graphs.errors import TraceError
from speccompile.graphs.target import quiet_exporter

Block = tuple[torch.Tensor, torch.Tensor | None]


class MedusaModule(torch.nn.Module):
    """All heads at once, in the weights' dtype; `hidden` and log-probabilities are float32 whatever that is.

    Decoding runs one row, so the cost is reading weights, each once: the heads' first blocks read the same
    row and are one [H, heads*H] product, and heads that share an lm_head meet in one [heads, H] x [H, Vd]
    product. Weights are stored transposed, so that no step has to.

    Args:
        blocks: per head, its residual blocks as (weight [H,H], bias [H] or None).
        lm_heads: [Vd,H], one per head, or one that all heads share; None to use `target_lm_head`.
        top_k: K, candidates per head.
        token_map: int64 [Vd], draft id -> target id; None when they are the same.
        target_lm_head: [V,H], read when `lm_heads` is None; with `token_map`, only the rows it names.
        target_lm_head_bias: [V], likewise.
        logit_scale: factor on the logits before the softmax: ranks stay, log-probabilities become as sure of
            themselves as they were in training.

    Raises:
        TraceError: when there is no lm_head at all, or fewer than K draft tokens.
    """

    first_weight: torch.Tensor  # [H, heads*H]
    first_bias: torch.Tensor | None  # [heads*H]
    lm_head: torch.Tensor  # [H,Vd] shared, [heads,1,H,Vd] one per head
    lm_head_bias: torch.Tensor | None  # [Vd]
    token_map: torch.Tensor | None  # [Vd]

    def __init__(
        self,
        blocks: Sequence[Sequence[Block]],
        lm_heads: Sequence[torch.Tensor] | None,
        top_k: int,
        *,
        token_map: torch.Tensor | None = None,
        target_lm_head: torch.Tensor | None = None,
        target_lm_head_bias: torch.Tensor | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.logit_scale = logit_scale
        self.heads, self.layers, self.top_k = len(blocks), len(blocks[0]), top_k
        self.hidden_size = blocks[0][0][0].shape[0]
        lm_head_bias = None
        if lm_heads is None:
            if target_lm_head is None:
                raise TraceError("medusa: the heads have no lm_head of their own; pass the target's.")
            rows = slice(None) if token_map is None else token_map
            lm_heads = (target_lm_head[rows],)
            lm_head_bias = None if target_lm_head_bias is None else target_lm_head_bias[rows]
        if not 1 <= top_k <= len(lm_heads[0]):
            raise TraceError(
                f"medusa: top_k is {top_k} but the draft vocabulary has {len(lm_heads[0])} tokens; use 1 to "
                f"{len(lm_heads[0])}."
            )
        weights, biases = zip(*(_stack(blocks, layer) for layer in range(self.layers)), strict=True)
        self._add("first_weight", torch.cat(list(weights[0][:, 0]), dim=1))
        self._add("first_bias", None if biases[0] is None else biases[0].flatten())
        for layer in range(1, self.layers):
            self._add(f"weight_{layer}", weights[layer])
            self._add(f"bias_{layer}", biases[layer])
        matrices = [matrix.T for matrix in lm_heads]
        self._add("lm_head", matrices[0] if len(matrices) == 1 else torch.stack(matrices)[:, None])
        self._add("lm_head_bias", lm_head_bias)
        self._add("token_map", token_map)

    def _add(self, name: str, tensor: torch.Tensor | None) -> None:
        self.register_buffer(name, None if tensor is None else tensor.detach().contiguous())

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.to(self.first_weight.dtype)
        first = _affine(hidden @ self.first_weight, self.first_bias)  # [B,R,heads*H]
        first = first.unflatten(-1, (self.heads, self.hidden_size))
        states = hidden.unsqueeze(2) + silu(first)  # [B,R,heads,H]
        for layer in range(1, self.layers):
            product = _per_head(states, self.get_buffer(f"weight_{layer}"))
            states = states + silu(_affine(product, getattr(self, f"bias_{layer}")))
        shared = self.lm_head.dim() == 2
        logits = states @ self.lm_head if shared else _per_head(states, self.lm_head)  # [B,R,heads,Vd]
        logits = _affine(logits, self.lm_head_bias).float()
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        best, ids = logits.topk(self.top_k, dim=-1)
        # log_softmax of the K best alone; the largest logit is at hand and keeps the sum finite.
        largest = best[..., :1]
        log_sum = largest + (logits - largest).exp().sum(-1, keepdim=True).log()
        return ids if self.token_map is None else self.token_map[ids], best - log_sum


def _stack(blocks: Sequence[Sequence[Block]], layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One layer of all heads: transposed weights [heads,1,H,H] and biases [heads,H], None without any."""
    weights = torch.stack([head[layer][0].T for head in blocks])[:, None]
    biases = [bias for head in blocks if (bias := head[layer][1]) is not None]
    return weights, torch.stack(biases) if biases else None


def _per_head(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[B,R,heads,X] times each head's own [X,Y], given as [heads,1,X,Y]: [B,R,heads,Y]."""
    return (states.movedim(2, 0) @ weights).movedim(0, 2)


def _affine(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product + bias


def export_medusa(module: MedusaModule) -> onnx_ir.Model:
    """Trace the heads to ONNX with standard operators, B and R dynamic, names as in the contract.

    The graph computes in the module's dtype (`module.half()` for fp16).
    """
    # Sizes 0 and 1 would be taken for constants.
    hidden = torch.zeros(2, 3, module.hidden_size)
    with quiet_exporter():
        program = torch.onnx.export(
            module.eval(),
            (hidden,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("B"), 1: torch.export.Dim("R")},),
            input_names=[contract.HIDDEN],
            output_names=[contract.TOPK_IDS, contract.TOPK_LOGPROBS],
            verbose=False,
        )
    assert program is not None, "torch.onnx.export returns a program when dynamo=True"
    return program.model
