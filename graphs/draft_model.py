"""What a draft model's graph gives: its best tokens under the names of the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speccompile.graphs import contract
from speccompile.graphs.target import Tail


class DraftTail(Tail):
    """The tail of what drafts; its logits [B,R,Vd] may speak of fewer tokens than the target knows.

    Args:
        token_ids: int64 [Vd], the target's id of each logit; None when they are the same numbers.
        top_k: best tokens to name; at most Vd.
        with_state: whether the graph also gives the state that an EAGLE head passes on.
    """

    token_ids: Tensor | None

    def __init__(self, token_ids: Tensor | None, top_k: int, with_state: bool = False) -> None:
        outputs = [contract.NEXT_IDS, contract.LOGITS, contract.TOPK_IDS, contract.TOPK_LOGPROBS]
        super().__init__(outputs + [contract.HIDDEN] * with_state)
        self.register_buffer("token_ids", token_ids)
        self.top_k = top_k

    def forward(self, logits: Tensor, streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """logits float32 [B,R,Vd] -> best ids int64 [B,R], logits, topk_ids int64 [B,R,K], topk_logprobs [B,R,K], and
        the state float32 [B,T,F]."""
        best, ids = torch.topk(logits, self.top_k)
        logprobs = best - torch.logsumexp(logits, -1, keepdim=True)
        if self.token_ids is not None:
            ids = self.token_ids[ids]
        return (ids[..., 0], logits, ids, logprobs, streams[0])[: len(self.outputs)]
