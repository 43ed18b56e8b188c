"""The benchmark: which questions it asks, what it reports, and that it notices other words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from speccompile.graphs.errors import SpecCompileError
from speccompile.runtime import Decoder
from speccompile.tools import bench
from speccompile.tools.prompts import Question, first_turns, read_questions, spread


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {"category": "writing", "turns": ["def fibonacci(n):", "second turn"]},
        {"category": "coding", "turns": ["the fox and the crow"]},
        {"category": "rag", "turns": ["one two one two one two"]},
        {"category": "rag", "prompt": "Why is the sky blue?"},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return file


def test_mt_bench_as_shipped() -> None:
    asked = read_questions()
    assert len(asked) == 80 and {question.task for question in asked} == {"mt_bench"}
    assert first_turns(limit=1)[0].startswith("Compose an engaging travel blog post")


def test_questions_and_their_tasks(questions: Path, tmp_path: Path) -> None:
    asked = read_questions(questions)
    assert [question.task for question in asked] == ["mt_bench", "mt_bench", "rag", "rag"]
    assert (asked[0].text, asked[3].text) == ("def fibonacci(n):", "Why is the sky blue?")
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert read_questions(tmp_path / "lines.txt") == [Question("one"), Question("two")]
    for content, words in (
        ('{"turns": [3]}', "line 1 has neither"),
        ("nonsense", "line 1 is not JSON"),
        ("[]", "neither"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(SpecCompileError, match=words):
            read_questions(tmp_path / "bad.jsonl")
    with pytest.raises(SpecCompileError, match="no such prompt file"):
        read_questions(tmp_path / "none.jsonl")


def test_questions_are_spread_over_each_task() -> None:
    asked = [Question(f"{task}{index}", task) for task in "ab" for index in range(10)]
    assert [question.text for question in spread(asked, 4)] == ["a0", "a2", "a5", "a7", "b0", "b2", "b5", "b7"]
    assert spread(asked, 99) == asked


def run(*arguments: Any) -> Any:
    done = CliRunner().invoke(bench.main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_whole_comparison(tiny_bundle: Path, questions: Path) -> None:
    options = ["--lookup", "--also", "--lookahead", "3,3,2", "--tree", "chain-2", "--threads", 1, "--json"]
    result = run(tiny_bundle, "--file", questions, "--max-new-tokens", 24, *options)
    names = [facts["name"] for facts in result["contestants"]]
    assert names == ["plain", "medusa", "chain-2", "lookahead 3,3,2", "prompt-lookup", "medusa and lookup"]
    assert all(row["equal"] == 4 and not row["different"] for row in result["identity"])
    assert list(result["tasks"]) == ["mt_bench", "rag"]
    for rows in (result["contestants"], *result["tasks"].values()):
        plain = rows[0]
        assert plain["mean_accepted_tokens"] == plain["speedup_over_plain"] == plain["decode_speedup_over_plain"] == 1
        assert all(facts["tokens"] == plain["tokens"] for facts in rows)
    whole = {facts["name"]: facts for facts in result["contestants"]}
    assert whole["medusa"]["mean_accepted_tokens"] > 1.2
    assert whole["chain-2"]["most_tokens_in_a_round"] <= 3 < whole["medusa"]["most_tokens_in_a_round"]
    by_task = sum(rows[1]["tokens"] for rows in result["tasks"].values())
    assert by_task == whole["medusa"]["tokens"]
    bench.show(result)


def test_other_words_are_noticed(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Question("the fox and the crow"), Question("Hello")]
    honest = bench.bundle_contestant(tiny_decoder, "plain", False, 8)

    def altered(ids: list[int]) -> tuple[list[int], Any]:
        tokens, stats = honest.answer(ids)
        return [*tokens[:3], (tokens[3] + 1) % 300, *tokens[4:]], stats

    result = bench.compete(tiny_decoder, [honest, bench.Contestant("altered", altered)], asked)
    (row,) = result["identity"]
    assert (row["equal"], row["ties"], [wrong["token"] for wrong in row["different"]]) == (0, 0, [3, 3])


@pytest.mark.parametrize("window", ["3,3", "a,b,c", "3,1,2"])
def test_a_window_that_is_none(tiny_bundle: Path, window: str) -> None:
    done = CliRunner().invoke(bench.main, [str(tiny_bundle), "--lookahead", window, "--prompts", "1"])
    assert done.exit_code == 1 and "lookahead" in str(done.exception or done.output)


def test_names_tell_contestants_apart(tiny_bundle: Path, tmp_path: Path) -> None:
    second = shutil.copytree(tiny_bundle, tmp_path / "second.bundle")
    options = ["--tree", "dynamic-4-0.12", "--tree", "dynamic-4-0.1", "--prompts", 1, "--max-new-tokens", 4, "--json"]
    names = [facts["name"] for facts in run(tiny_bundle, second, *options, "--threads", 1)["contestants"]]
    assert names == ["plain", "tiny", "second", "dynamic-4-0.12", "dynamic-4-0.1"]


def test_also_wants_heads_and_a_run_wants_questions(tiny_bundle: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(tiny_bundle, tmp_path / "plain.bundle")
    manifest = json.loads((plain / "manifest.json").read_text())
    manifest |= {"method": "plain", "heads": None}
    (plain / "manifest.json").write_text(json.dumps(manifest))
    for options, words in (
        (["--also"], "nothing that drafts"),
        (["--prompts", "0"], "no questions"),
    ):
        done = CliRunner().invoke(bench.main, [str(plain), *options])
        assert done.exit_code == 1 and words in str(done.exception)
