"""Other programs on the same prompts. They get token ids and the same number of threads, and keep no statistics of
ours; what else they do is their default.

Modules are parameters, so that their adapters can be tested without them; `module` imports one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from speccompile.graphs.errors import SpecCompileError
from speccompile.runtime.backends import ort
from speccompile.runtime.text import Text
from speccompile.tools.bench.contestants import Asked, Contestant, Reply

LOOKED_UP_TOKENS = 10
"""Tokens that transformers' prompt lookup drafts; the number in its documentation."""


def module(name: str, option: str) -> Any:
    """Import a package of the [bench] extra.

    Raises:
        SpecCompileError: when it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SpecCompileError(
            f"{option}: the package '{error.name}' is not installed; install it with pip install 'speccompile[bench]'."
        ) from error


def transformers_contestants(
    model: Path, asked: Asked, threads: int | None, assistant: Path | None = None, lookup: bool = False
) -> Iterator[Contestant]:
    """transformers' own `generate` in float32, with its default attention: plainly, with the draft model `assistant`,
    and with prompt lookup.

    Raises:
        CheckpointError: when a model cannot be read.
    """
    import torch
    from transformers import GenerationConfig

    from speccompile.compiler.checkpoint import read_model

    torch.set_num_threads(threads or ort.available_cores())
    source = read_model(model)
    # A checkpoint's own generation config fills what is left open here, such as Llama's temperature.
    drawing = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=asked.max_new_tokens,
        eos_token_id=list(source.eos_ids),
        pad_token_id=source.eos_ids[0],
        **(drawing if asked.temperature else {"do_sample": False}),
    )

    def contestant(name: str, **options: Any) -> Contestant:
        def answer(ids: list[int]) -> Reply:
            torch.manual_seed(asked.seed)
            prompt = torch.tensor([ids])
            mask = torch.ones_like(prompt)
            out = source.model.generate(prompt, attention_mask=mask, generation_config=config, **options)
            return Reply(out[0, len(ids) :].tolist())

        return Contestant(name, answer)

    source.model.set_attn_implementation("sdpa")
    yield contestant("transformers")
    if assistant is not None:
        small = read_model(assistant).model
        small.set_attn_implementation("sdpa")
        yield contestant("transformers assisted", assistant_model=small)
    if lookup:
        yield contestant("transformers lookup", prompt_lookup_num_tokens=LOOKED_UP_TOKENS)


def openvino_contestant(
    model: Path, asked: Asked, eos_ids: Sequence[int], threads: int | None, openvino_genai: Any, openvino: Any
) -> Contestant:
    """OpenVINO GenAI on a .gguf file or a folder of its own."""
    import numpy as np

    _require(model, "--openvino")
    schedule = openvino_genai.SchedulerConfig()
    schedule.enable_prefix_caching = False  # every answer starts from an empty cache
    schedule.max_num_batched_tokens = 1 << 20  # the prefill in one piece, as for one user it is by default
    pipeline = openvino_genai.LLMPipeline(
        str(model), "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=threads or ort.available_cores()
    )
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = asked.max_new_tokens
    config.do_sample = asked.temperature > 0
    if config.do_sample:
        config.temperature, config.rng_seed = asked.temperature, asked.seed
    if eos_ids:
        config.set_eos_token_id(eos_ids[0])
        config.stop_token_ids = set(eos_ids)

    def answer(ids: list[int]) -> Reply:
        prompt = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        return Reply(list(pipeline.generate(inputs, config).tokens[0]))

    return Contestant("openvino-genai", answer)


def llama_cpp_contestant(
    model: Path, asked: Asked, eos_ids: Sequence[int], threads: int | None, text: Text, capacity: int, xllamacpp: Any
) -> Contestant:
    """llama.cpp's server, inside this process, on a .gguf file.

    It returns ids only together with their probabilities, whose sorting would be timed with it, so its text is encoded
    again: the count is llama.cpp's own, but an answer may seem to part where the same text is cut into other tokens.
    """
    _require(model, "--llama-cpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = capacity, 1, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads or ort.available_cores()
    server = xllamacpp.Server(params)
    request = {
        "n_predict": asked.max_new_tokens,
        "temperature": asked.temperature,
        "seed": asked.seed,
        # greedy needs no more than the best token; drawing is from the whole distribution, as everywhere here
        **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} if asked.temperature else {"top_k": 1}),
        "cache_prompt": False,
    }

    def answer(ids: list[int]) -> Reply:
        response = server.handle_completions({"prompt": ids, **request})
        choice = response["choices"][0]
        tokens = list(text.tokenizer.encode(choice["text"], add_special_tokens=False).ids)
        if choice["finish_reason"] == "stop":
            tokens += eos_ids[:1]
        return Reply(tokens, counted=response["usage"]["completion_tokens"])

    return Contestant("llama.cpp", answer)


def _require(model: Path, option: str) -> None:
    if not model.exists():
        raise SpecCompileError(f"{option}: {model} does not exist; give a .gguf file or a model folder.")
