"""Self-made training data: every answer is what the target alone says, and every feature is what said it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from speccompile.compiler.checkpoint import read_model
from speccompile.graphs.errors import CheckpointError
from speccompile.runtime import Decoder
from speccompile.tools.training.conversations import (
    OPENINGS,
    Conversation,
    Limits,
    TurnTokens,
    converse,
    make_conversations,
    read_questions,
    read_shard,
    shard_paths,
    write_shard,
)
from speccompile.tools.training.pipeline import turn_tokens
from tests.tiny.conftest import EOS_IDS

LIMITS = Limits(question=7, given_question=12, answer=20)


@pytest.fixture(scope="module")
def turn(tiny_checkpoint: Path) -> TurnTokens:
    return turn_tokens(read_model(tiny_checkpoint))


def test_turn_tokens_write_the_template_around_the_users_words(turn: TurnTokens, tiny_decoder: Decoder) -> None:
    words = "the fox"
    whole = tiny_decoder.text.chat([{"role": "user", "content": words}])
    assert turn.prefix + tiny_decoder.text.encode(words) + turn.suffix == whole
    assert turn.stops == {*EOS_IDS, turn.suffix[0]}
    assert [tiny_decoder.text.decode(opening) for opening in turn.openings] == list(OPENINGS)


@pytest.mark.parametrize("given", [False, True])
def test_answers_and_features_are_the_targets_own(given: bool, turn: TurnTokens, tiny_decoder: Decoder) -> None:
    asked = [[30 + n, 40 + n, 50] for n in range(9)]
    source = converse(
        tiny_decoder.target,
        turn,
        np.random.default_rng(0),
        rows=4,
        limits=LIMITS,
        questions=iter(asked) if given else None,
    )
    made = list(source) if given else list(islice(source, 9))
    prompts = [item.prompt.tolist() for item in made]
    if given:  # short answers are dropped, none is answered twice
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
        assert all(prompt[len(turn.prefix) : -len(turn.suffix)] in asked for prompt in prompts)
    assert len(made) >= 4
    for item, prompt in zip(made, prompts, strict=True):
        assert prompt[: len(turn.prefix)] == turn.prefix and prompt[-len(turn.suffix) :] == turn.suffix
        cache = tiny_decoder.target.open(256)
        text = np.array(prompt + item.answer.tolist())
        count = len(text)
        out = cache.run(text, np.arange(count), np.tri(count, dtype=np.bool_), np.arange(count))
        rows = slice(len(prompt) - 1, count - 1)  # the positions that chose the answer's tokens
        assert out.next_ids[0, rows].tolist() == item.answer.tolist()
        assert out.hidden is not None
        np.testing.assert_allclose(item.features, out.hidden[0, rows], atol=2e-3, rtol=2e-3)
        ended = item.answer[-1] in turn.stops
        assert ended or len(item.answer) == LIMITS.answer
        assert not set(item.answer[:-1].tolist()) & turn.stops
        question = prompt[len(turn.prefix) : -len(turn.suffix)]
        assert given or (len(question) <= LIMITS.question and not set(question) & turn.stops)
    if not given:
        opened = [any(tuple(p[len(turn.prefix) :][: len(o)]) == o for o in turn.openings) for p in prompts]
        assert sum(opened) >= len(made) // 2


def conversation(length: int, seed: int) -> Conversation:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 99, length + 5).astype(np.int32)
    return Conversation(ids[:5], ids[5:], rng.standard_normal((length, 3)).astype(np.float16))


def test_shards_round_trip_and_a_second_call_goes_on(tmp_path: Path) -> None:
    items = [conversation(20 + n, n) for n in range(6)]
    assert make_conversations(iter(items[:3]), tmp_path, 60) == 63
    reports: list[int] = []
    assert make_conversations(iter(items[3:]), tmp_path, 100, reports.append) == 63 + 23 + 24
    assert reports[0] == 63
    read = [item for path in shard_paths(tmp_path) for item in read_shard(path)]
    for got, want in zip(read, items[:5], strict=True):
        np.testing.assert_array_equal(got.prompt, want.prompt)
        np.testing.assert_array_equal(got.answer, want.answer)
        np.testing.assert_array_equal(got.features, want.features)


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.safetensors"
    write_shard(path, [conversation(20, 0)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"shard-00000\.safetensors: not a feature shard"):
        read_shard(path)


def test_questions_come_from_any_usual_layout(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"question": "b"}, {"turns": ["c", "x"]}]
    rows += [{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "d"}]}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert list(read_questions(path, lambda text: [ord(text)])) == [[97], [98], [99], [100]]
    path.write_text('{"text": "e"}\n')
    with pytest.raises(CheckpointError, match=r"data\.jsonl: line 1 has none of"):
        list(read_questions(path, lambda text: []))
