"""Draft models on disk: models of their own against the target's tokenizer, and the slim form of `train draft`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.draft_model import (
    CONFIG_KEY,
    DraftModel,
    compare_tokenizers,
    cut_lm_head,
    cut_model,
    own_tensors,
    read_draft,
    set_lm_head,
    shared_names,
    write_draft,
)
from speccompile.graphs.errors import CheckpointError
from tests.tiny.conftest import write_tokenizer
from tests.tiny.models import VOCAB, tiny_model

TOKEN_IDS = torch.arange(3, VOCAB, 7)
IDS = torch.tensor([[5, 9, 200, 17, 31, 4, 88, 300, 12, 6]])


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Source:
    return read_model(tiny_checkpoint)


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory, target: Source) -> Path:
    """Layers 0 and 2 of the target, with a draft vocabulary, in fp16. Do not change it: copy it."""
    folder = tmp_path_factory.mktemp("draft") / "slim"
    write_draft(cut_model(target, [0, 2], TOKEN_IDS), folder)
    return folder


def save_model(folder: Path, name: str = "llama", seed: int = 5, **changes: Any) -> Path:
    """A small model with the tests' tokenizer."""
    tiny_model(name, seed, **changes).save_pretrained(folder)  # type: ignore[operator]
    write_tokenizer(folder)
    return folder


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(ids).logits
    return out


def source_of(model: Any, path: Path = Path("target")) -> Source:
    return Source(path, model, None, "f" * 64, "c" * 64, (2,))


# ---- cutting a target ----


ARCHITECTURES = [
    "llama",
    "llama-tied",
    "llama-rope-scaling",
    "qwen3",
    "gemma2",
    "gemma3",
    "smollm3",
    "cohere",
    "phi",
    "gpt_neox",
    "gpt2",
    "opt",
    "mixtral",
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cut_model_runs_the_taken_layers_and_no_other(name: str, tmp_path: Path) -> None:
    """Against the whole target with the other layers removed by hand, before and after writing."""
    model: Any = tiny_model(name, num_hidden_layers=4, **_four_layers(name))
    source = source_of(model)
    cut = cut_model(source, [0, 3])
    assert cut.layers == 2 and cut.taken == (0, 3) and cut.architecture == type(model).__name__
    write_draft(cut, tmp_path)
    read = read_draft(tmp_path, source)
    stack = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    whole = logits(model)
    for index in (2, 1):
        del stack[index]
    for index, layer in enumerate(stack):  # what a layer's place decides in this architecture, as in the cut one
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = index
    text = model.config.get_text_config()
    text.num_hidden_layers = 2
    for lists in ("layer_types", "no_rope_layers"):
        if getattr(text, lists, None):
            setattr(text, lists, [getattr(text, lists)[index] for index in (0, 3)])
    expected = logits(model)
    assert (expected - whole).abs().max() > 0.1
    torch.testing.assert_close(logits(cut.model), expected, rtol=0, atol=1e-5)
    # fp16 moves each weight by 2^-11 of itself.
    torch.testing.assert_close(logits(read.model), expected, rtol=0, atol=float(expected.abs().max()) * 4e-3)


def _four_layers(name: str) -> dict[str, Any]:
    if name == "gpt2":
        return {"n_layer": 4}
    kinds = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}
    return kinds if name in ("gemma2", "gemma3") else {}


def test_the_shared_tensors_are_the_targets_memory(target: Source, slim: Path) -> None:
    ours, theirs = read_draft(slim, target).model, target.model
    for get in ("get_input_embeddings", "get_output_embeddings"):
        assert getattr(ours, get)().weight.data_ptr() == getattr(theirs, get)().weight.data_ptr()
    layer = ours.model.layers[0].mlp.up_proj.weight
    assert layer.data_ptr() != theirs.model.layers[0].mlp.up_proj.weight.data_ptr()
    stored = load_file(slim / "model.safetensors")
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & stored.keys()
    assert set(shared_names(theirs)) == {"model.embed_tokens.weight", "lm_head.weight"}
    # A draft of a tied target stays tied, and is one matrix.
    model: Any = tiny_model("llama-tied")
    tied = cut_model(source_of(model), [1]).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_layers_that_cannot_be_taken(target: Source) -> None:
    for taken in ([], [0, 3], [-1], [1, 1], [2, 0]):
        with pytest.raises(CheckpointError, match=r"cannot be taken; give different ones, ascending, out of 0 \.\. 2"):
            cut_model(target, taken)


def test_a_cut_lm_head_gives_its_rows_and_leaves_the_embedding() -> None:
    for name in ("llama-tied", "gpt2", "phi", "gemma2"):  # tied, tied, with a bias, tied and soft-capped
        model: Any = tiny_model(name)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        before, kept = logits(model), embedding.detach().clone()
        cut_lm_head(model, TOKEN_IDS)
        torch.testing.assert_close(logits(model), before[..., TOKEN_IDS], rtol=0, atol=1e-5)
        assert model.get_input_embeddings().weight is embedding and torch.equal(embedding, kept)
        set_lm_head(model, head)
        assert torch.equal(logits(model), before)


# ---- the slim form ----


def test_fp16_round_trip(target: Source, slim: Path) -> None:
    cut, read = cut_model(target, [0, 2], TOKEN_IDS), read_draft(slim, target)
    assert read.token_ids is not None and torch.equal(read.token_ids, TOKEN_IDS)
    assert (read.taken, read.layers, read.max_length) == ((0, 2), 2, 128)
    assert read.target_fingerprint == target.fingerprint and not read.warnings
    for name, tensor in own_tensors(read.model).items():
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(
            tensor, own_tensors(cut.model)[name].numpy().astype(np.float16).astype(np.float32)
        )
    config = json.loads((slim / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["head_dim"] == 16  # not hidden_size / heads by default
    assert config[CONFIG_KEY] == {
        "target_fingerprint": target.fingerprint,
        "layers": [0, 2],
        "shares": ["embedding", "lm_head"],
    }


def test_int8_moves_no_weight_by_more_than_half_a_scale(target: Source, tmp_path: Path) -> None:
    cut = cut_model(target, [1])
    with torch.no_grad():  # rows of very different sizes, and a row of zeros
        weight = cut.model.model.layers[0].mlp.up_proj.weight
        weight *= torch.logspace(-4, 3, len(weight))[:, None]
        weight[3] = 0
    write_draft(cut, tmp_path, "int8")
    read = read_draft(tmp_path, target)
    assert read.token_ids is None
    stored = load_file(tmp_path / "model.safetensors")
    matrices = 0
    for name, tensor in own_tensors(cut.model).items():
        got, wanted = own_tensors(read.model)[name].double().numpy(), tensor.detach().double().numpy()
        if wanted.ndim == 1:
            np.testing.assert_array_equal(got, wanted.astype(np.float16))
            continue
        matrices += 1
        assert stored[name].dtype == torch.int8 and stored[f"{name}.scale"].shape == (len(wanted), 1)
        bound = np.abs(wanted).max(axis=1, keepdims=True) / 254  # half of 1/127 of the channel's largest
        assert (np.abs(got - wanted) <= bound * (1 + 1e-5)).all(), name
        assert np.abs(got - wanted).max() > bound.max() / 2  # it is rounded, and by no finer step
    assert matrices == 7
    assert (tmp_path / "model.safetensors").stat().st_size < 0.6 * sum(
        t.numel() for t in own_tensors(cut.model).values()
    ) * 2


def test_rope_settings_and_head_size_are_the_drafts_own(tmp_path: Path) -> None:
    """Pitfalls 12 and 13: a draft that lost them would still load, and draft badly."""
    source = source_of(tiny_model("llama-rope-scaling", head_dim=24))
    write_draft(cut_model(source, [0]), tmp_path)
    config = read_draft(tmp_path, source).model.config
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["factor"] == 4.0
    assert config.head_dim == 24


def test_the_fingerprint_follows_weights_and_vocabulary(target: Source, slim: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_draft(read_draft(slim, target), again)
    base = read_draft(slim, target).fingerprint
    assert read_draft(again, target).fingerprint == base

    def after(change: Callable[[DraftModel], None], name: str, token_ids: torch.Tensor | None = TOKEN_IDS) -> str:
        cut = cut_model(target, [0, 2], token_ids)
        change(cut)
        write_draft(cut, tmp_path / name)
        return read_draft(tmp_path / name, target).fingerprint

    def move(draft: DraftModel) -> None:
        with torch.no_grad():
            draft.model.model.norm.weight[5] += 0.5

    assert after(lambda _: None, "same") == base
    found = {
        base,
        after(move, "moved"),
        after(lambda _: None, "whole", None),
        after(lambda _: None, "c", TOKEN_IDS[1:]),
    }
    assert len(found) == 4


def test_too_large_for_fp16_and_unknown_dtype(target: Source, tmp_path: Path) -> None:
    cut = cut_model(target, [0])
    with torch.no_grad():
        cut.model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight reaches 1e\+05, too large for fp16; write int8"):
        write_draft(cut, tmp_path)
    with pytest.raises(CheckpointError, match=r"dtype 'int4' is unknown; use one of fp16, int8"):
        write_draft(cut, tmp_path, "int4")


# ---- bad slim drafts ----


def with_tensors(slim: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(slim, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_config(slim: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(slim, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_not_a_model_folder(target: Source, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing: no such folder; give a transformers folder or a \.gguf file"):
        read_draft(tmp_path / "nothing", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: has no config\.json"):
        read_draft(tmp_path / "empty", target)
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"empty: not a model transformers knows"):
        read_draft(tmp_path / "empty", target)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"bad\.gguf: "):
        read_draft(tmp_path / "bad.gguf", target)


def test_damaged_and_missing_tensors(target: Source, slim: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(slim, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or no safetensors file"):
        read_draft(folder, target)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or no safetensors file"):
        read_draft(folder, target)
    name = "model.layers.1.self_attn.q_proj.weight"
    for label, change, message in (
        ("gone", lambda t: t.pop(name), rf"tensor '{name}' is missing"),
        ("more", lambda t: t.update(lm=t[name].clone()), r"tensor 'lm' is none of this model's"),
        (
            "small",
            lambda t: t.update({name: t[name][:8].clone()}),
            r"has shape \[8, 64\] but config\.json says \[64, ",
        ),
        ("nan", lambda t: t[name][0].fill_(float("nan")), rf"tensor '{name}' holds NaN or infinite values"),
        ("unscaled", lambda t: t.update({name: t[name].to(torch.int8)}), rf"tensor '{name}\.scale' is missing"),
        (
            "scaled",
            lambda t: t.update({name: t[name].to(torch.int8), f"{name}.scale": torch.ones(3, 1)}),
            r"\.scale' has shape \[3, 1\]; expected \[64, 1\]",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_draft(with_tensors(slim, tmp_path / label, change), target)


def test_bad_config(target: Source, slim: Path, tmp_path: Path) -> None:
    about = json.loads((slim / "config.json").read_text())[CONFIG_KEY]
    for label, change, message in (
        ("none", {CONFIG_KEY: {**about, "layers": []}}, "lists no layers"),
        ("odd", {CONFIG_KEY: "yes"}, "lists no layers"),
        ("three", {"num_hidden_layers": 3}, "num_hidden_layers is 3 but speccompile_draft lists 2 layers"),
        ("own", {CONFIG_KEY: {**about, "shares": ["embedding"]}}, r"shares \['embedding'\]; this version reads"),
        ("type", {"model_type": "nonesuch"}, "not a draft model transformers knows"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_draft(with_config(slim, tmp_path / label, **change), target)


def test_made_for_another_target(target: Source, other_checkpoint: Path, slim: Path, tmp_path: Path) -> None:
    other = read_model(other_checkpoint)
    with pytest.raises(CheckpointError, match=rf"{target.fingerprint} but this target's is {other.fingerprint}"):
        read_draft(slim, other)
    wide = source_of(tiny_model("llama", hidden_size=96))
    with pytest.raises(CheckpointError, match=r"be \[320, 64\] but the target's, which it shares, is \[320, 96\]"):
        read_draft(slim, wide)
    more = source_of(tiny_model("llama", vocab_size=VOCAB + 8))
    with pytest.raises(CheckpointError, match=r"be \[320, 64\] but the target's, which it shares, is \[328, 64\]"):
        read_draft(slim, more)


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        ([3, 9, 320], r"token_map holds id 320, outside the target's 320 tokens"),
        ([-1, 9], r"token_map holds id -1, outside"),
        ([3, 9, 9, 12], r"token_map holds id 9 twice; target ids must ascend"),
        ([3, 9, 8], r"token_map has id 8 after 9; target ids must ascend"),
        ([], r"token_map is torch\.int64 \[0\]; expected int64"),
        ([[3, 9]], r"token_map is torch\.int64 \[1, 2\]; expected int64"),
        ([3.0, 9.0], r"token_map is torch\.float32 \[2\]; expected int64"),
    ],
)
def test_bad_token_map(target: Source, slim: Path, tmp_path: Path, token_map: Any, message: str) -> None:
    values = torch.tensor(token_map) if token_map else torch.zeros(0, dtype=torch.int64)
    folder = with_tensors(slim, tmp_path / "bad", lambda t: t.update(token_map=values))
    with pytest.raises(CheckpointError, match=message):
        read_draft(folder, target)


# ---- models of their own ----


def test_a_model_of_its_own_is_read_as_it_is(target: Source, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "own", "gpt_neox", num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    draft, source = read_draft(folder, target), read_model(folder)
    assert torch.equal(logits(draft.model), logits(source.model))
    assert (draft.token_ids, draft.taken, draft.target_fingerprint, draft.warnings) == (None, (), None, ())
    assert (draft.fingerprint, draft.layers, draft.architecture) == (source.fingerprint, 1, "GPTNeoXForCausalLM")


def test_a_draft_as_large_as_the_target_is_warned_about(target: Source, tiny_checkpoint: Path) -> None:
    count = sum(parameter.numel() for parameter in target.model.parameters())
    (warning,) = read_draft(tiny_checkpoint, target).warnings
    assert f"has {count:,} parameters and the target {count:,}; drafting with it cannot pay" in warning


def test_padded_vocabularies(target: Source, tmp_path: Path) -> None:
    """Pitfall 9. Wider: its last rows are never drafted. Narrower: every id of the target can still be fed."""
    wide = read_draft(save_model(tmp_path / "wide", num_hidden_layers=1, vocab_size=VOCAB + 16), target)
    assert wide.token_ids is not None and wide.token_ids.tolist() == list(range(VOCAB))
    before = logits(wide.model)
    cut_lm_head(wide.model, wide.token_ids)
    torch.testing.assert_close(logits(wide.model), before[..., :VOCAB], rtol=0, atol=1e-5)

    assert len(target.tokenizer) == VOCAB
    padded = read_model(save_model(tmp_path / "padded", vocab_size=VOCAB + 16))
    for name in ("llama", "llama-tied"):
        folder = save_model(tmp_path / name, name, num_hidden_layers=1)
        narrow, source = read_draft(folder, padded), read_model(folder)
        assert narrow.token_ids is not None and narrow.token_ids.tolist() == list(range(VOCAB))
        assert torch.equal(logits(narrow.model), logits(source.model))
        assert narrow.fingerprint == source.fingerprint
        last = logits(narrow.model, torch.tensor([[5, VOCAB + 15]]))
        assert last.shape[-1] == VOCAB and torch.isfinite(last).all()


def retokenized(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Source:
    """`checkpoint` with its tokenizer.json changed."""
    shutil.copytree(checkpoint, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return read_model(folder)


def test_another_tokenizer_is_refused_by_its_first_token(target: Source, tiny_checkpoint: Path, tmp_path: Path) -> None:
    tokens = {index: token for token, index in target.tokenizer.get_vocab().items()}

    def swap(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        first, second = tokens[100], tokens[200]
        vocabulary[first], vocabulary[second] = 200, 100

    swapped = retokenized(tiny_checkpoint, tmp_path / "swapped", swap)
    with pytest.raises(CheckpointError) as caught:
        compare_tokenizers(target, swapped)
    assert f"token 100 is {tokens[200]!r} in the draft model and {tokens[100]!r} in the target" in str(caught.value)
    assert "`speccompile train draft`" in str(caught.value)
    with pytest.raises(CheckpointError, match="swapped: another tokenizer than the target's: token 100 is"):
        read_draft(tmp_path / "swapped", target)

    def add(data: dict[str, Any]) -> None:
        extra = {**data["added_tokens"][-1], "id": len(tokens), "content": "<|tool|>"}
        data["added_tokens"].append(extra)

    more = retokenized(tiny_checkpoint, tmp_path / "more", add)
    with pytest.raises(CheckpointError, match=rf"token {len(tokens)} is '<\|tool\|>' in the draft model and missing"):
        compare_tokenizers(target, more)
    with pytest.raises(CheckpointError, match=rf"token {len(tokens)} is missing in the draft model and '<\|tool\|>'"):
        compare_tokenizers(more, target)


def test_equal_vocabularies_that_split_texts_differently_are_refused(
    target: Source, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def reverse_merges(data: dict[str, Any]) -> None:
        data["model"]["merges"].reverse()

    def normalize(data: dict[str, Any]) -> None:
        data["normalizer"] = {"type": "NFC"}

    def split_digits(data: dict[str, Any]) -> None:
        digits = {"type": "Digits", "individual_digits": True}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, data["pre_tokenizer"]]}

    def prefix(data: dict[str, Any]) -> None:
        data["pre_tokenizer"]["add_prefix_space"] = True

    compare_tokenizers(target, retokenized(tiny_checkpoint, tmp_path / "same", lambda data: None))
    for change in (reverse_merges, normalize, split_digits, prefix):
        other = retokenized(tiny_checkpoint, tmp_path / change.__name__, change)
        assert other.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        with pytest.raises(CheckpointError, match=r"the tokens have the same ids, but .* from its token"):
            compare_tokenizers(target, other)


def test_one_tokenizer_written_in_two_ways_is_equal(target: Source, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Merges as "a b" (old files) or ["a", "b"]; a pre-tokenizer alone or in a sequence of one."""

    def old_form(data: dict[str, Any]) -> None:
        data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [data["pre_tokenizer"]]}

    other = retokenized(tiny_checkpoint, tmp_path / "old", old_form)
    assert isinstance(other.tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence)
    compare_tokenizers(target, other)


def test_no_tokenizer(target: Source, tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "bare")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"bare: no usable tokenizer"):
        read_draft(tmp_path / "bare", target)
