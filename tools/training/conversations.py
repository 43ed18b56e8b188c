"""Training data made by the model itself: it writes user turns, then answers them greedily.

Heads learn what the target will say, so the target says it: no foreign text is needed and no prompt that a
benchmark uses is seen. A user turn is sampled from the chat template's own prefix (everything the template
puts before the user's words); the answer is greedy, because that is what a greedy run will emit.

All rows of one batched graph are busy all the time. Each row is a small state machine, one token a step: it
asks, closes the turn with the template's own tokens, answers, then starts over on top of the shared prefix,
whose keys and values stay in the cache. The hidden states that training needs come out of the same calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from speccompile.graphs.errors import CheckpointError, GenerationError
from speccompile.runtime.backends.ort import OrtTarget

SHARD_TOKENS = 16_384
SHORTEST_ANSWER = 8  # shorter ones teach nothing beyond the first head
ASK_TOP_P, ASK_TOP_K = 0.95, 64
# Left alone, chat models open most user turns alike and chattily (SmolLM2: "I" or "Can" two times in three), and
# heads then know little of essays, code or lists. So most turns open with a word or two that requests open with;
# the model writes the rest. For a model of another language, give user turns of your own (`--data`).
OPENED_SHARE = 0.8
OPENINGS = tuple(Path(__file__).with_name("openings.txt").read_text("utf-8").splitlines())


@dataclass(frozen=True)
class Conversation:
    """One question and its greedy answer.

    Args:
        prompt: int32 [P]: everything before the answer, as the chat template writes it.
        answer: int32 [N]: the answer, its end token included when it ended.
        features: float16 [N,F]: post-norm hidden state that produced `answer[i]` (the position before it).
    """

    prompt: npt.NDArray[np.int32]
    answer: npt.NDArray[np.int32]
    features: npt.NDArray[np.float16]


@dataclass(frozen=True)
class TurnTokens:
    """The chat template around one user turn, as token ids.

    Args:
        prefix: before the user's words.
        suffix: after them, up to where the answer starts.
        stops: ids that end a turn.
        openings: the tokens of `OPENINGS`, each a way to start the user's words.
    """

    prefix: list[int]
    suffix: list[int]
    stops: frozenset[int]
    openings: tuple[tuple[int, ...], ...] = ()


@dataclass
class _Row:
    """One row of the batch: the tokens fed so far, those to be fed as they are, and the answer being made."""

    tokens: list[int]
    forced: list[int] = field(default_factory=list)
    asking: bool = False
    asked: int = 0
    answer: list[int] = field(default_factory=list)
    features: list[npt.NDArray[np.float16]] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """Longest user turn (a longer one is cut) and longest answer, in tokens."""

    question: int = 64
    given_question: int = 1024
    answer: int = 160


def converse(
    target: OrtTarget,
    turn: TurnTokens,
    rng: np.random.Generator,
    *,
    rows: int = 96,
    limits: Limits = Limits(),
    questions: Iterator[list[int]] | None = None,
) -> Iterator[Conversation]:
    """Conversations, for ever (or until `questions`, token ids of user turns, run out).

    Args:
        rows: rows of the batch.
        questions: user turns to answer instead of sampling them.

    Raises:
        GenerationError: when the target gives no hidden states or they do not fit float16.
    """
    if target.width is None:
        raise GenerationError("target graph: it has no 'hidden' output; build it with --method medusa.")
    longest = limits.question if questions is None else limits.given_question
    cache = target.open(len(turn.prefix) + longest + len(turn.suffix) + limits.answer, rows)
    first_logits = _share_prefix(target, cache.buffer, turn.prefix)

    def start() -> tuple[_Row, int] | None:
        """A row after the shared prefix, and the token to feed it first; None when the questions have run out."""
        if questions is None:
            if not turn.openings or rng.random() >= OPENED_SHARE:
                return _Row(list(turn.prefix), asking=True), _sample(first_logits, rng)
            first, *forced = turn.openings[rng.integers(len(turn.openings))]
            return _Row(list(turn.prefix), forced, asking=True), first
        question = next(questions, None)
        if question is None:
            return None
        first, *forced = [*question[:longest], *turn.suffix]
        return _Row(list(turn.prefix), forced), first

    states: list[_Row | None] = [None] * rows
    past, feed = np.zeros(rows, np.int64), np.full((rows, 1), turn.prefix[0], np.int64)

    def restart(index: int) -> None:
        begun = start()
        states[index], feed[index, 0] = begun or (None, turn.prefix[0])
        past[index] = len(turn.prefix) if begun else 0

    for index in range(rows):
        restart(index)
    mask, one_row = np.ones((rows, 1, 1), np.bool_), np.zeros(1, np.int64)
    while any(states):
        out = cache.run(feed, past[:, None], mask, one_row, past)
        assert out.hidden is not None
        for index, state in enumerate(states):
            if state is None:
                continue
            state.tokens.append(int(feed[index, 0]))
            past[index] += 1
            if state.asking or state.forced:
                feed[index, 0] = _write_prompt(state, turn, limits, partial(_sample, out.logits[index, 0], rng))
                continue
            feed[index, 0] = following = int(out.next_ids[index, 0])
            state.answer.append(following)
            state.features.append(out.hidden[index, 0].astype(np.float16))
            if following in turn.stops or len(state.answer) >= limits.answer:
                if len(state.answer) >= SHORTEST_ANSWER:
                    yield _finish(state)
                restart(index)


def _write_prompt(state: _Row, turn: TurnTokens, limits: Limits, sample: Callable[[], int]) -> int:
    """The next token of a row that is not answering yet: an opening, sampled words, then the template's own."""
    state.asked += state.asking
    if state.forced:
        return state.forced.pop(0)
    following = sample()
    if following not in turn.stops and state.asked < limits.question:
        return following
    first, *state.forced = turn.suffix
    state.asking = False
    return first


def _finish(state: _Row) -> Conversation:
    features = np.stack(state.features)
    if not np.isfinite(features).all():
        raise GenerationError("hidden states: some do not fit float16; this target's features cannot be cached.")
    prompt = state.tokens[: len(state.tokens) - len(state.answer) + 1]  # the last answer token was never fed
    return Conversation(np.array(prompt, np.int32), np.array(state.answer, np.int32), features)


def _share_prefix(target: OrtTarget, buffer: npt.NDArray[np.float32], prefix: Sequence[int]) -> npt.NDArray[np.float32]:
    """Run the common prefix once, copy its keys and values to every row, return the logits [V] after it."""
    count = len(prefix)
    single = target.open(count + 1)
    out = single.run(np.array(prefix), np.arange(count), np.tri(count, dtype=np.bool_), np.array([count - 1]))
    buffer[:, :, :, :count] = single.buffer[:, :, :, :count]
    return out.logits[0, 0].copy()


def _sample(logits: npt.NDArray[np.float32], rng: np.random.Generator) -> int:
    """The next token of a user turn: nucleus sampling at temperature 1."""
    count = min(ASK_TOP_K, len(logits))
    best = np.argpartition(logits, -count)[-count:]
    best = best[np.argsort(-logits[best])]
    weights = np.exp((logits[best] - logits[best[0]]).astype(np.float64))
    weights /= weights.sum()
    weights[1:][np.cumsum(weights)[:-1] >= ASK_TOP_P] = 0
    return int(rng.choice(best, p=weights / weights.sum()))


# ---- on disk ----


def shard_paths(folder: Path) -> list[Path]:
    """Finished shards, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def make_conversations(
    source: Iterator[Conversation], folder: Path, tokens: int, report: Callable[[int], None] = lambda _: None
) -> int:
    """Write conversations to `folder` until it holds `tokens` answer tokens; finished shards are kept and counted.

    Args:
        report: called with the number of answer tokens so far.

    Returns:
        answer tokens in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(len(item.answer) for path in shard_paths(folder) for item in read_shard(path))
    report(done)
    batch: list[Conversation] = []
    held = 0
    while done + held < tokens and (item := next(source, None)) is not None:
        batch.append(item)
        held += len(item.answer)
        if held >= SHARD_TOKENS or done + held >= tokens:
            write_shard(folder / f"shard-{len(shard_paths(folder)):05d}.safetensors", batch)
            done, held, batch = done + held, 0, []
        report(done + held)
    if batch:
        write_shard(folder / f"shard-{len(shard_paths(folder)):05d}.safetensors", batch)
        done += held
    return done


def write_shard(path: Path, items: Sequence[Conversation]) -> None:
    """One safetensors file: ids concatenated, their lengths, features concatenated."""
    partial = path.with_suffix(".partial")
    save_file(
        {
            "prompts": np.concatenate([item.prompt for item in items]),
            "prompt_lengths": np.array([len(item.prompt) for item in items], np.int32),
            "answers": np.concatenate([item.answer for item in items]),
            "answer_lengths": np.array([len(item.answer) for item in items], np.int32),
            "features": np.concatenate([item.features for item in items]),
        },
        partial,
    )
    partial.rename(path)


def read_shard(path: Path) -> list[Conversation]:
    """The inverse of `write_shard`.

    Raises:
        CheckpointError: when the file is not a shard.
    """
    try:
        data = load_file(path)
        prompts = np.split(data["prompts"], np.cumsum(data["prompt_lengths"])[:-1])
        ends = np.cumsum(data["answer_lengths"])[:-1]
        return [
            Conversation(*parts)
            for parts in zip(prompts, np.split(data["answers"], ends), np.split(data["features"], ends), strict=True)
        ]
    except Exception as error:
        raise CheckpointError(f"{path}: not a feature shard ({error}); delete it and make the data again.") from error


def read_questions(path: Path, encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """User turns of a JSONL file: each line has `prompt`, `question`, `turns` or `messages` (first user turn).

    Raises:
        CheckpointError: for a line without any of them.
    """
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        text = row.get("prompt") or row.get("question") or (row.get("turns") or [None])[0]
        text = text or next((m["content"] for m in row.get("messages", []) if m.get("role") == "user"), None)
        if not isinstance(text, str):
            raise CheckpointError(f"{path}: line {number} has none of prompt, question, turns, messages.")
        yield encode(text)
