"""Reading a target model: its fingerprint is the weights' and nothing else's, and its ends of text are all found."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from speccompile.compiler.checkpoint import read_model
from speccompile.graphs.errors import CheckpointError
from tests.tiny.conftest import EOS_IDS, write_tokenizer
from tests.tiny.models import tiny_model


def resave(checkpoint: Path, folder: Path, **options: Any) -> Path:
    """The same model, written another way."""
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").unlink()
    dtype = options.pop("dtype", torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    model.save_pretrained(folder, **options)
    return folder


def test_what_is_read(tiny_checkpoint: Path) -> None:
    source = read_model(tiny_checkpoint)
    assert source.architecture == "LlamaForCausalLM"
    assert source.eos_ids == tuple(EOS_IDS)
    assert not source.model.training
    assert {parameter.dtype for parameter in source.model.parameters()} == {torch.float32}
    assert source.lm_head is source.model.lm_head
    assert source.tokenizer.decode(source.tokenizer.encode("a fox")) == "a fox"


def test_fingerprint_by_another_way(tiny_checkpoint: Path) -> None:
    """sha256 over "name (shape)\\n" and the little-endian float32 bytes, in order of name, straight from the file."""
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].numpy().astype("<f4")
        digest.update(f"{name} {array.shape}\n".encode() + array.tobytes())
    assert read_model(tiny_checkpoint).fingerprint == digest.hexdigest()


def test_one_file_or_many(tiny_checkpoint: Path, tmp_path: Path) -> None:
    sharded = resave(tiny_checkpoint, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    one, many = read_model(tiny_checkpoint), read_model(sharded)
    assert many.fingerprint == one.fingerprint
    assert many.config_fingerprint == one.config_fingerprint


def test_a_missing_shard(tiny_checkpoint: Path, tmp_path: Path) -> None:
    sharded = resave(tiny_checkpoint, tmp_path / "sharded", max_shard_size="100KB")
    sorted(sharded.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match=f"{sharded}: "):
        read_model(sharded)


def test_a_narrower_file_of_the_same_numbers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    half = resave(tiny_checkpoint, tmp_path / "half", dtype=torch.bfloat16)
    tensors = {name: tensor.float() for name, tensor in load_file(half / "model.safetensors").items()}
    widened = shutil.copytree(half, tmp_path / "widened")
    save_file(tensors, widened / "model.safetensors", metadata={"format": "pt"})
    narrow, wide = read_model(half), read_model(widened)
    assert narrow.fingerprint == wide.fingerprint != read_model(tiny_checkpoint).fingerprint
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.float32}


def test_the_smallest_change_of_one_weight(tiny_checkpoint: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(tiny_checkpoint, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    weight = tensors["model.layers.2.self_attn.v_proj.weight"]
    weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(1e9))
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    before, after = read_model(tiny_checkpoint), read_model(changed)
    assert after.fingerprint != before.fingerprint
    assert after.config_fingerprint == before.config_fingerprint


def test_tied_weights_count_once(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    write_tokenizer(tmp_path)
    before = read_model(tmp_path)
    assert before.model.lm_head.weight is before.model.model.embed_tokens.weight
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_model(tmp_path).fingerprint == before.fingerprint


def test_config_fingerprint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = read_model(tiny_checkpoint)

    def with_config(name: str, **changes: Any) -> str:
        folder = shutil.copytree(tiny_checkpoint, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        source = read_model(folder)
        assert source.fingerprint == before.fingerprint
        return source.config_fingerprint

    assert with_config("elsewhere", transformers_version="4.0.0", _name_or_path="someone/tiny") == (
        before.config_fingerprint
    )
    assert with_config("epsilon", rms_norm_eps=1e-5) != before.config_fingerprint


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([2, 4], 2, (2, 4)),
        (4, 2, (4,)),
        (None, [2, 3], (2, 3)),
        (None, None, (2,)),  # the tokenizer's </s>
    ],
)
def test_ends_of_text(
    tiny_checkpoint: Path, tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        data = json.loads((folder / name).read_text())
        if value is None and name == "generation_config.json":
            (folder / name).write_text(json.dumps({"do_sample": False}))
        else:
            (folder / name).write_text(json.dumps(data | {"eos_token_id": value}))
    assert read_model(folder).eos_ids == expected


def test_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.gguf: no such file; give a transformers folder or a \.gguf file"):
        read_model(tmp_path / "no.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.gguf: no such file"):
        read_model(tmp_path / "folder.gguf")
    for content in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, b"PK" * 50):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.gguf: "):
            read_model(tmp_path / "bad.gguf")
