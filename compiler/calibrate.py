"""What a target's activations look like, on answers that the model writes itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from speccompile.graphs import contract
from speccompile.runtime.backends.ort import OrtTarget, available_cores

PROMPTS = Path(__file__).with_name("calibration_prompts.txt")
TOKENS = 256  # of each text, its prompt included

Array = npt.NDArray[Any]


def prompts(tokenizer: Any, limit: int = TOKENS // 2) -> list[list[int]]:
    """Token ids of 32 requests, in the chat template where the tokenizer has one."""
    asked = PROMPTS.read_text("utf-8").splitlines()
    if not getattr(tokenizer, "chat_template", None):
        return [tokenizer.encode(text)[:limit] for text in asked]
    chats = [[{"role": "user", "content": text}] for text in asked]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False)[:limit] for text in texts]


def speak(target: OrtTarget, prompts: Sequence[Sequence[int]], tokens: int = TOKENS, seed: int = 0) -> Array:
    """int64 [texts,tokens]: what the model says to these prompts, drawn token by token from its own distribution.

    Such text needs no data, and is what the model meets when it decodes (LLM-QAT, arXiv 2305.17888, calibrates so). All
    texts go on to the last token, also behind an end of text.
    """
    rng = np.random.default_rng(seed)
    texts = len(prompts)
    cache = target.open(tokens, batch=texts)
    spoken, given = np.zeros((texts, tokens), np.int64), np.zeros((texts, tokens), np.bool_)
    for row, prompt in enumerate(prompts):
        known = prompt[:tokens]
        spoken[row, : len(known)], given[row, : len(known)] = known, True
    for place in range(tokens - 1):
        seen = np.ones((texts, 1, 1), np.bool_)
        out = cache.run(spoken[:, place : place + 1], np.full((texts, 1), place), seen, np.zeros(1, np.int64))
        # Adding Gumbel noise to logits and taking the best is a draw from their softmax.
        drawn = (out.logits[:, 0] + rng.gumbel(size=out.logits[:, 0].shape)).argmax(-1)
        spoken[:, place + 1] = np.where(given[:, place + 1], spoken[:, place + 1], drawn)
        cache.commit([0])
    return spoken


class Activations:
    """A target graph that also gives values from its inside.

    Args:
        path: the graph; a file that reads the same weights is written beside it.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        model = ir.load(path)
        values = {value.name: value for node in model.graph for value in node.outputs}
        known = {value.name for value in model.graph.outputs}
        model.graph.outputs.extend(values[name] for name in names if name not in known)
        probe = path.with_name(f"{path.stem}.probe.onnx")
        ir.save(model, probe)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = available_cores()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(probe), options, providers=["CPUExecutionProvider"])
        self.names = list(names)

    def of(self, texts: Iterable[Sequence[int]]) -> Iterator[dict[str, Array]]:
        """For each text the values by name, float32 [tokens,K]."""
        inputs = self._session.get_inputs()
        for text in texts:
            count = len(text)
            feed: dict[str, Array] = {
                contract.INPUT_IDS: np.array([text], np.int64),
                contract.POSITION_IDS: np.arange(count)[None],
                contract.TREE_MASK: np.tri(count, dtype=np.bool_)[None],
                contract.PAST_LENGTH: np.zeros(1, np.int64),
                contract.LOGIT_ROWS: np.array([count - 1]),
            }
            for value in inputs:
                if value.name not in feed:
                    kind = np.float16 if value.type == "tensor(float16)" else np.float32
                    feed[value.name] = np.zeros((1, value.shape[1], count, value.shape[3]), kind)
            found = self._session.run(self.names, feed)
            yield {
                name: array.reshape(-1, array.shape[-1]).astype(np.float32, copy=False)
                for name, array in zip(self.names, found, strict=True)
            }
