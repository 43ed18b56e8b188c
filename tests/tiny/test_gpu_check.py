"""The check for whoever has a GPU: lines that crash or hang end alone, tokens are judged, and it runs without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from rich.console import Console

from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.prove import PROMPTS, eager_logits
from speccompile.runtime import Decoder
from speccompile.tools import gpu_check
from speccompile.tools.gpu_check import (
    NO_GPU,
    NOT_RUN,
    Line,
    Lines,
    answers,
    check,
    costs,
    judged,
    logit_gaps,
    machine,
    runtimes,
    show,
    status_of,
)
from tests.tiny.gpu_steps import answer, crash, hang, place_of, refuse, stumble

ROOT = Path(__file__).parents[2]
NONE: dict[str, Any] = {
    "gpu": None,
    "providers": ["CPUExecutionProvider"],
    "versions": {"onnxruntime": "1.31.1", "tensorrt_rtx": "1.7.1"},
    "targets": {"tensorrt_rtx": ["sm86", "sm89"]},
    "missing": {"gpu": "0 devices"},
    "packages": None,
}


def gpu(target: str) -> dict[str, Any]:
    return {
        **NONE,
        "gpu": {"name": "a GPU", "target": target, "bytes": 1 << 34, "driver": 13000},
        "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
        "versions": {**NONE["versions"], "tensorrt": "11.4"},
    }


# ---- lines, each in a process of its own ----


def test_each_line_ends_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = Lines(budget=100)
    assert lines.run("costs", "a", "b", crash, {}) is None
    assert lines.run("costs", "a", "b", refuse, {}) is None
    assert lines.run("costs", "a", "b", stumble, {}) is None
    began = time.monotonic()
    assert lines.run("costs", "a", "b", hang, {"marker": str(tmp_path / "marker")}, limit=6) is None
    assert time.monotonic() - began < 20
    found = lines.run("costs", "a", "b", answer, {"value": 7})
    assert found is not None and found["value"] == 7 and found["process"] != os.getpid()
    assert (tmp_path / "marker").read_text() == "cleaned up"
    assert [(line.outcome, line.why) for line in lines.done] == [
        ("crashed", "its process ended with status -6; its last words: about to crash"),
        ("failed", "a.bundle: not for this GPU; build it again."),
        ("failed", "ValueError: first line"),
        ("timed out", "it took longer than 6 s"),
        ("ok", ""),
    ]
    assert "must not be seen" not in "".join(capfd.readouterr())


def test_a_line_that_the_budget_ends_has_not_failed(tmp_path: Path) -> None:
    lines = Lines(budget=6)
    assert lines.run("costs", "a", "b", hang, {"marker": str(tmp_path / "marker")}) is None
    (line,) = lines.done
    assert line.outcome == "skipped" and line.why.startswith("no more time was left: it took longer than ")
    assert status_of(lines, NONE) == 3


def test_packages_of_one_line(tmp_path: Path) -> None:
    """Two packages have a module onnxruntime: each line has its own, from the first import on."""
    ours = Path(onnxruntime.__file__).parent
    (tmp_path / "onnxruntime").symlink_to(ours)
    lines, before = Lines(budget=100), list(sys.path)
    for first, wanted in ((str(tmp_path), tmp_path / "onnxruntime"), (None, ours)):
        found = lines.run("machine", "", "", place_of, {"module": "onnxruntime"}, first=first)
        assert found == {"place": str(wanted / "__init__.py")}
    assert sys.path == before


def test_libraries_of_cuda_are_loaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a session for a provider is made: pip's lie where the system's loader does not look."""
    done: list[Any] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: done.append("preload"))
    monkeypatch.setattr(gpu_check, "load", lambda bundle, **given: done.append(given["provider"]))
    given = {"bundle": "a.bundle", "backend": "onnxruntime"}
    for step, rest in ((answers, {"prompts": [[1]], "seconds": 1.0}), (costs, {"captured": False})):
        for provider in ("CUDAExecutionProvider", None):
            with pytest.raises(AttributeError):  # there is no decoder
                step(**given, provider=provider, **rest)
    assert done == ["preload", "CUDAExecutionProvider", None] * 2


def test_an_installed_onnxruntime_for_cuda_is_found(tmp_path: Path) -> None:
    assert machine(str(tmp_path))["packages"] is None
    installed = tmp_path / "onnxruntime_gpu-1.31.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")
    facts = machine(str(tmp_path))
    assert facts["packages"] == str(tmp_path) and facts["versions"]["onnxruntime-gpu"] == "1.31.1"


def test_what_gets_no_time_is_named() -> None:
    lines = Lines(budget=1)
    assert lines.run("answers", "TensorRT", "medusa", crash, {}) is None
    assert lines.done == [Line("answers", "TensorRT", "medusa", "skipped", why="no time was left for it")]
    out = Console(record=True, width=200, quiet=True)
    out.quiet = False
    with out.capture() as said:
        show(lines, gpu("sm89"), out)
    assert "skipped: answers, TensorRT, medusa: no time was left for it" in said.get()
    assert NOT_RUN in said.get()


# ---- judging tokens ----


def test_gaps_are_those_of_eager_logits(tiny_decoder: Decoder, tiny_checkpoint: Path) -> None:
    answers = [(ids := tiny_decoder.encode(text), tiny_decoder.generate(ids, max_new_tokens=12)) for text in PROMPTS]
    prompt, answered = max(((ids, found.token_ids) for ids, found in answers), key=lambda pair: len(pair[1]))
    gaps, top = logit_gaps(tiny_decoder.target, prompt, answered)
    assert not gaps.any()
    other = list(answered)
    other[4] = (other[4] + 1) % 320
    logits, _ = eager_logits(read_model(tiny_checkpoint), [*prompt, *other])
    places = np.arange(len(prompt) - 1, len(prompt) + len(other) - 1)
    wanted = logits[places].max(-1) - logits[places, other]
    gaps, top = logit_gaps(tiny_decoder.target, prompt, other)
    np.testing.assert_allclose(gaps, wanted, atol=1e-4)
    assert gaps[4] > 0.01 and not gaps[:4].any()
    assert top == pytest.approx(np.abs(logits[places]).max(), rel=1e-5)


def test_fewer_answers_where_time_is_short(tiny_bundle: Path, tiny_decoder: Decoder) -> None:
    prompts = [tiny_decoder.encode(text) for text in PROMPTS[:3]]
    given = {"bundle": str(tiny_bundle), "backend": "onnxruntime", "provider": None, "prompts": prompts}
    for seconds, count in ((0.0, 2), (1e9, 6)):
        facts = answers(**given, seconds=seconds)
        assert facts["answers"] == facts["equal"] == count and facts["tokens_per_round"] >= 1


def test_verdicts() -> None:
    assert judged(np.zeros(3), 0.1) == "equal"
    assert judged(np.array([0, 0.1, 0]), 0.1) == "ties"
    assert judged(np.array([0, 0.11, 0]), 0.1) == "different"
    assert judged(np.array([0, np.nan]), 0.1) == "different"


# ---- what is tried, and the exit status ----


def test_what_is_tried() -> None:
    def tried(facts: dict[str, Any]) -> list[tuple[str, str | None, str | None, bool, bool]]:
        return [(way.backend, way.provider, way.target, way.runs, way.on_gpu) for way in runtimes(facts)]

    cpu = ("onnxruntime", None, None, True, False)
    cuda = ("onnxruntime", "CUDAExecutionProvider", None, True, True)
    assert tried(NONE) == [("tensorrt_rtx", None, "sm89", False, True), cpu]
    assert tried({**NONE, "versions": {"onnxruntime": "1.31.1"}}) == [cpu]
    full = ("tensorrt", None, None, True, True)
    only_built = ("tensorrt_rtx", None, "sm89", False, True)
    assert tried(gpu("sm86")) == [full, ("tensorrt_rtx", None, "sm86", True, True), cuda, cpu]
    assert tried(gpu("sm90")) == [full, cuda, only_built, cpu]
    own = {**gpu("sm90"), "providers": ["CPUExecutionProvider"], "packages": "a folder"}
    assert tried(own) == [full, cuda, only_built, cpu]
    assert [way.packages for way in runtimes(own)] == [None, "a folder", None, None]


@pytest.mark.parametrize(
    ("machine", "order"),
    [
        (NONE, ["a RTX engines", "a RTX answers", "a CPU", "b RTX engines", "b RTX answers", "b CPU"]),
        (
            gpu("sm90"),
            [
                *("a TRT engines", "a TRT answers", "a TRT costs", "a TRT costs", "a CUDA", "a CUDA costs"),
                *("b TRT engines", "b TRT answers", "b CUDA"),
                *("a RTX engines", "a RTX answers", "a CPU", "b RTX engines", "b RTX answers", "b CPU"),
            ],
        ),
    ],
)
def test_the_order_of_lines(machine: dict[str, Any], order: list[str]) -> None:
    """What the GPU runs comes before what only a build or the CPU does, for all bundles, as time may not suffice."""
    lines = Recorded(machine)
    check(lines, {"a": Path("a.bundle"), "b": Path("b.bundle")}, None, Path("work"), "fp16", None)
    short = {"TensorRT": "TRT", "TensorRT-RTX": "RTX"}
    said = []
    for line in lines.done:
        runtime = line.runtime.removesuffix(" (captured)")
        if runtime:
            name = "" if line.name == "answers" and runtime not in short else f" {line.name}"
            said.append(f"{line.bundle} {short.get(runtime, runtime.rpartition(' ')[2])}{name}")
    assert said == order


class Recorded(Lines):
    """Runs nothing, and says that it went well."""

    def __init__(self, machine: dict[str, Any]) -> None:
        super().__init__(budget=100)
        self.machine = machine

    def run(self, name: str, runtime: str, bundle: str, *_: Any, **__: Any) -> dict[str, Any]:
        self.done.append(Line(name, runtime, bundle, "ok"))
        return {"machine": self.machine, "prompts": {"prompts": [[1]]}}.get(name, {})


@pytest.mark.parametrize(
    ("outcome", "facts", "machine", "status"),
    [
        ("ok", {"different": 0}, gpu("sm89"), 0),
        ("ok", {"different": 1}, gpu("sm89"), 1),
        ("crashed", {}, gpu("sm89"), 1),
        ("skipped", {}, gpu("sm89"), 3),  # nothing has run on it
        ("skipped", {}, NONE, 3),
        ("failed", {}, NONE, 1),
        ("ok", {}, None, 1),
    ],
)
def test_exit_status(outcome: str, facts: dict[str, Any], machine: dict[str, Any] | None, status: int) -> None:
    lines = Lines(budget=1)
    lines.done.append(Line("answers", "TensorRT", "medusa", outcome, facts=facts))
    assert status_of(lines, machine) == status


def test_bf16_is_refused_at_once(tiny_bundle: Path, tmp_path: Path) -> None:
    """The judge, ONNX Runtime's CPU kernels, cannot compute in it."""
    copy, out = tmp_path / "sixteen.bundle", tmp_path / "out.json"
    shutil.copytree(tiny_bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["graphs"]["target"]["precision"] = "bf16"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    for options in (["--precision", "bf16"], ["--bundle", str(tiny_bundle), "--bundle", str(copy)]):
        found = CliRunner().invoke(gpu_check.main, [str(out), *options])
        said = " ".join(found.output.replace("│", " ").split())
        assert found.exit_code == 2 and "do not compute in bf16; use fp16." in said
        assert f"{options[-2]} {options[-1]}: ONNX Runtime's CPU kernels" in said.replace("- ", "-")
    assert not out.exists()


# ---- the whole of it ----


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a GPU")
def test_without_a_gpu(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """From the shell script on, in the environment of the tests, without network."""
    out = tmp_path / "out.json"
    options = ["--model", str(tiny_checkpoint), "--work", str(tmp_path / "work")]
    environment = {**os.environ, "SPECCOMPILE_WHEELS": str(tmp_path), "COLUMNS": "200"}
    if "VIRTUAL_ENV" in environment:
        command = ["bash", str(ROOT / "tools" / "gpu_check.sh")]
    else:  # the script would make an environment
        command = [sys.executable, "-m", "speccompile.tools.gpu_check"]
    done = subprocess.run(
        [*command, str(out), *options], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert NO_GPU in done.stdout
    found = json.loads(out.read_text())
    assert found["status"] == 3 and found["machine"]["gpu"] is None
    lines = {(line["name"], line["runtime"]): line for line in found["lines"]}
    assert lines["build", ""]["facts"]["proof"]["tokens"]["compared"] > 100
    answers = lines["answers", "ONNX Runtime, CPU"]["facts"]
    assert (answers["answers"], answers["different"]) == (8, 0)
    assert answers["equal"] + answers["ties"] == 8 and answers["plain_ms"] > 0
    if "tensorrt_rtx" in found["machine"]["versions"]:
        engines = lines["engines", "TensorRT-RTX"]["facts"]
        assert engines["target"] == "sm89" and engines["bytes"]["target"] > 1e4
        assert lines["answers", "TensorRT-RTX"]["outcome"] == "skipped"
        assert "skipped: answers, TensorRT-RTX" in done.stdout
        assert re.search(r"TensorRT-RTX +prompt-lookup +target +sm89 +\d+ MB +\d+ s +\d+\.\d GB", done.stdout)
    assert re.search(r"ONNX Runtime, CPU +prompt-lookup +[\d.]+ ms +[\d.]+ ms +[\d.]+x +[\d.]+ +\d equal", done.stdout)
    assert {line["outcome"] for line in found["lines"]} <= {"ok", "skipped"}
