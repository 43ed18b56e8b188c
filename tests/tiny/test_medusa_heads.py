"""Medusa checkpoints: every layout loads to the same heads, and nothing wrong loads at all."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from speccompile.compiler.medusa_heads import (
    MedusaHeads,
    check_against,
    head_offset,
    read_heads,
    reduce_vocabulary,
    write_heads,
)
from speccompile.graphs.errors import CheckpointError

HEADS, LAYERS, HIDDEN, VOCABULARY = 11, 2, 6, 9  # eleven heads: sorted as text, "10" would come before "2"
Tensors = dict[str, torch.Tensor]


def make_heads(seed: int = 0, own: bool = True, bias: bool = True, **fields: Any) -> MedusaHeads:
    torch.manual_seed(seed)
    blocks = tuple(
        tuple((torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN) if bias else None) for _ in range(LAYERS))
        for _ in range(HEADS)
    )
    lm_heads = tuple(torch.randn(VOCABULARY, HIDDEN) for _ in range(HEADS)) if own else None
    return MedusaHeads(HIDDEN, blocks, lm_heads, **fields)


def layout_tensors(heads: MedusaHeads, prefix: str = "") -> Tensors:
    """Layouts A, B, C and ModelOpt, written out from the reference notes, section 1.1 and 1.2."""
    tensors = {}
    for h, blocks in enumerate(heads.blocks):
        for n, (weight, bias) in enumerate(blocks):
            tensors[f"{prefix}{h}.{n}.linear.weight"] = weight
            if bias is not None:
                tensors[f"{prefix}{h}.{n}.linear.bias"] = bias
        if heads.lm_heads is not None:
            tensors[f"{prefix}{h}.{LAYERS}.weight"] = heads.lm_heads[h]
    return tensors


def vllm_tensors(heads: MedusaHeads, prefix: str = "") -> Tensors:
    tensors = {}
    for h, blocks in enumerate(heads.blocks):
        for n, (weight, bias) in enumerate(blocks):
            tensors[f"{prefix}blocks.{h}.layers.{n}.weight"] = weight
            if bias is not None:
                tensors[f"{prefix}blocks.{h}.layers.{n}.bias"] = bias
    if heads.lm_heads is not None and len(heads.lm_heads) == 1:
        tensors[f"{prefix}lm_head.weight"] = heads.lm_heads[0]
    elif heads.lm_heads is not None:
        tensors |= {f"{prefix}lm_heads.{h}.weight": matrix for h, matrix in enumerate(heads.lm_heads)}
    return tensors


def base_model() -> Tensors:
    return {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, HIDDEN),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN),
    }


def write_config(folder: Path, **config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def save(folder: Path, tensors: Tensors, name: str = "medusa_lm_head.safetensors") -> Path:
    if name.endswith(".safetensors"):
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def assert_same(loaded: MedusaHeads, heads: MedusaHeads) -> None:
    assert loaded.hidden_size == heads.hidden_size
    assert [len(blocks) for blocks in loaded.blocks] == [len(blocks) for blocks in heads.blocks]
    for loaded_blocks, blocks in zip(loaded.blocks, heads.blocks, strict=True):
        for (loaded_weight, loaded_bias), (weight, bias) in zip(loaded_blocks, blocks, strict=True):
            torch.testing.assert_close(loaded_weight, weight, rtol=0, atol=0)
            torch.testing.assert_close(loaded_bias, bias, rtol=0, atol=0) if bias is not None else None
            assert (loaded_bias is None) == (bias is None)
    assert (loaded.lm_heads is None) == (heads.lm_heads is None)
    for loaded_matrix, matrix in zip(loaded.lm_heads or (), heads.lm_heads or (), strict=True):
        torch.testing.assert_close(loaded_matrix, matrix, rtol=0, atol=0)
    assert loaded.fingerprint == heads.fingerprint


# ---- layouts ----


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("own", [True, False], ids=["A", "B"])
def test_layouts_a_and_b(tmp_path: Path, file: str, own: bool) -> None:
    heads = make_heads(own=own)
    write_config(tmp_path, medusa_num_heads=HEADS, medusa_num_layers=LAYERS, base_model_name_or_path="some/base")
    loaded = read_heads(save(tmp_path, layout_tensors(heads), file))
    assert_same(loaded, heads)
    assert loaded.layout == ("A" if own else "B")
    assert loaded.base_model == "some/base"
    assert_same(read_heads(tmp_path / file), heads)


def test_half_precision_file_is_read_as_float32(tmp_path: Path) -> None:
    heads = make_heads(own=False)
    save(tmp_path, {key: tensor.half() for key, tensor in layout_tensors(heads).items()})
    weight = read_heads(tmp_path).blocks[10][1][0]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, heads.blocks[10][1][0].half().float(), rtol=0, atol=0)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(("prefix", "layout"), [("medusa_head.", "C"), ("medusa_heads.", "ModelOpt")])
def test_merged_single_file(tmp_path: Path, file: str, prefix: str, layout: str) -> None:
    heads = make_heads()
    loaded = read_heads(save(tmp_path, base_model() | layout_tensors(heads, prefix), file))
    assert_same(loaded, heads)
    assert loaded.layout == layout


def test_merged_without_own_matrices_does_not_take_the_base_lm_head(tmp_path: Path) -> None:
    heads = make_heads(own=False)
    loaded = read_heads(save(tmp_path, base_model() | layout_tensors(heads, "medusa_head."), "model.safetensors"))
    assert_same(loaded, heads)


def save_sharded(folder: Path, heads: MedusaHeads) -> dict[str, str]:
    tensors = layout_tensors(heads, "medusa_head.")
    first = {key: tensor for key, tensor in tensors.items() if key.startswith("medusa_head.1")}
    shards = {
        "model-00001-of-00003.safetensors": base_model(),
        "model-00002-of-00003.safetensors": first,
        "model-00003-of-00003.safetensors": {key: tensors[key] for key in tensors.keys() - first.keys()},
    }
    for name, shard in shards.items():
        save(folder, shard, name)
    weight_map = {key: name for name, shard in shards.items() for key in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_merged_sharded_reads_only_shards_with_heads(tmp_path: Path) -> None:
    heads = make_heads()
    save_sharded(tmp_path, heads)
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"never opened")
    loaded = read_heads(tmp_path)
    assert_same(loaded, heads)
    assert loaded.layout == "C"


def test_merged_sharded_errors(tmp_path: Path) -> None:
    weight_map = save_sharded(tmp_path, make_heads())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"medusa_head.0.0.linear.weight": "../out.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"index\.json: shard '\.\./out\.safetensors' is not a plain file"):
        read_heads(tmp_path)
    wrong = weight_map | {"medusa_head.0.0.linear.weight": "model-00002-of-00003.safetensors"}
    index.write_text(json.dumps({"weight_map": wrong | {"medusa_head.99.0.linear.weight": wrong["lm_head.weight"]}}))
    with pytest.raises(CheckpointError, match=r"'medusa_head\.99\.0\.linear\.weight' is not in shard model-00001"):
        read_heads(tmp_path)
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    with pytest.raises(CheckpointError, match="weight_map is missing"):
        read_heads(tmp_path)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm(tmp_path: Path, prefix: str, bias: bool) -> None:
    heads = make_heads(bias=bias)
    write_config(tmp_path, model_type="medusa", num_heads=HEADS, num_hidden_layers=LAYERS, medusa_fc_bias=bias)
    loaded = read_heads(save(tmp_path, vllm_tensors(heads, prefix), "model.safetensors"))
    assert_same(loaded, heads)
    assert loaded.layout == "vLLM"
    assert loaded.config_heads == HEADS


def test_vllm_one_lm_head_for_all(tmp_path: Path) -> None:
    """Under `lm_head.weight`, or under `lm_heads.0.weight` when the config says original_lm_head."""
    heads = make_heads(own=False)
    shared = MedusaHeads(HIDDEN, heads.blocks, (torch.randn(VOCABULARY, HIDDEN),))
    assert shared.lm_heads is not None
    assert_same(read_heads(save(tmp_path, vllm_tensors(shared), "model.safetensors")), shared)

    tensors = vllm_tensors(heads) | {"lm_heads.0.weight": shared.lm_heads[0]}
    save(tmp_path, tensors, "model.safetensors")
    write_config(tmp_path, model_type="medusa", original_lm_head=True)
    assert_same(read_heads(tmp_path), shared)
    write_config(tmp_path, model_type="medusa")
    with pytest.raises(CheckpointError, match="head 1 has no lm_head, but head 0 has one"):
        read_heads(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_vllm_token_map_with_whole_or_reduced_matrices(tmp_path: Path, whole: bool) -> None:
    heads = make_heads()
    assert heads.lm_heads is not None
    token_map = torch.tensor([7, 0, 3])
    reduced = MedusaHeads(HIDDEN, heads.blocks, tuple(m[token_map] for m in heads.lm_heads), token_map)
    tensors = vllm_tensors(heads if whole else reduced) | {"token_map": token_map.int()}
    loaded = read_heads(save(tmp_path, tensors, "model.safetensors"))
    assert_same(loaded, reduced)
    assert loaded.token_map is not None
    assert loaded.token_map.tolist() == [7, 0, 3]
    assert loaded.token_map.dtype == torch.int64


def test_vllm_truncated_vocabulary_needs_its_token_map(tmp_path: Path) -> None:
    save(tmp_path, vllm_tensors(make_heads()), "model.safetensors")
    write_config(tmp_path, model_type="medusa", vocab_size=50, truncated_vocab_size=VOCABULARY)
    with pytest.raises(CheckpointError, match="truncated_vocab_size 9 of 50 but there is no token_map"):
        read_heads(tmp_path)


def test_equal_matrices_become_one(tmp_path: Path) -> None:
    heads = make_heads()
    assert heads.lm_heads is not None
    same = MedusaHeads(HIDDEN, heads.blocks, heads.lm_heads[:1] * HEADS)
    loaded = read_heads(save(tmp_path, layout_tensors(same)))
    assert loaded.lm_heads is not None
    assert len(loaded.lm_heads) == 1
    assert loaded.fingerprint == same.fingerprint


# ---- fingerprint, writing ----


def test_fingerprint_sees_every_tensor() -> None:
    heads = make_heads()
    assert heads.lm_heads is not None
    prints = {heads.fingerprint, make_heads(own=False).fingerprint, make_heads(seed=1).fingerprint}
    changed = heads.lm_heads[10].clone()
    changed[3, 2] = torch.nextafter(changed[3, 2], torch.tensor(9.0))
    prints.add(MedusaHeads(HIDDEN, heads.blocks, (*heads.lm_heads[:10], changed)).fingerprint)
    prints.add(MedusaHeads(HIDDEN, heads.blocks[::-1], heads.lm_heads).fingerprint)
    prints.add(MedusaHeads(HIDDEN, heads.blocks, heads.lm_heads, torch.arange(VOCABULARY)).fingerprint)
    assert len(prints) == 6
    assert make_heads().fingerprint == heads.fingerprint


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_write_then_read(tmp_path: Path, own: bool, mapped: bool) -> None:
    token_map = torch.tensor([5, 1, 2, 3, 4, 0, 8, 7, 6]) if mapped else None
    heads = make_heads(own=own, token_map=token_map, target_fingerprint="abc", base_model="some/base")
    write_heads(heads, tmp_path / "out", {"note": "x", "medusa_num_heads": 99}, dtype=torch.float32)
    loaded = read_heads(tmp_path / "out")
    assert_same(loaded, heads)
    assert (loaded.layout, loaded.config_heads) == ("A" if own else "B", HEADS)
    assert (loaded.target_fingerprint, loaded.base_model) == ("abc", "some/base")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["note"] == "x"
    assert config["medusa_num_layers"] == LAYERS
    assert config["hidden_size"] == HIDDEN
    assert config.get("version") == (None if own else "2")  # "2" makes Medusa's reader use the base lm_head


def test_write_in_half_precision(tmp_path: Path) -> None:
    heads = make_heads(own=False, token_map=torch.tensor([70000, 3]))
    write_heads(heads, tmp_path, {"target_fingerprint": "abc"})
    loaded = read_heads(tmp_path)
    torch.testing.assert_close(loaded.blocks[3][1][0], heads.blocks[3][1][0].half().float(), rtol=0, atol=0)
    assert loaded.token_map is not None
    assert loaded.token_map.tolist() == [70000, 3]  # ids stay integers
    assert loaded.target_fingerprint == "abc"
    bias = heads.blocks[2][0][1]
    assert bias is not None
    bias[4] = 1e6
    with pytest.raises(CheckpointError, match=r"2\.0\.linear\.bias reaches 1e\+06, too large for torch\.float16"):
        write_heads(heads, tmp_path)


def test_shared_own_matrix_survives_writing(tmp_path: Path) -> None:
    heads = MedusaHeads(HIDDEN, make_heads().blocks, (torch.randn(VOCABULARY, HIDDEN),))
    write_heads(heads, tmp_path, dtype=torch.float32)
    assert_same(read_heads(tmp_path), heads)


# ---- damaged and hostile files ----


def test_file_counts_when_config_says_fewer_heads(tmp_path: Path) -> None:
    """The published v1.3 configs say 2 heads for files of 5."""
    write_config(tmp_path, medusa_num_heads=2, medusa_num_layers=1)
    heads = read_heads(save(tmp_path, layout_tensors(make_heads())))
    assert (heads.num_heads, heads.num_layers, heads.config_heads) == (HEADS, LAYERS, 2)
    assert any(
        "says 2 heads, the file holds 11" in warning for warning in check_against(heads, HIDDEN, VOCABULARY, None)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 12}, "says 12 heads but the file holds 11"),
        ({"medusa_num_layers": 3}, "says 3 blocks per head but the file holds 2"),
        ({"medusa": {"num_medusa_heads": 12}}, "says 12 heads but the file holds 11"),
        ({"model_type": "medusa", "num_heads": 12}, "says 12 heads but the file holds 11"),
        ({"medusa_num_heads": "many"}, "'many' as number of heads"),
        ({"target_fingerprint": 5}, "has 5 as target_fingerprint; expected a string"),
    ],
)
def test_config_against_file(tmp_path: Path, config: dict[str, object], message: str) -> None:
    save(tmp_path, layout_tensors(make_heads()))
    write_config(tmp_path, **config)
    with pytest.raises(CheckpointError, match=rf"medusa_lm_head\.safetensors: config\.json .*{message}"):
        read_heads(tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("4.0.linear.weight", "head 4 block 0 has no weight"),
        ("10.1.linear.weight", "head 10 block 1 has no weight"),
        ("4.0.linear.bias", "head 4 block 0 and head 0 block 0 differ in having a bias"),
        ("4.2.weight", "head 4 has no lm_head, but head 0 has one"),
        ("10.2.weight", "head 10 has no lm_head, but head 0 has one"),
    ],
)
def test_missing_tensor(tmp_path: Path, missing: str, message: str) -> None:
    tensors = layout_tensors(make_heads())
    del tensors[missing]
    with pytest.raises(CheckpointError, match=message):
        read_heads(save(tmp_path, tensors))


def test_gap_in_head_numbers(tmp_path: Path) -> None:
    tensors = {key: t for key, t in layout_tensors(make_heads()).items() if not key.startswith("3.")}
    with pytest.raises(CheckpointError, match="head 3 block 0 has no weight, though keys go up to head 10"):
        read_heads(save(tmp_path, tensors))


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        (
            "0.0.linear.weight",
            torch.zeros(HIDDEN, 4),
            r"head 0 block 0 weight has shape \[6, 4\]; expected \[6, 6\]",
        ),
        (
            "5.1.linear.weight",
            torch.zeros(4, 4),
            r"head 5 block 1 weight has shape \[4, 4\]; expected \[6, 6\]",
        ),
        ("5.1.linear.bias", torch.zeros(4), r"head 5 block 1 bias has shape \[4\]; expected \[6\]"),
        ("5.2.weight", torch.zeros(8, HIDDEN), r"head 5 lm_head has shape \[8, 6\]; expected \[9, 6\]"),
        ("0.0.linear.weight", torch.tensor(1.0), "is a single number"),
        ("5.2.weight", torch.full((VOCABULARY, HIDDEN), torch.nan), "head 5 lm_head holds NaN"),
        (
            "5.1.linear.weight",
            torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8),
            "int8; quantised heads are not supported",
        ),
        ("5.1.norm.weight", torch.zeros(HIDDEN), r"tensor '5\.1\.norm\.weight' is in no known Medusa layout"),
        ("11.2.weight", torch.zeros(VOCABULARY, HIDDEN), "head 11 has an lm_head but no residual block"),
        ("token_map", torch.arange(12), "token_map has 12 entries but the lm_head has 9 rows"),
        ("token_map", torch.tensor([3, 9]), "token_map holds id 9, outside the target's 9"),
        ("token_map", torch.zeros(VOCABULARY), "token_map is torch.float32; expected integers"),
    ],
)
def test_wrong_tensor(tmp_path: Path, key: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_heads(save(tmp_path, layout_tensors(make_heads()) | {key: tensor}))


class RunsOnLoad:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.witness}'",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    witness = tmp_path / "ran"
    state = {**layout_tensors(make_heads()), "11.0.linear.weight": RunsOnLoad(witness)}
    file = tmp_path / "medusa_lm_head.pt"
    if zipped:
        torch.save(state, file)
    else:
        file.write_bytes(pickle.dumps({"0.0.linear.weight": RunsOnLoad(witness)}))
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt: not a plain tensor file .*never run"):
        read_heads(tmp_path)
    assert not witness.exists()
    pickle.loads(pickle.dumps(RunsOnLoad(witness)))
    assert witness.exists(), "the trap itself must work, or the test shows nothing"


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_truncated_file(tmp_path: Path, file: str, keep: int) -> None:
    path = save(tmp_path, layout_tensors(make_heads()), file) / file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=file):
        read_heads(tmp_path)


def test_other_contents(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no heads found; expected one of medusa_lm_head\.safetensors"):
        read_heads(tmp_path)
    with pytest.raises(CheckpointError, match=r"no heads found"):
        read_heads(tmp_path / "absent.pt")
    save(tmp_path, base_model(), "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no Medusa heads in model\.safetensors"):
        read_heads(tmp_path)
    torch.save([torch.zeros(2)], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt: expected a dict of tensors"):
        read_heads(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_heads(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object, found list"):
        read_heads(tmp_path)


# ---- against the target ----


def test_fitting_heads_pass() -> None:
    assert check_against(make_heads(target_fingerprint="abc"), HIDDEN, VOCABULARY, "abc") == []


@pytest.mark.parametrize(
    ("token_map", "hidden", "vocabulary", "fingerprint", "message"),
    [
        (None, 8, VOCABULARY, "abc", "hidden size 6 but the target has 8"),
        (None, HIDDEN, 8, "abc", "vocabulary of 9 tokens but the target has 8"),
        (None, HIDDEN, VOCABULARY, "def", "fingerprint abc but this target's is def"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 20], HIDDEN, 20, "abc", "token_map holds id 20, outside the target's 20"),
        ([0, 1, 2, 3, 4, 5, 6, 7, -1], HIDDEN, 20, "abc", "token_map holds id -1, outside the target's 20"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 3], HIDDEN, 20, "abc", "token_map holds id 3 more than once"),
    ],
)
def test_heads_of_another_target(
    token_map: list[int] | None, hidden: int, vocabulary: int, fingerprint: str, message: str
) -> None:
    heads = make_heads(
        target_fingerprint="abc",
        token_map=None if token_map is None else torch.tensor(token_map),
        source="here",
    )
    with pytest.raises(CheckpointError, match=f"here: .*{message}"):
        check_against(heads, hidden, vocabulary, fingerprint)


def test_warnings_about_what_cannot_be_checked() -> None:
    (warning,) = check_against(make_heads(), HIDDEN, VOCABULARY, "abc")
    assert "do not say which weights they were trained on; a wrong target" in warning
    (warning,) = check_against(make_heads(layout="C"), HIDDEN, VOCABULARY, "abc")
    assert "merged heads fit only the weights they lie beside" in warning
    (warning,) = check_against(make_heads(target_fingerprint="abc"), HIDDEN, VOCABULARY, None)
    assert "the heads' abc was not compared" in warning
    (warning,) = check_against(make_heads(target_fingerprint="abc"), HIDDEN, 12, "abc")
    assert "target ids from 9 on will never be drafted" in warning


# ---- smaller vocabulary, offsets ----


def test_reduce_vocabulary() -> None:
    heads = make_heads()
    assert heads.lm_heads is not None
    reduced = reduce_vocabulary(heads, VOCABULARY, [7, 0, 3])
    assert reduced.lm_heads is not None
    assert reduced.token_map is not None
    assert reduced.token_map.tolist() == [0, 3, 7]
    for matrix, whole in zip(reduced.lm_heads, heads.lm_heads, strict=True):
        assert matrix.tolist() == [whole[0].tolist(), whole[3].tolist(), whole[7].tolist()]

    twice = reduce_vocabulary(reduced, VOCABULARY, [7, 3])
    assert twice.lm_heads is not None
    assert twice.lm_heads[4].tolist() == [heads.lm_heads[4][3].tolist(), heads.lm_heads[4][7].tolist()]
    with pytest.raises(CheckpointError, match="token id 5 is not in the heads' draft vocabulary of 3 tokens"):
        reduce_vocabulary(reduced, VOCABULARY, [5, 3])

    shared = reduce_vocabulary(make_heads(own=False), 1000, torch.tensor([999, 12]))
    assert shared.lm_heads is None
    assert shared.token_map is not None
    assert shared.token_map.tolist() == [12, 999]
    assert shared.draft_vocabulary == 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([9], "id 9, outside the target's 9"),
        ([-1, 2], "id -1, outside"),
        ([2, 2], "id 2 more than once"),
        ([], "empty"),
    ],
)
def test_reduce_vocabulary_refuses(ids: list[int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reduce_vocabulary(make_heads(own=False), VOCABULARY, ids)


def test_head_offset() -> None:
    """The lm_head at position t gives token t+1, head 0 the next (MED: medusa/train/train_legacy.py)."""
    assert [head_offset(head) for head in range(5)] == [2, 3, 4, 5, 6]
