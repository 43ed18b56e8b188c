"""The command line, where nothing is wrong: what each command prints, and that it says what the library says."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.medusa_heads import read_heads
from speccompile.runtime import Decoder
from tests.tiny.conftest import TEXTS, Cli

STAGES = {"prefill", "draft", "verify", "accept", "commit", "host"}


def test_run_as_json(speccompile: Cli, tiny_bundle: Path, tiny_decoder: Decoder) -> None:
    status, out, err = speccompile("run", tiny_bundle, "--prompt", TEXTS[0], "--max-new-tokens", 40, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    answer = json.loads(out)
    want = tiny_decoder.generate(TEXTS[0], max_new_tokens=40, sequence=tiny_decoder.new_sequence())
    assert set(answer) == {"token_ids", "text", "finish_reason", "stats"}
    assert answer["token_ids"] == want.token_ids and len(want.token_ids) == 40
    assert answer["text"] == want.text
    assert answer["finish_reason"] == want.finish_reason == "length"
    stats = answer["stats"]
    assert {"rounds", "drafted", "accepted", "emitted", "mean_accepted_tokens", "seconds"} <= set(stats)
    for count in ("rounds", "drafted", "accepted", "emitted"):
        assert stats[count] == getattr(want.stats, count)
    assert stats["emitted"] == 40
    assert stats["mean_accepted_tokens"] == 39 / stats["rounds"] > 1.3
    assert set(stats["seconds"]) == STAGES
    assert all(seconds >= 0 for seconds in stats["seconds"].values())


def test_plain_gives_the_same_tokens_in_more_rounds(speccompile: Cli, tiny_bundle: Path) -> None:
    arguments = ("run", tiny_bundle, "--prompt", TEXTS[1], "--max-new-tokens", 30, "--json")
    speculative, plain = (json.loads(speccompile(*arguments, *more)[1]) for more in ((), ("--plain",)))
    assert plain["token_ids"] == speculative["token_ids"]
    assert plain["stats"]["rounds"] == 29 > 1.3 * speculative["stats"]["rounds"]
    assert plain["stats"]["drafted"] == plain["stats"]["accepted"] == 0


def test_run_as_text(speccompile: Cli, tiny_bundle: Path, tiny_decoder: Decoder) -> None:
    status, out, err = speccompile("run", tiny_bundle, "--prompt", TEXTS[0], "--max-new-tokens", 20)
    want = tiny_decoder.generate(TEXTS[0], max_new_tokens=20)
    assert (status, out) == (0, want.text + "\n")
    assert "20 tokens" in err and "rounds" in err and "length" in err and "lossless" not in err


def test_run_in_a_chat(speccompile: Cli, tiny_bundle: Path, tiny_decoder: Decoder, tiny_checkpoint: Path) -> None:
    arguments = ("run", tiny_bundle, "--prompt", "Hello", "--chat", "--max-new-tokens", 8, "--json")
    answer = json.loads(speccompile(*arguments)[1])
    messages = [{"role": "user", "content": "Hello"}]
    assert answer["token_ids"] == tiny_decoder.generate(messages, max_new_tokens=8).token_ids
    tokenizer = read_model(tiny_checkpoint).tokenizer
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert answer["stats"]["prompt_tokens"] == len(expected)


def test_run_from_standard_input(speccompile: Cli, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = speccompile("run", tiny_bundle, "--prompt", TEXTS[2], "--max-new-tokens", 9, "--json")[1]
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXTS[2]))
    piped = speccompile("run", tiny_bundle, "--prompt", "-", "--max-new-tokens", 9, "--json")[1]
    assert json.loads(piped)["token_ids"] == json.loads(given)["token_ids"]


def test_run_with_sampling_options(speccompile: Cli, tiny_bundle: Path, tiny_decoder: Decoder) -> None:
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 3}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    arguments = ["run", tiny_bundle, "--prompt", TEXTS[0], "--max-new-tokens", 25, "--json", *flags]
    want = tiny_decoder.generate(TEXTS[0], max_new_tokens=25, **options)  # type: ignore[arg-type]
    assert json.loads(speccompile(*arguments)[1])["token_ids"] == want.token_ids
    assert want.token_ids != tiny_decoder.generate(TEXTS[0], max_new_tokens=25).token_ids


def test_run_until_a_stop_string(speccompile: Cli, tiny_bundle: Path, tiny_decoder: Decoder) -> None:
    whole = tiny_decoder.generate(TEXTS[0], max_new_tokens=40).text
    stop = whole[len(whole) // 2 :][:3]
    arguments = ["--stop", stop, "--stop", "never said", "--max-new-tokens", 40, "--json"]
    answer = json.loads(speccompile("run", tiny_bundle, "--prompt", TEXTS[0], *arguments)[1])
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == whole[: whole.index(stop)]


def test_typical_acceptance_says_that_it_is_lossy(speccompile: Cli, tiny_bundle: Path) -> None:
    arguments = ("run", tiny_bundle, "--prompt", TEXTS[0], "--temperature", 1, "--seed", 1, "--max-new-tokens", 9)
    assert "NOT lossless" in speccompile(*arguments, "--acceptance", "typical")[2]
    assert json.loads(speccompile(*arguments, "--acceptance", "typical", "--json")[1])["stats"]["lossless"] is False
    assert json.loads(speccompile(*arguments, "--json")[1])["stats"]["lossless"] is True
    assert "NOT lossless" in speccompile("run", "--help")[1]


def test_build_as_json(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tuned_heads: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.bundle"
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1], [0, 0]]")
    status, stdout, stderr = speccompile(
        "build", tiny_checkpoint, "--heads", tuned_heads, "--tree", tree, "--out", out, "--json"
    )
    assert (status, stderr) == (0, "")
    assert json.loads(stdout) == json.loads((out / "manifest.json").read_text())
    assert json.loads(stdout)["tree"]["paths"] == [[0], [1], [0, 0]]


def test_build_for_a_person(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = speccompile("build", tiny_checkpoint, "--method", "plain")
    assert (status, stdout) == (0, "")
    assert "tiny-plain.bundle" in stderr and "prefill" in stderr and "commit" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-plain.bundle"]


def test_build_warns_of_heads_that_name_no_model(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tuned_heads: Path, tmp_path: Path
) -> None:
    config = json.loads((tuned_heads / "config.json").read_text())
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config | {"target_fingerprint": None}))
    weights = tuned_heads / "medusa_lm_head.safetensors"
    (tmp_path / "heads" / weights.name).write_bytes(weights.read_bytes())
    arguments = ("build", tiny_checkpoint, "--heads", tmp_path / "heads", "--out", tmp_path / "out")
    status, _, stderr = speccompile(*arguments)
    assert status == 0 and "do not say which weights they were trained on" in " ".join(stderr.split())


def test_verify_as_json(speccompile: Cli, tiny_bundle: Path, tiny_checkpoint: Path, tuned_heads: Path) -> None:
    arguments = ("--against", tiny_checkpoint, "--heads", tuned_heads, "--threads", 1, "--json")
    status, out, err = speccompile("verify", tiny_bundle, *arguments)
    assert (status, err) == (0, "")
    figures = json.loads(out)
    assert set(figures) == set(json.loads((tiny_bundle / "manifest.json").read_text())["proof"])
    assert figures["tokens"]["ties"] == 0


def test_inspect_a_bundle(speccompile: Cli, tiny_bundle: Path) -> None:
    status, out, _ = speccompile("inspect", tiny_bundle, "--json")
    facts = json.loads(out)
    manifest = json.loads((tiny_bundle / "manifest.json").read_text())
    assert status == 0 and facts["kind"] == "bundle"
    assert facts["target"] == manifest["target"] and facts["proof"] == manifest["proof"]
    target, medusa = facts["graphs"]["target"], facts["graphs"]["medusa"]
    assert [value["name"] for value in target["inputs"]][:5] == [
        "input_ids",
        "position_ids",
        "tree_mask",
        "past_length",
        "logit_rows",
    ]
    shapes = {value["name"]: value["shape"] for value in target["inputs"] + target["outputs"]}
    assert len(shapes) == 5 + 6 + 3 + 6  # contract, 3 layers of keys and values, next_ids logits hidden, presents
    assert shapes["past_key_values.0.key"][1::2] == [2, 16] and shapes["logits"][2] == 320
    assert {value["name"]: value["shape"][2:] for value in medusa["outputs"]} == {
        "topk_ids": [3, 10],
        "topk_logprobs": [3, 10],
    }
    files = [tiny_bundle / "target.onnx", tiny_bundle / "target.onnx.data"]
    assert target["bytes"] == sum(file.stat().st_size for file in files)

    status, out, _ = speccompile("inspect", tiny_bundle)
    assert status == 0
    for word in ("nodes traced", "after fusing", "tree of 8 nodes", "prefill", "past_key_values.0.key", "MB"):
        assert word in " ".join(out.split())


def test_inspect_a_model(speccompile: Cli, tiny_checkpoint: Path) -> None:
    status, out, _ = speccompile("inspect", tiny_checkpoint, "--json")
    facts, source = json.loads(out), read_model(tiny_checkpoint)
    assert status == 0
    assert (facts["kind"], facts["architecture"]) == ("model", "LlamaForCausalLM")
    assert (facts["layers"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (3, 4, 2, 16)
    assert (facts["hidden_size"], facts["vocab_size"], facts["eos_ids"]) == (64, 320, [2, 4])
    assert facts["parameters"] == sum(p.numel() for p in source.model.parameters())
    assert facts["fingerprint"] == source.fingerprint and facts["chat_template"] is True


def test_inspect_heads(speccompile: Cli, tuned_heads: Path, tiny_heads: Path, tiny_checkpoint: Path) -> None:
    facts = json.loads(speccompile("inspect", tuned_heads, "--json")[1])
    assert (facts["kind"], facts["layout"], facts["heads"], facts["draft_vocabulary"]) == ("medusa heads", "A", 3, 320)
    assert facts["fingerprint"] == read_heads(tuned_heads).fingerprint
    assert facts["target_fingerprint"] == read_model(tiny_checkpoint).fingerprint
    facts = json.loads(speccompile("inspect", tiny_heads, "--json")[1])
    assert (facts["layout"], facts["lm_head"], facts["hidden_size"]) == ("B", "the target's", 64)


def test_inspect_nothing(speccompile: Cli, tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nowhere", "no such file or folder"), (tmp_path, "no heads found")):
        status, out, err = speccompile("inspect", path, "--json")
        assert (status, out) == (1, "") and err.count("\n") == 1
        assert err.startswith(f"error: {path}: ") and words in err


def test_zoo_list(speccompile: Cli) -> None:
    status, out, err = speccompile("zoo", "list", "--json")
    assert (status, err) == (0, "")
    names = [model["name"] for model in json.loads(out)]
    assert "smollm2-135m-instruct" in names
    assert speccompile("zoo", "list")[1].split() == names
    status, out, err = speccompile("zoo", "fetch", "gpt-17")
    assert (status, out) == (1, "") and "gpt-17" in err and "smollm2-135m-instruct" in err


def test_usage(speccompile: Cli) -> None:
    status, out, _ = speccompile("--version")
    assert status == 0 and out.endswith(f", version {importlib.metadata.version('speccompile')}\n")
    assert speccompile("--help")[0] == 0
    status, _, err = speccompile("run")
    assert status == 2 and "Missing argument 'BUNDLE'" in err
    status, _, err = speccompile("dance")
    assert status == 2 and "No such command 'dance'" in err


def test_run_and_help_need_no_compiler(tiny_bundle: Path) -> None:
    """Where torch, transformers and onnx are missing, `run` works and `build` says what to install."""
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'onnx', 'onnx_ir', 'onnxscript', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from speccompile.compiler.cli import main\n"
        "main()\n"
    )

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
        )

    answer = call("run", tiny_bundle, "--prompt", "Hello", "--max-new-tokens", 4, "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert len(json.loads(answer.stdout)["token_ids"]) == 4
    refused = call("build", "anything")
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr.startswith("error: this command needs the package '") and "pip install" in refused.stderr
