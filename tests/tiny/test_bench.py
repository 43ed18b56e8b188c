"""The benchmark: what it asks, its arithmetic, that it notices other words, and what it draws."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from speccompile.graphs.costs import Costs
from speccompile.graphs.errors import ProofError, SpecCompileError
from speccompile.graphs.settings import LOOKUP_TREE, LookupSettings
from speccompile.graphs.tree import TokenTree
from speccompile.runtime import Decoder, load
from speccompile.runtime.stats import Stats
from speccompile.tools.bench import asking, plot, report
from speccompile.tools.bench.command import bench
from speccompile.tools.bench.compete import compete, median_run, orders, require_identity
from speccompile.tools.bench.contestants import Asked, Contestant, Reply, Run, bundle_contestant, plain_contestants
from speccompile.tools.bench.synthetic import OracleDecoder, expected_tokens, synthetic_contestant
from speccompile.tools.prompts import Question, first_turns, read_questions, spread
from tests.tiny.test_bundle import edit_manifest, rehash

QUIET = Console(quiet=True)


# ---- what is asked ----


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


def test_long_contexts_stand_before_the_prompt(tiny_decoder: Decoder) -> None:
    text, asked = tiny_decoder.text, [Question("the fox"), Question("Hello")]
    alone = asking.question_prompts(text, asked)
    assert alone[0] == text.chat([{"role": "user", "content": "the fox"}])
    behind = asking.question_prompts(text, asked, past=20)
    fox, hello = (text.tokenizer.encode(f"{words}\n\n").ids for words in ("the fox", "Hello"))
    assert behind[0] == [*((hello + fox) * 20)[:20], *alone[0]] and behind[1] == [*((fox + hello) * 20)[:20], *alone[1]]


def test_random_prompts_do_not_end_the_text() -> None:
    drawn = asking.random_prompts(50, 40, 8, [2, 4])
    assert np.shape(drawn) == (50, 40) and set(np.ravel(drawn)) == {0, 1, 3, 5, 6, 7}
    assert drawn == asking.random_prompts(50, 40, 8, [2, 4])


# ---- arithmetic, on contestants made by hand ----


def made(name: str, seconds: list[list[float]], tokens: int, **more: Any) -> Contestant:
    """Runs by prompt and repeat, each of `tokens` tokens."""
    contestant = Contestant(name, lambda ids: Reply([]), **more)
    contestant.runs = [[Run(s, Reply(list(range(tokens)))) for s in repeats] for repeats in seconds]
    return contestant


def stats(rounds_by_length: list[int], draft: float, verify: float, prefill: float, host: float = 0.0) -> Stats:
    rounds, emitted = sum(rounds_by_length), sum(k * n for k, n in enumerate(rounds_by_length))
    done = Stats(rounds=rounds, drafted=4 * rounds, emitted=emitted + 1, rounds_by_length=rounds_by_length)
    done.seconds |= {"draft": draft, "verify": verify, "prefill": prefill, "host": host}
    return done


def test_the_median_run_is_a_real_one() -> None:
    runs = [Run(s, Reply([int(s)])) for s in (5.0, 1.0, 3.0, 2.0)]
    assert median_run(runs).reply.tokens == [2] and median_run(runs[:3]).reply.tokens == [3]


def scripted(name: str, script: list[float], tokens: list[int], clock: list[float], **more: Any) -> Contestant:
    """Each answer takes the next time of the script, on a clock of ours."""
    times, replies = iter(script), more.pop("stats", None)

    def answer(ids: list[int]) -> Reply:
        clock[0] += next(times)
        return Reply(tokens[: ids[0]], replies and next(replies))

    return Contestant(name, answer, **more)


def test_hand_computed_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("speccompile.tools.bench.contestants.perf_counter", lambda: clock[0])
    words = list(range(50, 70))
    # Two prompts, answered by 11 and 6 tokens, each three times; the first time of each is the warm-up's.
    plain_stats = [stats([0, 10], 0, 9.0, 1.0), stats([0, 5], 0, 4.0, 2.0)]
    plain = scripted("plain", [99, 10, 5, 30, 6, 11, 7], words, clock, stats=iter([plain_stats[0], *plain_stats * 3]))
    fast_stats = [stats([0, 1, 0, 3], 0.5, 1.5, 0.7, 0.5), stats([0, 0, 1, 1], 1.0, 0.75, 0.9, 0.25)]
    fast = scripted(
        "fast", [99, 5, 2, 4, 3, 6, 4], words, clock, plain=plain, stats=iter([fast_stats[0], *fast_stats * 3])
    )
    other = scripted("other", [99, 20, 12, 40, 6, 22, 12], words, clock)
    result = compete([plain, fast, other], [[11], [6]], ["a", "b"], repeats=3, greedy=False, console=QUIET)
    of = {facts["name"]: facts for facts in result["contestants"]}
    # medians: plain 11 and 6 s, fast 5 and 3 s, other 22 and 12 s, for 17 tokens
    assert of["plain"]["ms_per_token"] == pytest.approx(1e3) and of["fast"]["ms_per_token"] == pytest.approx(8e3 / 17)
    assert of["fast"]["tokens_per_second"] == pytest.approx(17 / 8) and of["fast"]["tokens"] == 17
    assert of["fast"]["speedup_over_plain"] == pytest.approx(17 / 8)
    assert of["other"]["speedup_over_plain"] == pytest.approx(0.5) and of["other"]["plain"] == "plain"
    assert "rounds" not in of["other"]
    # by prompt and repeat: 10/5, 30/4, 11/6 and 5/2, 6/3, 7/4; in order 1.75, 1.833, 2, 2, 2.5, 7.5
    assert of["fast"]["speedup_quartiles"] == pytest.approx([1.75 + 0.75 * (11 / 6 - 1.75), 2.0, 2.5 + 0.25 * 5.0])
    # decoding: plain 13 s for 15 tokens, fast 2.5 and 2 s
    assert of["fast"]["decode_ms_per_token"] == pytest.approx(4.5e3 / 15)
    assert of["fast"]["decode_speedup_over_plain"] == pytest.approx(13 / 4.5)
    assert of["fast"]["rounds"] == 6 and of["fast"]["mean_accepted_tokens"] == 15 / 6
    assert of["fast"]["rounds_by_length"] == [0, 1, 1, 4] and of["fast"]["most_tokens_in_a_round"] == 3
    assert of["fast"]["acceptance_by_depth"] == pytest.approx([5 / 6, 4 / 6]) and of["fast"]["drafted_per_round"] == 4
    assert of["fast"]["ms_per_round"]["draft"] == pytest.approx(1.5e3 / 6)
    assert of["fast"]["outside_backend"] == pytest.approx(0.75 / 4.5)
    assert of["fast"]["prefill_seconds"] == pytest.approx(1.6) and of["plain"]["acceptance_by_depth"] == []
    task = result["tasks"]["b"][1]
    assert task["speedup_over_plain"] == pytest.approx(2.0) and task["rounds"] == 2
    assert task["speedup_quartiles"] == pytest.approx([1.75, 2.0, 2.5])


def test_two_targets_have_two_plain_contestants() -> None:
    first, second = made("plain fp32", [[8.0]], 4), made("plain int8", [[4.0]], 4)
    way = made("way", [[1.0]], 4, plain=second)
    for contestant in (first, second, way):
        contestant.run = lambda number, ids: None  # type: ignore[method-assign]
    facts = compete([first, second, way], [[1]], [""], warm_up=0, greedy=False, console=QUIET)["contestants"]
    assert [(f["plain"], f["speedup_over_plain"], f["speedup_over_first_plain"]) for f in facts] == [
        ("plain fp32", 1, 1),
        ("plain fp32", 2, 2),
        ("plain int8", 4, 8),
    ]


def test_counts_of_read_back_answers() -> None:
    assert len(Reply([1, 2, 3], counted=5)) == 5 and len(Reply([1, 2, 3])) == 3


def test_orders_take_turns() -> None:
    few = [made(name, [], 0) for name in "abc"]
    seen = ["".join(c.name for c in order) for order in itertools.islice(orders(few), 8)]
    assert sorted(seen[:6]) == ["abc", "acb", "bac", "bca", "cab", "cba"] and seen[6:] == seen[:2]
    many = [made(name, [], 0) for name in "abcdefg"]
    chosen = list(itertools.islice(orders(many), 200))
    assert all(sorted(c.name for c in order) == list("abcdefg") for order in chosen)
    firsts = [sum(order[0] is contestant for order in chosen) for contestant in many]
    assert min(firsts) > 10  # 29 are expected; a fixed order would have 0
    assert list(itertools.islice(orders(many), 200)) == chosen


# ---- whole comparisons ----


def run(*arguments: Any) -> Any:
    done = CliRunner().invoke(bench, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def refusal(*arguments: Any) -> str:
    done = CliRunner().invoke(bench, [str(argument) for argument in arguments])
    assert done.exit_code == 1 and isinstance(done.exception, SpecCompileError), done.output
    return str(done.exception)


def test_a_whole_comparison(tiny_bundle: Path, questions: Path, tmp_path: Path) -> None:
    options = ["--lookup", "--also", "--lookahead", "3,3,2", "--tree", "chain-2", "--threads", 1, "--json"]
    picture = tmp_path / "out.png"
    options += ["--repeats", 2, "--synthetic-accept", 0.8, "--plot", picture]
    result = run(tiny_bundle, "--prompts-file", questions, "--max-new-tokens", 24, *options)
    names = [facts["name"] for facts in result["contestants"]]
    drafting = ["medusa", "chain-2", "lookahead 3,3,2", "prompt-lookup", "medusa and lookup", "synthetic 0.8 chain-4"]
    assert names == ["plain", *drafting]
    assert [row["names"] for row in result["identity"]] == [["plain", name] for name in names]
    assert all(row["equal"] == 4 and not row["different"] for row in result["identity"])
    assert list(result["tasks"]) == ["mt_bench", "rag"] and result["compared"] == []
    for rows in (result["contestants"], *result["tasks"].values()):
        plain = rows[0]
        assert plain["mean_accepted_tokens"] == plain["speedup_over_plain"] == plain["decode_speedup_over_plain"] == 1
        assert all(facts["tokens"] == plain["tokens"] for facts in rows)
        for facts in rows:
            emitted = sum(length * count for length, count in enumerate(facts["rounds_by_length"]))
            assert emitted == facts["tokens"] - (4 if rows is result["contestants"] else 2)
    whole = {facts["name"]: facts for facts in result["contestants"]}
    assert whole["medusa"]["mean_accepted_tokens"] > 1.2
    assert whole["chain-2"]["most_tokens_in_a_round"] <= 3 < whole["medusa"]["most_tokens_in_a_round"]
    by_task = sum(rows[1]["tokens"] for rows in result["tasks"].values())
    assert by_task == whole["medusa"]["tokens"]
    assert result["settings"]["repeats"] == 2 and result["settings"]["file"] == str(questions)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_tables_say_what_was_found(tiny_bundle: Path, questions: Path) -> None:
    result = run(tiny_bundle, "--file", questions, "--max-new-tokens", 8, "--threads", 1, "--json")
    result["contestants"][1]["speedup_over_first_plain"] = 3.25
    result["costs"] = {"plain": {"tokens": [1, 64], "pasts": [77], "target": [[1.5, 123.4]]}}
    result["compared"] = [{"names": ["plain", "llama"], "equal": 1, "parted": 3, "mean_token_of_parting": 17.0}]
    result["contestants"][1] |= {"plain_rounds": 41, "stepped_back": 13}
    result["identity"][0]["different"] = [{"prompt": 2, "token": 5, "gap": 0.5}]
    out = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    report.show(result, out)
    words = out.export_text()
    for told in (
        "3.25x",
        "bonus included",
        "123.4",
        "behind 77",
        "1 answers equal, 3 part, at token 17",
        "rag",
        "1 differ",
    ):
        assert told in words, told


def test_drawn_answers_are_not_judged(tiny_bundle: Path, questions: Path) -> None:
    options = ["--file", questions, "--max-new-tokens", 16, "--threads", 1, "--json", "--synthetic-accept", 0.9]
    drawn = run(tiny_bundle, *options, "--temperature", 1.0, "--seed", 3)
    assert drawn["identity"] == drawn["compared"] == []
    again, other = (run(tiny_bundle, *options, "--temperature", 1.0, "--seed", seed) for seed in (3, 4))
    rounds = [[facts["rounds_by_length"] for facts in result["contestants"]] for result in (drawn, again, other)]
    assert rounds[0] == rounds[1] != rounds[2]
    # the oracle knows drawn answers, too: with a seed plain decoding draws what the loop draws
    assert drawn["contestants"][2]["mean_accepted_tokens"] > 2


def test_past_and_random_prompts(tiny_bundle: Path) -> None:
    options = ["--max-new-tokens", 5, "--threads", 1, "--json", "--prompts", 2]
    result = run(tiny_bundle, "--random-prompts", 30, "--past", 10, *options)
    assert result["prompts"] == 2 and result["settings"]["file"] is None
    assert "take 135; ask for shorter ones" in refusal(tiny_bundle, "--random-prompts", 30, "--past", 100, *options)


def test_other_words_are_noticed(tiny_decoder: Decoder) -> None:
    asked = Asked(8)
    prompts = [tiny_decoder.encode("the fox and the crow"), tiny_decoder.encode("Hello")]
    (honest,) = plain_contestants([tiny_decoder], asked)
    turns = itertools.count(1)

    def altered(ids: list[int]) -> Reply:
        reply = honest.answer(ids)
        if next(turns) == 4:  # the last of two prompts and two repeats
            return Reply([*reply.tokens[:3], (reply.tokens[3] + 1) % 300, *reply.tokens[4:]], reply.stats)
        return reply

    liar = Contestant("liar", altered, tiny_decoder, honest)
    true = bundle_contestant("true", tiny_decoder, asked, honest)
    result = compete([honest, true, liar], prompts, ["", ""], repeats=2, warm_up=0, console=QUIET)
    again, right, wrong = result["identity"]
    assert again["names"] == ["plain", "plain"] and again["equal"] == right["equal"] == 2
    assert (wrong["equal"], wrong["ties"]) == (1, 0)
    assert [(found["prompt"], found["token"]) for found in wrong["different"]] == [(1, 3)]
    with pytest.raises(ProofError, match="'liar' and 'plain' differ in 1 answers, first at token 3 of prompt 1"):
        require_identity(result)
    require_identity({"identity": [again, right]})


def test_a_lie_is_exit_status_1(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Decoder.generate

    def lie(self: Decoder, prompt: Any, **options: Any) -> Any:
        done = generate(self, prompt, **options)
        done.token_ids[2] = (done.token_ids[2] + options["speculate"]) % 300
        return done

    monkeypatch.setattr(Decoder, "generate", lie)
    done = CliRunner().invoke(
        bench, [str(tiny_bundle), "--prompts", "1", "--max-new-tokens", "4", "--threads", "1", "--json"]
    )
    assert done.exit_code == 1 and isinstance(done.exception, ProofError)
    assert json.loads(done.stdout)["identity"][0]["different"][0]["token"] == 2  # reported all the same


# ---- who takes part ----


def test_names_tell_contestants_apart(tiny_bundle: Path, tmp_path: Path) -> None:
    second = shutil.copytree(tiny_bundle, tmp_path / "second.bundle")
    options = ["--tree", "dynamic-4-0.12", "--tree", "dynamic-4-0.1", "--prompts", 1, "--max-new-tokens", 4, "--json"]
    names = [facts["name"] for facts in run(tiny_bundle, second, *options, "--threads", 1)["contestants"]]
    assert names == ["plain", "tiny", "second", "dynamic-4-0.12", "dynamic-4-0.1"]


@pytest.fixture(scope="module")
def other_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Path:
    """Another target (the numbers of the same one, backwards), which looks text up."""
    out = shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("bundle") / "other.bundle")
    weights = np.fromfile(out / "target.onnx.data", np.float32)
    weights[::-1].tofile(out / "target.onnx.data")
    rehash(out, "target.onnx.data")
    fields = {
        "method": "prompt-lookup",
        "heads": None,
        "lookup": asdict(LookupSettings()),
        "tree": LOOKUP_TREE.to_json(),
    }
    edit_manifest(out, lambda manifest: manifest.update(fields))
    return out


def test_each_target_has_its_own_plain(tiny_bundle: Path, other_bundle: Path, questions: Path, tmp_path: Path) -> None:
    options = ["--file", questions, "--prompts", 2, "--max-new-tokens", 6, "--threads", 1, "--json"]
    result = run(tiny_bundle, other_bundle, *options, "--synthetic-accept", 0.5)
    synthetic = [f"synthetic 0.5 chain-4 {stem}" for stem in ("tiny", "other")]
    rows = [(facts["name"], facts["plain"]) for facts in result["contestants"]]
    assert rows == [
        ("plain tiny", "plain tiny"),
        ("plain other", "plain tiny"),
        ("medusa", "plain tiny"),
        ("prompt-lookup", "plain other"),
        (synthetic[0], "plain tiny"),
        (synthetic[1], "plain other"),
    ]
    assert all(row["equal"] == 2 for row in result["identity"])
    (beside,) = result["compared"]
    assert beside["names"] == ["plain tiny", "plain other"] and beside["parted"] == 2  # other weights, other words
    lower = shutil.copytree(other_bundle, tmp_path / "lower.bundle")
    edit_manifest(lower, lambda manifest: manifest["graphs"]["target"].update(precision="int8"))
    named = [c.name for c in plain_contestants([load(tiny_bundle, 1), load(lower, 1)], Asked(4))]
    assert named == ["plain fp32", "plain int8"]


def test_one_session_for_one_target(tiny_bundle: Path, tmp_path: Path, other_bundle: Path) -> None:
    from speccompile.tools.bench.contestants import load_all

    second = shutil.copytree(tiny_bundle, tmp_path / "second.bundle")
    first, same, other = load_all([tiny_bundle, second, other_bundle], 1)
    assert first.target is same.target is not other.target and first.heads is not same.heads
    with pytest.raises(SpecCompileError, match="given twice"):
        load_all([second, tmp_path / "." / "second.bundle"], 1)
    edit_manifest(second, lambda manifest: manifest["tokenizer"].update(fingerprint="f" * 64))
    with pytest.raises(SpecCompileError, match=r"second.bundle: tokenizer.fingerprint is ffffffffffff\.\.\. but that"):
        load_all([tiny_bundle, second], 1)


@pytest.mark.parametrize("window", ["3,3", "a,b,c", "3,1,2"])
def test_a_window_that_is_none(tiny_bundle: Path, window: str) -> None:
    assert "lookahead" in refusal(tiny_bundle, "--lookahead", window, "--prompts", 1, "--max-new-tokens", 2)


def test_refusals(other_bundle: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for options, words in (
        (["--also"], "no bundle here has heads or a draft"),
        (["--file", empty], "no questions"),
        (["--assistant", "x"], "--assistant: transformers needs its model"),
        (["--transformers-lookup"], "--transformers-lookup: transformers needs its model"),
        (["--plot", tmp_path / "out.xyz"], "ends like no picture"),
        (["--plot", tmp_path / "no" / "out.png"], "does not exist"),
        (["--synthetic-accept", "0"], "no rate of acceptance"),
        (["--synthetic-accept", "1.5"], "no rate of acceptance"),
        (["--synthetic-accept", "0.5", "--synthetic-tree", "dynamic-4"], "give a fixed tree"),
    ):
        assert words in refusal(other_bundle, "--prompts", 1, "--max-new-tokens", 2, "--threads", 1, *options), options


def test_the_command_line_takes_the_program_apart_from_its_libraries() -> None:
    import subprocess
    import sys

    heavy = "{'torch', 'onnxruntime', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)"
    code = f"import sys, speccompile.tools.bench.command; sys.exit(str({heavy}) if {heavy} else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- pictures ----


def test_three_panels() -> None:
    facts = {
        "name": "plain",
        "speedup_over_first_plain": 1.0,
        "first_plain_quartiles": [1.0, 1.0, 1.0],
        "acceptance_by_depth": [],
    }
    way = facts | {
        "name": "way",
        "speedup_over_first_plain": 2.5,
        "first_plain_quartiles": [2.0, 2.25, 3.0],
        "acceptance_by_depth": [0.75, 0.5, 0.125],
    }
    costs = {"plain": {"tokens": [1, 4, 16], "pasts": [200, 1000], "target": [[2, 3, 5], [4, 5, 9]]}}
    panels: list[Any] = plot.figure({"contestants": [facts, way], "costs": costs}).axes
    bars, depths, curves = panels
    assert [bar.get_width() for bar in bars.patches] == [1.0, 2.5]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["plain", "way"]
    whiskers = bars.collections[0].get_segments()  # one line a bar, from the first to the third quartile
    assert [sorted(segment[:, 0]) for segment in whiskers] == [[1.0, 1.0], [2.0, 3.0]]
    (line,) = depths.lines
    assert list(line.get_xdata()) == [1, 2, 3] and list(line.get_ydata()) == [0.75, 0.5, 0.125]
    assert [list(curve.get_ydata()) for curve in curves.lines] == [[2, 3, 5], [4, 5, 9]]
    assert [text.get_text() for text in curves.get_legend().get_texts()] == [
        "target, behind 200",
        "target, behind 1000",
    ]
    _, _, empty = plot.figure({"contestants": [facts], "costs": {}}).axes
    assert not empty.lines and "speccompile tune" in empty.texts[0].get_text()


# ---- synthetic acceptance ----

MEANDERING = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2, 1]])


def test_what_theory_expects() -> None:
    assert expected_tokens(TokenTree.chain(4), 0.7) == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    # 1 + level 1: .6 + .24 + .096, level 2: .36 + .144 + .144 + .096 * .24, level 3: .216
    assert expected_tokens(MEANDERING, 0.6) == pytest.approx(1 + 0.936 + 0.648 + 0.02304 + 0.216)
    assert expected_tokens(MEANDERING, 1.0) == 4


@pytest.mark.parametrize("tree, rate", [(TokenTree.chain(4), 0.7), (TokenTree.chain(2), 0.3), (MEANDERING, 0.6)])
def test_the_oracle_is_right_as_often_as_it_should_be(other_bundle: Path, tree: TokenTree, rate: float) -> None:
    decoder = load(other_bundle, threads=1)
    asked = Asked(80)
    oracle = OracleDecoder(decoder, tree, rate, asked, 0.0)
    oracle.bundle.manifest.eos_ids.clear()  # long answers: the last round of each is cut short
    lengths = np.zeros(tree.max_depth + 2)
    for ids in asking.random_prompts(20, 20, 300, []):
        oracle.learn(ids)
        done = oracle.generate(ids, max_new_tokens=80, sequence=oracle.new_sequence())
        assert done.token_ids == oracle.known[tuple(ids)] and len(done.token_ids) == 80
        lengths[: len(done.stats.rounds_by_length)] += done.stats.rounds_by_length
    rounds = lengths.sum()
    values = np.arange(len(lengths))
    mean = (lengths @ values) / rounds
    deviation = np.sqrt((lengths @ values**2) / rounds - mean**2) / np.sqrt(rounds)
    # up to one round of about 40 in an answer is cut, by half its tokens
    assert abs(mean - expected_tokens(tree, rate)) < 4 * deviation + 0.5 * mean / 40
    assert abs(mean - expected_tokens(tree, rate + 0.15)) > 4 * deviation + 0.5 * mean / 40


def test_drafting_can_pretend_to_take_time(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ticks = Asked(12), itertools.count()
    (plain,) = plain_contestants([tiny_decoder], asked)
    costs = Costs([1, 5], [0], [[2.0, 3.0]])
    oracle = synthetic_contestant(plain, 1.0, "chain-4", 3.0, asked, costs, 10)
    assert oracle.name == "synthetic 1 chain-4"
    assert oracle.facts["expected"] == {"mean_accepted_tokens": 5.0, "speedup": pytest.approx(5 * 2 / (3 + 3))}
    monkeypatch.setattr("speccompile.tools.bench.synthetic.perf_counter", lambda: next(ticks) / 1024)
    result = compete([plain, oracle], [tiny_decoder.encode("Hello")], [""], warm_up=0, console=QUIET)
    _, facts = result["contestants"]
    assert facts["expected"]["mean_accepted_tokens"] == 5.0
    # 11 tokens behind the first: two rounds of 5, and one that has no room to draft
    assert facts["rounds_by_length"] == [0, 1, 0, 0, 0, 2]
    # the clock is asked when drafting starts, until 3 ms are over (after 4 ticks), and when it ends
    assert facts["ms_per_round"]["draft"] == pytest.approx(2 * 5e3 / 1024 / 3)


def test_costs_are_measured_when_asked_for(tiny_bundle: Path, questions: Path) -> None:
    options = ["--file", questions, "--prompts", 1, "--max-new-tokens", 4, "--threads", 1, "--json"]
    assert run(tiny_bundle, *options)["costs"] == {}
    measured = run(tiny_bundle, *options, "--costs", "--synthetic-accept", 0.5)
    table = measured["costs"]["plain"]
    assert table["tokens"][:4] == [1, 2, 3, 4] and table["tokens"][-1] == 64 and table["pasts"] == [64]
    assert len(table["target"][0]) == len(table["tokens"]) and min(table["target"][0]) > 0
    at = dict(zip(table["tokens"], table["target"][0], strict=True))
    speedup = expected_tokens(TokenTree.chain(4), 0.5) * at[1] / (at[4] + at[6]) * 2  # a call of 5 lies between
    assert measured["contestants"][-1]["expected"]["speedup"] == pytest.approx(speedup)


def test_costs_that_tune_has_written(tiny_bundle: Path, questions: Path, tmp_path: Path) -> None:
    options = ["--file", questions, "--prompts", 2, "--max-new-tokens", 70, "--threads", 1, "--json", "--costs"]
    tuned = shutil.copytree(tiny_bundle, tmp_path / "tuned.bundle")
    written = asdict(Costs([1, 8], [200], [[2.0, 3.0]], draft=1e3, host=0.25))
    edit_manifest(tuned, lambda manifest: manifest.update(costs=written))
    result = run(tuned, *options, "--tree", "chain-2", "--repeats", 2)
    assert result["costs"] == {"plain": written}
    _, own, tree = result["contestants"]
    # Drafting costs too much here, so the bundle steps back; a variant of it is tried all the same.
    assert own["plain_rounds"] > 0 == tree["plain_rounds"]
