"""Builds: what they publish, and that a bad model, bad heads, a full disk or a kill publishes nothing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from speccompile.compiler import build as building
from speccompile.compiler import cli
from speccompile.compiler.build import build
from speccompile.compiler.checkpoint import read_model
from speccompile.compiler.medusa_heads import read_heads, write_heads
from speccompile.compiler.publish import staged
from speccompile.graphs.errors import (
    BundleError,
    CheckpointError,
    GenerationError,
    ProofError,
    SpecCompileError,
    TraceError,
)
from speccompile.graphs.manifest import file_info
from speccompile.graphs.tree import TokenTree, load_tree
from speccompile.runtime import Decoder, load
from speccompile.runtime.bundle import Bundle
from tests.tiny.conftest import EOS_IDS, TEXTS, TREE, Cli, random_heads, write_tokenizer

DEAD_PID = 2**22 + 1  # above what Linux gives out


@pytest.fixture
def model(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_checkpoint` to damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


@pytest.fixture
def heads(tuned_heads: Path, tmp_path: Path) -> Path:
    """A copy of `tuned_heads` to damage."""
    return shutil.copytree(tuned_heads, tmp_path / "heads")


def refused(
    speccompile: Cli, error: type[SpecCompileError], words: tuple[str, ...], model: Path, out: Path, **options: Any
) -> None:
    """`build` raises `error`, the command line prints the same sentence, holding `words`, and nothing is left."""
    folder = out.parent
    before = sorted(folder.iterdir()) if folder.is_dir() else None
    arguments = {key: options[key] for key in options if key not in ("tree_file", "force")}
    if "tree_file" in options:
        arguments["tree"] = load_tree(options["tree_file"])
    with pytest.raises(error) as caught:
        build(model, out, force="force" in options, **arguments)
    sentence = str(caught.value)
    for word in words:
        assert word in sentence
    flags = {"tree_file": "--tree", "max_length": "--max-length", "heads": "--heads", "method": "--method"}
    given = [part for key, value in options.items() if key in flags for part in (flags[key], value)]
    given += ["--force"] if "force" in options else []
    status, stdout, stderr = speccompile("build", model, "--out", out, "--json", *given)
    assert (status, stdout) == (1, "")
    assert stderr == f"error: {sentence}\n" and "\n" not in sentence
    assert (sorted(folder.iterdir()) if folder.is_dir() else None) == before


# ---- what is published ----


def test_manifest(tiny_bundle: Path, tiny_checkpoint: Path, tuned_heads: Path) -> None:
    manifest = Bundle.open(tiny_bundle).manifest
    source, heads = read_model(tiny_checkpoint), read_heads(tuned_heads)
    assert manifest.method == "medusa"
    assert manifest.target.architecture == "LlamaForCausalLM"
    assert manifest.target.fingerprint == source.fingerprint
    assert manifest.target.config_fingerprint == source.config_fingerprint
    assert manifest.target.max_length == 128
    assert (manifest.target.layers, manifest.target.kv_heads, manifest.target.head_dim) == (3, 2, 16)
    assert (manifest.target.width, manifest.target.vocab_size) == (64, 320)
    assert manifest.heads is not None
    assert manifest.heads.fingerprint == heads.fingerprint
    assert manifest.heads.target_fingerprint == source.fingerprint
    assert (manifest.heads.layout, manifest.heads.count, manifest.heads.blocks, manifest.heads.top_k) == ("A", 3, 1, 10)
    assert manifest.eos_ids == EOS_IDS
    assert manifest.tokenizer.fingerprint == file_info(tiny_bundle / "tokenizer.json").sha256
    assert manifest.tokenizer.special_tokens["eos_token"] == "</s>"
    assert TokenTree.from_json(manifest.tree) == TREE
    assert manifest.graphs["target"].nodes < manifest.graphs["target"].traced_nodes
    assert manifest.versions["torch"] == torch.__version__


@pytest.mark.parametrize("speculate", [True, False])
def test_tokens_are_those_of_transformers(tiny_decoder: Decoder, tiny_checkpoint: Path, speculate: bool) -> None:
    source = read_model(tiny_checkpoint)
    for text in TEXTS:
        ids = source.tokenizer.encode(text)
        want = source.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=50)[0, len(ids) :].tolist()
        got = tiny_decoder.generate(text, max_new_tokens=50, speculate=speculate)
        assert got.token_ids == want
        assert got.finish_reason == ("eos" if want[-1] in EOS_IDS else "length")


def test_a_real_plain_build_as_a_user_runs_it(tiny_checkpoint: Path, tmp_path: Path, tiny_decoder: Decoder) -> None:
    """In its own process, traced anew, with nothing but the manifest on stdout and nothing at all on stderr."""
    out = tmp_path / "plain.bundle"
    arguments = ["build", tiny_checkpoint, "--method", "plain", "--out", out, "--max-length", 100, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "speccompile.compiler.cli", *map(str, arguments)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads(done.stdout)
    assert manifest == json.loads((out / "manifest.json").read_text())
    assert manifest["method"] == "plain" and manifest["heads"] is None and manifest["tree"] == {"paths": []}
    assert set(manifest["graphs"]) == {"target"} and manifest["target"]["max_length"] == 100
    assert set(manifest["proof"]) == {"prefill", "tree", "path", "commit", "row", "tokens"}
    plain = load(out, threads=1)
    assert plain.capacity == 100
    assert plain.generate(TEXTS[0], max_new_tokens=30).token_ids == (
        tiny_decoder.generate(TEXTS[0], max_new_tokens=30).token_ids
    )


def test_default_and_recommended_trees(untraced: None, tiny_checkpoint: Path, heads: Path, tmp_path: Path) -> None:
    build(tiny_checkpoint, tmp_path / "a", heads=heads)
    assert load(tmp_path / "a").tree == TokenTree.from_paths([[0], [0, 0], [0, 0, 0], [1], [2]])
    (heads / "tree.json").write_text("[[0], [0, 1]]")
    build(tiny_checkpoint, tmp_path / "b", heads=heads)
    assert load(tmp_path / "b").tree == TokenTree.from_paths([[0], [0, 1]])


def test_force_replaces_a_bundle_and_nothing_else(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.bundle"
    build(tiny_checkpoint, out, method="plain", max_length=50)
    refused(speccompile, BundleError, (str(out), "already exists", "--force"), tiny_checkpoint, out, method="plain")
    assert load(out).capacity == 50
    build(tiny_checkpoint, out, method="plain", max_length=60, force=True)
    assert load(out).capacity == 60
    assert list(tmp_path.iterdir()) == [out]

    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").write_text("words")
    words = (str(precious), "not a bundle", "another --out")
    refused(speccompile, BundleError, words, tiny_checkpoint, precious, method="plain", force=True)
    refused(speccompile, BundleError, words, tiny_checkpoint, precious / "chapter1.tex", method="plain", force=True)
    assert (precious / "chapter1.tex").read_text() == "words"


def test_out_where_nothing_can_be_written(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.bundle"
    refused(speccompile, BundleError, (str(tmp_path / "file"), "cannot write"), tiny_checkpoint, out, method="plain")


# ---- models ----


def edit_config(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], name: str) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def cut(file: Path, size: int) -> None:
    os.truncate(file, file.stat().st_size - size)


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m: edit_config(m, model_type="nonsense"), ("`nonsense`",)),
        (lambda m: edit_config(m, model_type="t5"), ("architecture 't5'", "not a causal language model")),
        (lambda m: (m / "config.json").unlink(), ("no config.json", ".gguf")),
        (lambda m: (m / "config.json").write_text("{"), ("config.json", "not a valid JSON")),
        (lambda m: shutil.rmtree(m), ("no such folder", ".gguf")),
        (
            lambda m: edit_tensors(m, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.safetensors"),
            ("'model.layers.1.mlp.up_proj.weight' is missing", "fetch it again"),
        ),
        (
            lambda m: edit_config(m, intermediate_size=80),
            ("'model.layers.0.mlp.down_proj.weight'", "another shape than config.json says", "9 such tensors"),
        ),
        (
            lambda m: edit_tensors(
                m, lambda t: t["model.layers.2.mlp.up_proj.weight"].fill_(np.nan), "model.safetensors"
            ),
            ("'model.layers.2.mlp.up_proj.weight' holds NaN",),
        ),
        (lambda m: cut(m / "model.safetensors", 1000), ("weights cannot be loaded", "fetch the checkpoint again")),
        (lambda m: (m / "model.safetensors").unlink(), ("weights cannot be loaded", "model.safetensors")),
        (lambda m: (m / "tokenizer.json").unlink(), ("no usable tokenizer",)),
        (lambda m: cut(m / "tokenizer.json", 1000), ("no usable tokenizer",)),
    ],
    ids=lambda value: None if callable(value) else value[0],
)
def test_bad_model(speccompile: Cli, model: Path, tmp_path: Path, damage: Damage, words: tuple[str, ...]) -> None:
    damage(model)
    refused(speccompile, CheckpointError, (str(model), *words), model, tmp_path / "out.bundle", method="plain")


SMALL = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("BertConfig", {**SMALL, "intermediate_size": 96}, ("Bert", "not causal")),
        ("BloomConfig", {"vocab_size": 320, "hidden_size": 64, "n_layer": 2, "n_head": 4}, ("Bloom", "position_ids")),
        ("MambaConfig", {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, ("Mamba",)),
        (
            "JambaConfig",
            {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2, "num_experts": 2, "use_mamba_kernels": False}
            | {"attn_layer_period": 2, "attn_layer_offset": 1},
            ("JambaForCausalLM", "cannot be traced"),
        ),
        ("FalconConfig", {**SMALL, "alibi": True}, ("Falcon", "0 of 2 layers")),
        (
            "LlamaConfig",
            {**SMALL, "intermediate_size": 96, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            ("Llama", "rope type 'dynamic'"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_architecture_that_cannot_be_traced(
    speccompile: Cli, tmp_path: Path, kind: str, sizes: dict[str, Any], words: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).save_pretrained(model)
    write_tokenizer(model)
    refused(speccompile, TraceError, words, model, tmp_path / "out.bundle", method="plain")


def test_code_that_a_model_brings_is_never_run(speccompile: Cli, model: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit_config(model, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    refused(speccompile, CheckpointError, (str(model), "custom code"), model, tmp_path / "out", method="plain")
    assert not ran.exists()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_pickled_code_in_a_model_is_never_run(speccompile: Cli, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "ran")}, model / "pytorch_model.bin")
    words = (str(model), "hold code, which is never run", "safetensors")
    refused(speccompile, CheckpointError, words, model, tmp_path / "out", method="plain")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [-1, 0, 1, 129])
def test_max_length(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path, length: int) -> None:
    words = ("--max-length", f"{length} is outside 2 .. 128")
    refused(speccompile, SpecCompileError, words, tiny_checkpoint, tmp_path / "out", method="plain", max_length=length)


# ---- heads ----

HEADS_FILE = "medusa_lm_head.safetensors"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda h: cut(h / HEADS_FILE, 10), (HEADS_FILE, "damaged")),
        (lambda h: edit_tensors(h, lambda t: t.pop("1.0.linear.weight"), HEADS_FILE), ("head 1 block 0",)),
        (lambda h: edit_tensors(h, lambda t: t.pop("2.1.weight"), HEADS_FILE), ("head 2 has no lm_head",)),
        (
            lambda h: edit_tensors(h, lambda t: t["0.0.linear.bias"].fill_(np.inf), HEADS_FILE),
            ("head 0 block 0 bias", "NaN or infinite"),
        ),
        (lambda h: edit_config(h, medusa_num_heads=5), ("config.json says 5 heads", "holds 3")),
        (lambda h: (h / HEADS_FILE).unlink(), ("no heads found",)),
    ],
    ids=lambda value: None if callable(value) else value[0],
)
def test_bad_heads(
    speccompile: Cli, tiny_checkpoint: Path, heads: Path, tmp_path: Path, damage: Damage, words: tuple[str, ...]
) -> None:
    damage(heads)
    refused(speccompile, CheckpointError, (str(heads), *words), tiny_checkpoint, tmp_path / "out", heads=heads)


def test_heads_of_another_hidden_size(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_heads(random_heads(hidden_size=48), tmp_path / "heads")
    words = (str(tmp_path / "heads"), "hidden size 48", "target has 64", "made for this model")
    refused(speccompile, CheckpointError, words, tiny_checkpoint, tmp_path / "out", heads=tmp_path / "heads")


def test_heads_of_another_model(
    speccompile: Cli, tiny_checkpoint: Path, other_checkpoint: Path, heads: Path, tmp_path: Path
) -> None:
    ours, theirs = (read_model(path).fingerprint for path in (tiny_checkpoint, other_checkpoint))
    words = (str(heads), ours, theirs, "train new heads")
    refused(speccompile, CheckpointError, words, other_checkpoint, tmp_path / "out", heads=heads)


def test_heads_with_code_in_them(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    for write in (torch.save, lambda bomb, path: path.write_bytes(pickle.dumps(bomb))):
        write({"0.0.linear.weight": Bomb(tmp_path / "ran")}, file)
        words = (str(file), "holds code, which is never run")
        refused(speccompile, CheckpointError, words, tiny_checkpoint, tmp_path / "out", heads=file)
    assert not (tmp_path / "ran").exists()


def test_model_without_heads(speccompile: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    refused(speccompile, CheckpointError, (str(tiny_checkpoint), "no Medusa heads"), tiny_checkpoint, tmp_path / "out")


def test_heads_for_a_plain_bundle(speccompile: Cli, tiny_checkpoint: Path, heads: Path, tmp_path: Path) -> None:
    status, _, err = speccompile("build", tiny_checkpoint, "--method", "plain", "--heads", heads, "--out", tmp_path)
    assert status == 2 and "--heads does not go with --method plain" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], ("tree: depth 4 needs 4 heads", "these are 3")),
        ([[0], [320]], ("tree: rank 320", "320 draft tokens")),
    ],
    ids=["deeper", "wider"],
)
def test_tree_that_the_heads_cannot_fill(
    speccompile: Cli, tiny_checkpoint: Path, heads: Path, tmp_path: Path, paths: list[list[int]], words: tuple[str, ...]
) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(paths))
    refused(speccompile, BundleError, words, tiny_checkpoint, tmp_path / "out", heads=heads, tree_file=file)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("mc_sim_8b", ("'mc_sim_8b' is unknown", "mc_sim_7b_63", "chain-N")),
        ("nowhere.json", ("nowhere.json", "No such file")),
        ("broken.json", ("broken.json", "not a tree file")),
        ("gap.json", ("gap.json", "[0, 0]", "prefix [0]")),
    ],
)
def test_bad_tree(
    speccompile: Cli, tiny_checkpoint: Path, heads: Path, tmp_path: Path, tree: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "broken.json").write_text("[[0]")
    (tmp_path / "gap.json").write_text("[[1], [0, 0]]")
    given = tmp_path / tree if tree.endswith(".json") else tree
    status, out, err = speccompile(
        "build", tiny_checkpoint, "--heads", heads, "--tree", given, "--out", tmp_path / "out", "--json"
    )
    assert (status, out) == (1, "") and err.count("\n") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()


# ---- a target graph with NaN ----


def test_nan_in_the_graph_fails_the_proof(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = building.write_target

    def poisoned(source: Any, found: Any, tail: Any, plan: building.Plan) -> Any:
        info = write(source, found, tail, plan)
        weights = np.fromfile(plan.folder / "target.onnx.data", np.float32)
        weights[-320 * 64 :] = np.nan  # the lm_head
        weights.tofile(plan.folder / "target.onnx.data")
        return info

    monkeypatch.setattr(building, "write_target", poisoned)
    words = ("proof 'prefill'", "nan", "Nothing was published")
    refused(speccompile, ProofError, words, tiny_checkpoint, tmp_path / "out", method="plain")


# ---- full disks ----


def test_disk_full_by_decree(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python, numpy's tofile and tokenizers raise on a full disk."""
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("200000 requested and 51200 written"),
        Exception("No space left on device (os error 28)"),
    ):

        def write(*_: object, error: Exception = error) -> NoReturn:
            raise error

        monkeypatch.setattr(building, "write_tokenizer", write)
        words = (str(tmp_path), "the disk is full", "nothing was published", "free some space")
        refused(speccompile, BundleError, words, tiny_checkpoint, tmp_path / "out", method="plain")


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of that size; skips the test where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# In this order are written: target.onnx and its weights (540 kB), medusa.onnx and its weights (290 kB), the rest.
@pytest.mark.parametrize("kilobytes", [4, 16, 200, 600, None])
def test_disk_full(
    speccompile: Cli,
    untraced: None,
    tiny_checkpoint: Path,
    tuned_heads: Path,
    tiny_bundle: Path,
    tmp_path: Path,
    kilobytes: int | None,
) -> None:
    pages = sum(-(-file.stat().st_size // 4096) for file in tiny_bundle.iterdir())
    with small_disk(tmp_path / "disk", kilobytes or 4 * pages - 16) as disk:
        words = (str(disk), "the disk is full", "nothing was published", "free some space")
        refused(speccompile, BundleError, words, tiny_checkpoint, disk / "out", heads=tuned_heads)


# ---- kills ----


def run_in_child(arguments: list[str], log: Path) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    sys.argv = ["speccompile", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background inherit that it is ignored
    cli.main()


@contextmanager
def build_that_waits(
    monkeypatch: pytest.MonkeyPatch, arguments: list[object], folder: Path
) -> Iterator[multiprocessing.process.BaseProcess]:
    """The command line in a child process, which stands still when the graphs are written and the rest is not."""
    reached = folder / "reached"

    def wait(*_: object) -> None:
        reached.touch()
        time.sleep(120)

    with monkeypatch.context() as patch:
        patch.setattr(building, "write_tokenizer", wait)
        child = multiprocessing.get_context("fork").Process(
            target=run_in_child, args=([str(argument) for argument in arguments], folder / "log")
        )
        child.start()
    try:
        deadline = time.monotonic() + 60
        while not reached.exists():
            assert child.is_alive() and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.02)
        yield child
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(
    untraced: None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    out = tmp_path / "bundles" / "out"
    with build_that_waits(
        monkeypatch, ["build", tiny_checkpoint, "--method", "plain", "--out", out, "--json"], tmp_path
    ) as child:
        assert [file.name for file in out.parent.iterdir()] == [f".out.partial-{child.pid}"]
        os.kill(child.pid or 0, signum)
        child.join(30)
        assert child.exitcode == 130
    assert not list(out.parent.iterdir())
    log = (tmp_path / "log").read_text()
    assert log.strip() == "error: interrupted; nothing half-written was left behind."


def test_killed(
    speccompile: Cli, untraced: None, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundles" / "out"
    arguments = ["build", tiny_checkpoint, "--method", "plain", "--out", out, "--json"]
    with build_that_waits(monkeypatch, arguments, tmp_path) as child:
        child.kill()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
    (partial,) = out.parent.iterdir()
    assert partial.name == f".out.partial-{child.pid}" and (partial / "target.onnx").is_file()
    with pytest.raises(BundleError, match="not a bundle"):
        load(partial)

    assert speccompile(*arguments)[0] == 0
    assert list(out.parent.iterdir()) == [out]
    assert load(out, threads=1).generate("Hello", max_new_tokens=3).stats.emitted == 3


def test_what_is_left_beside_a_target(tmp_path: Path) -> None:
    """Folders of the dead go, those of the living and of other targets stay."""
    dead = tmp_path / f".out[1].partial-{DEAD_PID}"
    same_id = tmp_path / f".out[1].partial-{os.getpid()}"  # as in a container, where every run may have the same one
    living = tmp_path / f".out[1].partial-{os.getppid()}"
    other = tmp_path / f".out1.partial-{DEAD_PID}"
    for folder in (dead, same_id, living, other):
        folder.mkdir()
        (folder / "file").write_text("old")
    with staged(tmp_path / "out[1]") as folder:
        assert folder == same_id and not list(folder.iterdir())
        (folder / "new").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"out[1]", living.name, other.name}
    assert [path.name for path in (tmp_path / "out[1]").iterdir()] == ["new"]


def test_a_bundle_killed_between_its_two_renames_comes_back(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / f".out.old-{DEAD_PID}")
    (tmp_path / f".out.partial-{DEAD_PID}").mkdir()
    with pytest.raises(BundleError, match="stopped"), staged(tmp_path / "out", replace=True):
        raise BundleError("stopped")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Bundle.open(tmp_path / "out").manifest.method == "medusa"


def test_a_failing_rename_puts_the_old_bundle_back(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(tiny_bundle, tmp_path / "out")
    whole = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return whole(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="Input/output"), staged(out, replace=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Bundle.open(out).manifest.method == "medusa"


# ---- prompts that a bundle cannot take ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], ("prompt", "empty")),
        (["--prompt", "x" * 200], ("prompt: 200 tokens", "cache of 128", "--max-length")),
        (["--prompt", "x" * 200, "--chat"], ("tokens do not fit the cache of 128",)),
        (["--prompt", "x", "--max-new-tokens", "0"], ("max_new_tokens: 0",)),
        (["--prompt", "x", "--stop", ""], ("stop", "empty")),
        (["--prompt", "x", "--temperature", "-1"], ("temperature", "-1")),
        (["--prompt", "x", "--top-p", "1.5"], ("top_p", "1.5")),
        (["--prompt", "x", "--acceptance", "typical"], ("typical", "temperature above 0")),
        (["--prompt", "x", "--provider", "Abacus"], ("provider 'Abacus'", "CPUExecutionProvider")),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_request(speccompile: Cli, tiny_bundle: Path, arguments: list[str], words: tuple[str, ...]) -> None:
    status, out, err = speccompile("run", tiny_bundle, *arguments, "--json")
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_chat_without_a_template(speccompile: Cli, untraced: None, model: Path, tmp_path: Path) -> None:
    write_tokenizer(model, chat_template=None)
    (model / "chat_template.jinja").unlink()
    out = tmp_path / "out.bundle"
    build(model, out, method="plain")
    assert not (out / "chat_template.jinja").exists()
    with pytest.raises(GenerationError, match="chat"):
        load(out, threads=1).generate([{"role": "user", "content": "Hello"}])
    status, _, err = speccompile("run", out, "--prompt", "Hello", "--chat")
    assert status == 1 and err.count("\n") == 1
    assert "no chat_template.jinja" in err and "plain text" in err
    assert speccompile("run", out, "--prompt", "Hello", "--max-new-tokens", 3, "--json")[0] == 0
