"""Other programs as contestants: transformers for real, the others by modules that write down what they are asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from speccompile.graphs.errors import SpecCompileError
from speccompile.runtime import Decoder
from speccompile.tools.bench import baselines
from speccompile.tools.bench.compete import compared
from speccompile.tools.bench.contestants import Asked, Contestant, Reply, Run


def test_transformers_says_what_the_bundle_says(tiny_checkpoint: Path, tiny_decoder: Decoder) -> None:
    asked = Asked(20)
    found = list(baselines.transformers_contestants(tiny_checkpoint, asked, 1, tiny_checkpoint, lookup=True))
    assert [c.name for c in found] == ["transformers", "transformers assisted", "transformers lookup"]
    for text in ("the fox and the crow", "one two one two one two"):
        ids = tiny_decoder.encode(text)
        plain = tiny_decoder.generate(ids, max_new_tokens=20, speculate=False, sequence=tiny_decoder.new_sequence())
        for contestant in found:
            assert contestant.answer(ids).tokens == plain.token_ids, contestant.name


def test_assistants_really_assist(
    tiny_checkpoint: Path, tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer calls of the target than tokens, for the assistant is the target itself."""
    import transformers

    calls: dict[int, int] = {}
    forward = transformers.LlamaForCausalLM.forward

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls[id(self)] = calls.get(id(self), 0) + 1
        return forward(self, *args, **options)

    plain, assisted = baselines.transformers_contestants(tiny_checkpoint, Asked(20), 1, tiny_checkpoint)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counted)
    ids = tiny_decoder.encode("one two one two")
    tokens = len(plain.answer(ids).tokens)
    assert list(calls.values()) == [tokens]
    calls.clear()
    assisted.answer(ids)
    assert len(calls) == 2 and min(calls.values()) <= tokens / 2


def test_transformers_draws_from_the_whole_distribution(tiny_checkpoint: Path, tiny_decoder: Decoder) -> None:
    (contestant,) = baselines.transformers_contestants(tiny_checkpoint, Asked(40, 5.0, seed=1), 1)
    ids = tiny_decoder.encode("Hello")
    tokens = contestant.answer(ids).tokens
    assert contestant.answer(ids).tokens == tokens  # seeded for each answer
    (other,) = baselines.transformers_contestants(tiny_checkpoint, Asked(40, 5.0, seed=2), 1)
    assert other.answer(ids).tokens != tokens
    # at this temperature the best 50 of 320 tokens, transformers' own default, hold a small share of the probability
    row = tiny_decoder.target.open(len(ids) + len(tokens))
    text = [*ids, *tokens]
    count = len(text)
    logits = row.run(np.array(text), np.arange(count), np.tri(count, dtype=np.bool_), np.arange(count)).logits[0]
    ranks = [int((logits[len(ids) - 1 + i] > logits[len(ids) - 1 + i, token]).sum()) for i, token in enumerate(tokens)]
    assert max(ranks) > 100


# ---- openvino-genai ----


class FakePipeline:
    made: ClassVar[list[Any]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options, self.asked = arguments, options, list[Any]()
        self.made.append(self)

    def generate(self, inputs: Any, config: Any) -> Any:
        self.asked.append((inputs, config))
        return SimpleNamespace(tokens=[[5, 6, 2]])


class FakeConfig(SimpleNamespace):
    def set_eos_token_id(self, token: int) -> None:
        self.eos = token


def fake_openvino() -> tuple[Any, Any]:
    genai = SimpleNamespace(
        LLMPipeline=FakePipeline,
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=FakeConfig,
        TokenizedInputs=lambda ids, mask: (ids, mask),
    )
    return genai, SimpleNamespace(Tensor=lambda array: array)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_openvino_is_asked_for_the_same(tmp_path: Path, temperature: float) -> None:
    FakePipeline.made.clear()
    contestant = baselines.openvino_contestant(tmp_path, Asked(9, temperature, 4), [2, 7], 3, *fake_openvino())
    (pipeline,) = FakePipeline.made
    assert pipeline.arguments == (str(tmp_path), "CPU") and pipeline.options["INFERENCE_NUM_THREADS"] == 3
    assert pipeline.options["scheduler_config"].enable_prefix_caching is False
    assert contestant.answer([11, 12, 13]).tokens == [5, 6, 2]
    ((ids, mask), config), *_ = pipeline.asked
    assert ids.dtype == np.int64 and ids.tolist() == [[11, 12, 13]] and mask.tolist() == [[1, 1, 1]]
    assert (config.max_new_tokens, config.eos, config.stop_token_ids) == (9, 2, {2, 7})
    assert config.do_sample is (temperature > 0)
    assert not temperature or (config.temperature, config.rng_seed) == (0.7, 4)


# ---- llama.cpp ----


class FakeServer:
    reply: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any) -> None:
        self.params, self.asked = params, list[Any]()
        FakeServer.made = self

    def handle_completions(self, request: Any) -> Any:
        self.asked.append(request)
        return self.reply

    made: ClassVar[Any] = None


def fake_xllamacpp() -> Any:
    def params() -> Any:
        return SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

    return SimpleNamespace(CommonParams=params, Server=FakeServer)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_llama_cpp_is_asked_for_the_same(tmp_path: Path, tiny_decoder: Decoder, temperature: float) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    text = tiny_decoder.text
    contestant = baselines.llama_cpp_contestant(file, Asked(9, temperature, 4), [2, 7], 3, text, 77, fake_xllamacpp())
    params = FakeServer.made.params
    assert (params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers) == (str(file), 77, 1, 0)
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 3
    words = text.tokenizer.encode("the fox", add_special_tokens=False).ids
    for reason, tokens in (("length", words), ("stop", [*words, 2])):
        FakeServer.reply = {
            "choices": [{"text": "the fox", "finish_reason": reason}],
            "usage": {"completion_tokens": 12},
        }
        reply = contestant.answer([11, 12, 13])
        assert reply.tokens == tokens and len(reply) == 12
    request = FakeServer.made.asked[0]
    assert request["prompt"] == [11, 12, 13] and request["cache_prompt"] is False
    assert (request["n_predict"], request["temperature"], request["seed"]) == (9, temperature, 4)
    assert request["top_k"] == (0 if temperature else 1)


# ---- all of them ----


def test_missing_packages_and_files(tmp_path: Path) -> None:
    with pytest.raises(
        SpecCompileError, match=r"--openvino: the package 'no_such_package' is not installed.*\[bench\]"
    ):
        baselines.module("no_such_package", "--openvino")
    missing = tmp_path / "none.gguf"
    with pytest.raises(SpecCompileError, match=r"--openvino: .*none.gguf does not exist"):
        baselines.openvino_contestant(missing, Asked(4), [2], 1, *fake_openvino())


def test_words_of_other_programs_are_counted_not_judged() -> None:
    def answered(name: str, *answers: list[int]) -> Contestant:
        contestant = Contestant(name, lambda ids: Reply([]))
        contestant.runs = [[Run(1.0, Reply(tokens))] for tokens in answers]
        return contestant

    plain = answered("plain", [1, 2, 3], [1, 2, 3], [1, 2, 3], [4])
    other = answered("other", [1, 2, 3], [1, 9, 3], [1, 2, 3, 4], [4])
    assert compared(other, plain) == {
        "names": ["plain", "other"],
        "equal": 2,
        "parted": 2,
        "mean_token_of_parting": 2.0,
    }
    assert compared(plain, plain)["mean_token_of_parting"] is None
