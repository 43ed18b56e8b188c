"""EAGLE heads: a small transformer drafts from the target's own features (arXiv 2401.15077, 2406.16858, 2503.01840).

At position i a head reads the token t_(i+1) and a feature f_i, and guesses t_(i+2). f_i is the target's where the
target has run, and behind that what the head itself gave out one position before: its recurrent state.

    version 1   f: the target's post-norm hidden state. x = fc(embedding, f), then layers; the target's lm_head reads
    (EAGLE-1/2) their output, which is also the state.
    version 3   f = fc(residual streams that enter some of the target's layers); the first layer's attention reads
                (embedding, f), its residual is f. The head has a norm and an lm_head, often over fewer tokens.

Ours, for targets of a hundred million parameters, where one layer knows too little: a version 1 head may read tokens
alone in its first layers (the trunk, which can start as a trained draft model) and let the features join behind them,
and the features may be fused from several streams, as in version 3.

Layouts, and the file each rule comes from: notes in `compiler.eagle_layouts`. The network is SafeAILab/EAGLE's
`eagle/model/cnets1.py` and `cnets.py`, with the norms that HASS, vllm-project/speculators and NVIDIA ModelOpt add.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

FUSION_NORMS = ("none", "whole", "each")


@dataclass(frozen=True)
class EagleForm:
    """How a head is put together, beyond its sizes.

    Args:
        version: 1 (EAGLE-1 and EAGLE-2, whose heads are the same) or 3.
        taps: the target layers whose incoming residual stream is read; the number of layers stands for what leaves the
            last. Version 1 may have none: it then reads the post-norm hidden state.
        join: version 1: layers before the features join; 0 in every public head.
        fusion_norm: before the streams are fused: "none", "whole" (one norm over all streams) or "each" (one for each).
        norm_before_residual: version 3: the first layer's residual is the normed feature.
        norm_output: version 3: the state passed on is the normed one.
        embedding_norm, feature_norm: version 1: on what `fc` reads.
        input_norm: version 1: the first layer has an input norm, as an ordinary layer has.
        output_norm: version 1: a norm before the lm_head. The state passed on is not normed.
        query_norm: attention norms its queries and keys (Qwen3).
    """

    version: int
    taps: tuple[int, ...] = ()
    join: int = 0
    fusion_norm: str = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    embedding_norm: bool = False
    feature_norm: bool = False
    input_norm: bool = False
    output_norm: bool = False
    query_norm: bool = False


class Fusion(nn.Module):
    """Streams [B,T,target width] -> features [B,T,H]: one each where a target has `form.taps`."""

    def __init__(self, streams: int, target_width: int, width: int, norm: str, epsilon: float) -> None:
        super().__init__()
        self.fc = nn.Linear(streams * target_width, width, bias=False)
        self.input_norm = LlamaRMSNorm(streams * target_width, epsilon) if norm == "whole" else nn.Identity()
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(target_width, epsilon) if norm == "each" else nn.Identity() for _ in range(streams)
        )

    def forward(self, streams: Sequence[Tensor]) -> Tensor:
        normed = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
        features: Tensor = self.fc(self.input_norm(torch.cat(normed, -1)))
        return features


class EagleLayer(nn.Module):
    """One decoder layer; the `first` of a version 3 head reads embedding and feature side by side."""

    def __init__(self, config: Any, form: EagleForm, index: int) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = (Qwen3Attention if form.query_norm else LlamaAttention)(config, index)
        self.mlp = LlamaMLP(config)
        self.wide = form.version == 3 and index == 0
        self.residual_normed = form.norm_before_residual
        plain = form.version == 1 and index == 0 and not form.input_norm
        self.input_layernorm = nn.Identity() if plain else LlamaRMSNorm(width, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(width, epsilon)
        if self.wide:
            self.hidden_norm = LlamaRMSNorm(width, epsilon)
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.self_attn, name)
                setattr(self.self_attn, name, nn.Linear(2 * width, old.out_features, old.bias is not None))

    def forward(self, state: Tensor, embeddings: Tensor, rotary: Any, **options: Any) -> Tensor:
        if self.wide:
            normed = self.hidden_norm(state)
            read = torch.cat((self.input_layernorm(embeddings), normed), -1)
            state = normed if self.residual_normed else state
        else:
            read = self.input_layernorm(state)
        state = state + self.self_attn(hidden_states=read, position_embeddings=rotary, **options)[0]
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class EagleModel(LlamaPreTrainedModel):
    """A head, float32. Its `fusion` (version 3) belongs into the target's graph.

    Args:
        config: a LlamaConfig (Qwen3Config with query norms) of the head's own sizes and rope; `vocab_size` is the
            embedding's.
        form: see `EagleForm`.
        target_width: of one of the target's streams.
        draft_vocabulary: rows of the lm_head.
        biases: names of the linear modules that have one.
    """

    def __init__(
        self, config: Any, form: EagleForm, target_width: int, draft_vocabulary: int, biases: Collection[str] = ()
    ) -> None:
        super().__init__(config)
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.form = form
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if form.taps:
            self.fusion = Fusion(len(form.taps), target_width, width, form.fusion_norm, epsilon)
        if form.version == 1:
            self.embedding_norm = LlamaRMSNorm(width, epsilon) if form.embedding_norm else nn.Identity()
            self.feature_norm = LlamaRMSNorm(width, epsilon) if form.feature_norm else nn.Identity()
            self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config, form, index) for index in range(config.num_hidden_layers))
        normed = form.version == 3 or form.output_norm
        self.norm = LlamaRMSNorm(width, epsilon) if normed else nn.Identity()
        self.lm_head = nn.Linear(width, draft_vocabulary, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        for name in biases:
            module = self.get_submodule(name)
            module.bias = nn.Parameter(torch.zeros(module.out_features))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    @property
    def feature_width(self) -> int:
        """Width of the features and of the state."""
        return int(self.config.hidden_size)

    def features(self, streams: Sequence[Tensor]) -> Tensor:
        """What a head reads of the target: `streams` are those of `form.taps`, or the post-norm hidden state alone."""
        if not self.form.taps:
            return streams[0]
        fused: Tensor = self.fusion(streams)
        return fused

    def read(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """What the layers before the features make of the tokens [B,T,H] (embeddings, but for a trunk), and the rotary
        tables."""
        state = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(state, position_ids)
        for layer in self.layers[: self.form.join]:
            state = layer(state, state, rotary, **options)
        return state, rotary

    def advance(self, words: Tensor, features: Tensor, rotary: Any, **options: Any) -> Tensor:
        """What `read` made of the tokens, and the features [B,T,H] one position before them -> what the last layer
        gives."""
        state = features
        if self.form.version == 1:
            state = self.fc(torch.cat((self.embedding_norm(words), self.feature_norm(features)), -1))
        for layer in self.layers[self.form.join :]:
            state = layer(state, words, rotary, **options)
        return state

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutput:
        """Logits [B,T,Vd], and as `hidden_states` the state passed on [B,T,H].

        Args:
            features: [B,T,H], of one position before each token; None stands for zeros (shapes are all that a survey
                wants).
        """
        if features is None:
            features = self.embed_tokens.weight.new_zeros(*input_ids.shape, self.feature_width)
        words, rotary = self.read(input_ids, position_ids, attention_mask=attention_mask)
        state = self.advance(words, features, rotary, attention_mask=attention_mask)
        normed = self.norm(state)
        passed_on = normed if self.form.norm_output else state
        return CausalLMOutput(logits=self.lm_head(normed), hidden_states=(passed_on,))
