"""EAGLE heads in numpy, float64, written from the reference notes (sections 2.1, 2.2 and 2.4), not from our module.

What version 1 heads have of our own (fused features, layers before the features join) follows the prose of
`graphs.eagle`.

Weights go by names of this file's own; each layout's names are given to them by the tests that write checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceHead:
    """A head's numbers, and how they are put together.

    Args:
        version: 1 or 3.
        weights: "embedding", "fc", "lm_head", per layer "0.q" ... (see `random_weights`), biases as "NAME.bias"; in
            version 1 "fusion" makes features of several streams.
        token_ids: target id of each lm_head row.
        rope_divisor: positions are divided by it (linear scaling).
        normed_residual, normed_state: norm_before_residual and norm_output of version 3.
        join: layers of version 1 that read tokens alone.
        feature_first: a deliberate mistake: the feature before the embedding.
        skip: deliberate mistakes: norms and biases left out.
    """

    version: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    weights: dict[str, Array]
    token_ids: NDArray[np.int64]
    epsilon: float = 1e-6
    theta: float = 10000.0
    rope_divisor: float = 1.0
    normed_residual: bool = False
    normed_state: bool = False
    join: int = 0
    feature_first: bool = False
    skip: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return name in self.weights and name not in self.skip

    # -- pieces --

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.weights[name].T
        return y + self.weights[f"{name}.bias"] if self.has(f"{name}.bias") else y

    def norm(self, name: str, x: Array) -> Array:
        """RMSNorm, where the head has it."""
        if not self.has(name):
            return x
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.epsilon) * self.weights[name]

    def rotate(self, x: Array, positions: Array) -> Array:
        """Rope on [heads,T,head_dim]: channel i turns with channel i + head_dim / 2."""
        half = self.head_dim // 2
        speeds = self.theta ** (-2 * np.arange(half) / self.head_dim)
        angles = positions[:, None] / self.rope_divisor * speeds
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1)

    def attend(self, layer: int, x: Array, positions: Array) -> Array:
        """Causal grouped-query attention over x [T,...]."""

        def split(name: str, count: int) -> Array:
            return self.linear(f"{layer}.{name}", x).reshape(len(x), count, self.head_dim).transpose(1, 0, 2)

        queries = self.norm(f"{layer}.q_norm", split("q", self.heads))
        keys = self.norm(f"{layer}.k_norm", split("k", self.kv_heads))
        values = split("v", self.kv_heads)
        queries, keys = self.rotate(queries, positions), self.rotate(keys, positions)
        visible = np.tril(np.ones((len(x), len(x)), bool))
        out = np.empty_like(queries)
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = np.where(visible, queries[head] @ keys[group].T / np.sqrt(self.head_dim), -np.inf)
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            out[head] = chances / chances.sum(-1, keepdims=True) @ values[group]
        return self.linear(f"{layer}.o", out.transpose(1, 0, 2).reshape(len(x), -1))

    def mlp(self, layer: int, x: Array) -> Array:
        gate = self.linear(f"{layer}.gate", x)
        return self.linear(f"{layer}.down", gate / (1 + np.exp(-gate)) * self.linear(f"{layer}.up", x))

    # -- the head --

    def features(self, streams: Sequence[Array]) -> Array:
        """Version 1: the post-norm hidden state. Version 3, and ours: the captured streams side by side, through fc."""
        if self.version == 1 and not self.has("fusion"):
            return streams[-1]
        normed = [self.norm(f"fc_norm.{index}", stream) for index, stream in enumerate(streams)]
        name = "fusion" if self.version == 1 else "fc"
        return self.linear(name, self.norm("input_norm", np.concatenate(normed, -1)))

    def layer(self, layer: int, read: Array, residual: Array, positions: Array) -> Array:
        """What attention reads and what it is added to -> what leaves the layer."""
        state = residual + self.attend(layer, read, positions)
        return state + self.mlp(layer, self.norm(f"{layer}.post", state))

    def run(self, tokens: Sequence[int], features: Array, positions: Array) -> tuple[Array, Array]:
        """Tokens t_(i+1) and features f_i -> state passed on [T,H] and logits [T,Vd]."""
        words = self.weights["embedding"][list(tokens)]
        for layer in range(self.join):
            words = self.layer(layer, self.norm(f"{layer}.input", words), words, positions)
        if self.version == 1:
            pair = (self.norm("embedding_norm", words), self.norm("feature_norm", features))
            state = self.linear("fc", np.concatenate(pair[::-1] if self.feature_first else pair, -1))
        else:
            state = features
        for layer in range(self.join, self.layers):
            if self.version == 3 and layer == 0:
                normed = self.norm("0.hidden", state)
                pair = (self.norm("0.input", words), normed)
                read = np.concatenate(pair[::-1] if self.feature_first else pair, -1)
                residual = normed if self.normed_residual else state
            else:
                read, residual = self.norm(f"{layer}.input", state), state
            state = self.layer(layer, read, residual, positions)
        normed = self.norm("norm", state)
        return normed if self.normed_state else state, self.linear("lm_head", normed)

    def follow(self, tokens: Sequence[int], features: Array, path: Sequence[int]) -> tuple[Array, Array]:
        """State passed on [H] and logits [Vd] behind `tokens` and `path`, whose features are the head's own states."""
        for count in range(len(path) + 1):
            fed = [*tokens, *path[:count]]
            state, logits = self.run(fed, features, np.arange(len(fed), dtype=np.float64))
            features = np.concatenate((features, state[-1:]))
        return state[-1], logits[-1]

    def draft(self, tokens: Sequence[int], streams: Sequence[Array], steps: int) -> tuple[list[int], Array, Array]:
        """The prompt t_1 .. t_n with the target's streams at 0 .. n-1, then `steps` tokens of its own.

        Returns:
            tokens drafted, and state and logits of all rows of the last run.
        """
        fed, features = list(tokens), self.features(streams)
        for step in range(steps + 1):
            state, logits = self.run(fed, features, np.arange(len(fed), dtype=np.float64))
            if step < steps:
                fed.append(int(self.token_ids[logits[-1].argmax()]))
                features = np.concatenate((features, state[-1:]))
        return fed[len(tokens) :], state, logits


def random_weights(
    rng: np.random.Generator,
    version: int,
    width: int,
    target_width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    vocabulary: int,
    rows: int,
    layers: int = 1,
    extra: Sequence[str] = (),
    streams: int | None = None,
) -> dict[str, Array]:
    """Weights of a plain head, rounded to fp16 so that files hold them exactly.

    Args:
        extra: norms and biases besides: names of this file.
        streams: how many are fused; of version 1 None for heads that read the post-norm hidden state.
    """
    fused = (streams or 3) * target_width
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocabulary, width),
        "fc": (width, 2 * width if version == 1 else fused),
        "lm_head": (rows, width),
    }
    if version == 3:
        shapes["norm"] = (width,)
    elif streams:
        shapes["fusion"] = (width, fused)
    for layer in range(layers):
        wide = 2 * width if version == 3 and layer == 0 else width
        shapes |= {
            f"{layer}.q": (heads * head_dim, wide),
            f"{layer}.k": (kv_heads * head_dim, wide),
            f"{layer}.v": (kv_heads * head_dim, wide),
            f"{layer}.o": (width, heads * head_dim),
            f"{layer}.gate": (inner, width),
            f"{layer}.up": (inner, width),
            f"{layer}.down": (width, inner),
            f"{layer}.post": (width,),
        }
        if version == 3 or layer:
            shapes[f"{layer}.input"] = (width,)
        if version == 3 and not layer:
            shapes["0.hidden"] = (width,)
    for name in extra:
        if name.endswith(".bias"):
            shapes[name] = shapes[name.removesuffix(".bias")][:1]
        else:
            own = {"input_norm": fused, "0.q_norm": head_dim, "0.k_norm": head_dim}
            shapes[name] = (own.get(name, target_width if name.startswith("fc_norm") else width),)
    weights = {}
    for name, shape in shapes.items():
        # An embedding as large as what it meets, and matrices that keep the size of what they read.
        scale = 1.0 if name == "embedding" else 0.3 if len(shape) == 1 else 1 / np.sqrt(shape[-1])
        value = rng.normal(0, scale, shape)
        if len(shape) == 1 and not name.endswith(".bias"):
            value += 1
        weights[name] = value.astype(np.float16).astype(np.float64)
    return weights
