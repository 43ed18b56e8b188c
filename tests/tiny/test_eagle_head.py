"""EAGLE heads: every layout loads to the head that the notes describe, and nothing wrong loads at all."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.compiler.checkpoint import Source
from speccompile.compiler.eagle_head import EagleHead, looks_like_eagle, make_head, own_tensors, read_eagle, write_eagle
from speccompile.compiler.inspection import describe
from speccompile.graphs.eagle import EagleForm
from speccompile.graphs.errors import CheckpointError
from tests.tiny.conftest import Cli
from tests.tiny.eagle_reference import Array, ReferenceHead, random_weights
from tests.tiny.models import VOCAB, tiny_model

WIDTH, LAYERS, INNER = 64, 8, 80
TAPS = (2, 4, 5)  # 2, L//2, L-3
IDS = np.array([3, 4, 9, 17, 20, 21, 55, 100, 101, 102, 180, 181, 250, 300, 311, 319])
PROMPT = [7, 1, 30, 300, 5, 5, 210, 44, 9, 118, 64, 2, 90]
STEPS = 2
TOLERANCE = 1e-4
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@pytest.fixture(scope="module")
def target() -> Source:
    """A llama of 8 layers: 2, L//2 and L-3 are three different ones."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    return Source(Path("target"), model, None, "f" * 64, "c" * 64, (2,))


@pytest.fixture(scope="module")
def streams(target: Source) -> dict[int, Array]:
    """By j, what enters layer j of the target, PROMPT being read; by -1 its post-norm hidden state."""
    with torch.no_grad():
        out = target.model(torch.tensor([PROMPT[:-1]]), output_hidden_states=True)
    entering = {index: hidden[0].double().numpy() for index, hidden in enumerate(out.hidden_states[:-1])}
    return {**entering, -1: out.hidden_states[-1][0].double().numpy()}


# ---- what the layouts call a head's weights, from the reference notes ----

LAYER_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "post": "post_attention_layernorm",
    "input": "input_layernorm",
    "hidden": "hidden_norm",
}
PLAIN = {
    name: name for name in ("fc", "fusion", "norm", "lm_head", "input_norm", "fc_norm.0", "fc_norm.1", "fc_norm.2")
}
NAMES = {
    "official": {**PLAIN, "embedding": "embed_tokens", "embedding_norm": "embed_layernorm", "feature_norm": "hnorm"},
    "HASS": {"embedding_norm": "embed_layernorm", "norm": "lm_head_layernorm", "0.input": "hidden_layernorm"},
    "ModelOpt": {"embedding_norm": "enorm", "feature_norm": "hnorm"},
    "speculators-eagle1": {
        "fc": "fusion_fc",
        "embedding_norm": "embedding_layernorm",
        "norm": "pre_lm_head_layernorm",
    },
}


def tensors_of(head: ReferenceHead, layout: str, without: tuple[str, ...] = ()) -> Tensors:
    """The file of a head, less some weights (by the reference's names) that the target has."""
    tensors = {}
    names = {**NAMES["official"], **NAMES.get(layout, {})}
    for name, value in head.weights.items():
        if name in without:
            continue
        stem, _, bias = name.partition(".bias")
        if stem in names:
            key = names[stem]
        else:
            index, _, part = stem.partition(".")
            if layout == "speculators-eagle1":
                prefix = "transformer"
            elif head.version == 1 or layout == "speculators":
                prefix = f"layers.{index}"
            else:
                prefix = "midlayer" if head.layers == 1 else f"midlayer.{index}"
            key = f"{prefix}.{LAYER_NAMES[part]}"
        del bias
        tensors[f"{key}.{'bias' if name.endswith('.bias') else 'weight'}"] = torch.from_numpy(value).half()
    if len(head.token_ids) < VOCAB:
        tensors["d2t"] = torch.from_numpy(head.token_ids - np.arange(len(head.token_ids)))
        if layout != "ModelOpt":
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
            tensors["t2d"][head.token_ids] = True
    return tensors


def sizes_of(head: ReferenceHead) -> Config:
    width = len(head.weights["0.post"])
    sizes = {
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": head.layers,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "vocab_size": VOCAB,
        "rms_norm_eps": head.epsilon,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "model_type": "llama",
    }
    return sizes if head.head_dim * head.heads == width else {**sizes, "head_dim": head.head_dim}


def config_of(head: ReferenceHead, layout: str) -> Config:
    """config.json as its writer makes it, with nothing optional."""
    drafted, width = len(head.token_ids), len(head.weights["0.post"])
    draft = {"draft_vocab_size": drafted} | ({} if width == WIDTH else {"target_hidden_size": WIDTH})
    sizes = {"architectures": ["LlamaForCausalLM"], **sizes_of(head)}
    if layout == "speculators":
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": sizes_of(head),
            **draft,
            "norm_before_residual": head.normed_residual,
            "norm_output": head.normed_state,
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
        }
    if layout == "speculators-eagle1":
        return {
            "speculators_model_type": "eagle",
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": sizes_of(head),
            "layernorms": head.has("norm"),
            "fusion_bias": head.has("fc.bias"),
        }
    if head.version == 1:
        config = sizes if layout == "ModelOpt" else {**sizes, "bias": head.has("fc.bias")}
        return {**config, **({"draft_vocab_size": drafted} if drafted < VOCAB else {})}
    if layout == "official":
        return {**sizes, **draft}
    outputs = [index - 1 for index in TAPS]
    eagle: Config = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    if layout == "ModelOpt":
        eagle |= {"use_last_layernorm": True, "use_mtp_layernorm": False, "use_input_layernorm_in_first_layer": True}
        return {**sizes, "architectures": ["LlamaForCausalLMEagle3"], **draft, "eagle_config": eagle}
    return {**sizes, "architectures": ["LlamaForCausalLMEagle3"], **draft, "eagle_config": eagle}


def save(folder: Path, tensors: Tensors, config: Config, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        save_file({key: value.clone() for key, value in tensors.items()}, folder / name)
    return folder


def make_reference(target: Source, version: int, extra: tuple[str, ...] = (), **options: Any) -> ReferenceHead:
    """A random head with the target's embedding where that fits, and version 1 with its lm_head."""
    width, head_dim = options.pop("width", WIDTH), options.pop("head_dim", 16)
    heads, kv_heads = options.pop("heads", 4), options.pop("kv_heads", 2)
    layers, seed = options.pop("layers", 1), options.pop("seed", 0)
    ids = options.pop("ids", IDS if version == 3 else np.arange(VOCAB))
    own = options.pop("own", version == 3)
    rng = np.random.default_rng(seed)
    weights = random_weights(
        rng, version, width, WIDTH, heads, kv_heads, head_dim, INNER, VOCAB, len(ids), layers, extra
    )
    if width == WIDTH:
        weights["embedding"] = target.model.get_input_embeddings().weight.detach().double().numpy()
    if not own:
        weights["lm_head"] = target.lm_head.weight.detach().double().numpy()[ids]  # type: ignore[operator]
    return ReferenceHead(version, heads, kv_heads, head_dim, layers, weights, ids, **options)


def torch_draft(
    head: EagleHead, streams: dict[int, Array], steps: int = STEPS
) -> tuple[list[int], Array, Array, Array]:
    """What the head drafts after PROMPT, run again in full at every step: tokens, features, state and logits."""
    taken = [torch.from_numpy(streams[tap]).float()[None] for tap in head.form.taps or (-1,)]
    fed = list(PROMPT[1:])
    with torch.no_grad():
        features = head.model.features(taken)
        first = features[0].double().numpy()
        for step in range(steps + 1):
            mask = torch.full((1, 1, len(fed), len(fed)), -torch.inf).triu(1)
            out = head.model(torch.tensor([fed]), torch.arange(len(fed))[None], features, mask)
            state = out.hidden_states[0]
            if step < steps:
                best = int(out.logits[0, -1].argmax())
                fed.append(best if head.token_ids is None else int(head.token_ids[best]))
                features = torch.cat((features, state[:, -1:]), 1)
    return fed[len(PROMPT) - 1 :], first, state[0].double().numpy(), out.logits[0].double().numpy()


def distance(head: EagleHead, reference: ReferenceHead, streams: dict[int, Array], taps: tuple[int, ...]) -> float:
    """Greatest difference of features, states or logits over a prompt and two recurrent steps."""
    taken = [streams[tap] for tap in taps or (-1,)]
    ids, features, state, logits = torch_draft(head, streams)
    wanted_ids, wanted_state, wanted_logits = reference.draft(PROMPT[1:], taken, STEPS)
    differences = [
        np.abs(features - reference.features(taken)).max(),
        np.abs(state - wanted_state).max(),
        np.abs(logits - wanted_logits).max(),
    ]
    worst = float(max(differences))
    assert worst > TOLERANCE or ids == wanted_ids
    return worst


# ---- every layout against the notes ----

ALL_NORMS = ("embedding_norm", "norm", "0.input")
CASES: dict[str, tuple[int, str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    # name: version, layout, norms and biases, the head, what config.json has besides
    "official-1": (1, "official", ("fc.bias",), {}, {}),
    "official-1-more-heads": (1, "official", (), {"heads": 8, "kv_heads": 8, "head_dim": 8}, {}),
    "official-1-qkv-bias": (1, "official", ("fc.bias", "0.q.bias", "0.k.bias", "0.v.bias"), {}, {"qkv_bias": True}),
    "official-1-mixtral": (1, "official", ("fc.bias",), {"kv_heads": 1}, {"model_type": "mixtral"}),
    "official-1-theta": (1, "official", (), {"theta": 5e5}, {"rope_theta": 500000.0}),
    "official-1-linear-rope": (
        1,
        "official",
        ("fc.bias",),
        {"rope_divisor": 4.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "official-1-transformers-5": (
        1,
        "official",
        (),
        {"theta": 1e6, "rope_divisor": 2.0},
        {"rope_theta": 3.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    ),
    "HASS": (1, "HASS", (*ALL_NORMS, "fc.bias"), {}, {}),
    "ModelOpt-1": (1, "ModelOpt", ("0.input",), {"ids": IDS, "own": True}, {}),
    "ModelOpt-1-norms": (
        1,
        "ModelOpt",
        ("embedding_norm", "feature_norm", "0.input", "norm"),
        {"layers": 2, "ids": IDS, "own": True},
        {"eagle_config": {"use_mtp_layernorm": True, "use_last_layernorm": True}},
    ),
    "speculators-1": (1, "speculators-eagle1", ("fc.bias",), {}, {}),
    "speculators-1-layernorms": (1, "speculators-eagle1", ALL_NORMS, {}, {}),
    "official-3": (3, "official", (), {}, {}),
    "official-3-epsilon": (3, "official", (), {"epsilon": 1e-2}, {}),
    "official-3-narrow": (3, "official", (), {"width": 48, "head_dim": 8, "kv_heads": 1}, {}),
    "official-3-whole-vocabulary": (3, "official", (), {"ids": np.arange(VOCAB)}, {}),
    "SpecForge": (3, "SpecForge", (), {"theta": 1e6}, {"rope_theta": 1e6}),
    "SpecForge-bias": (3, "SpecForge", ("0.q.bias", "0.k.bias", "0.v.bias", "0.o.bias"), {}, {"attention_bias": True}),
    "SpecForge-3.1": (
        3,
        "SpecForge",
        ("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        {"normed_state": True},
        {"fc_norm": True, "norm_output": True},
    ),
    "speculators": (3, "speculators", (), {}, {}),
    "speculators-norms": (
        3,
        "speculators",
        ("input_norm",),
        {"normed_residual": True},
        {"norm_before_fc": True},
    ),
    "speculators-3.1": (
        3,
        "speculators",
        ("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        {"normed_residual": True, "normed_state": True},
        {"fc_norm": True},
    ),
    "speculators-qwen3": (
        3,
        "speculators",
        ("0.q_norm", "0.k_norm"),
        {"head_dim": 24, "layers": 1},
        {"transformer_layer_config": {"model_type": "qwen3"}},
    ),
    "ModelOpt-3": (3, "ModelOpt", (), {}, {}),
    "ModelOpt-3-deep": (3, "ModelOpt", (), {"layers": 2}, {}),
}


def written(
    folder: Path, target: Source, case: str, name: str = "model.safetensors"
) -> tuple[Path, ReferenceHead, tuple[int, ...]]:
    version, layout, extra, options, more = CASES[case]
    reference = make_reference(target, version, extra, **options)
    width = len(reference.weights["0.post"])
    without = ("embedding",) * (width == WIDTH) + ("lm_head",) * (version == 1 and not options.get("own"))
    config = config_of(reference, layout)
    if "transformer_layer_config" in more:
        more = {"transformer_layer_config": {**config["transformer_layer_config"], **more["transformer_layer_config"]}}
    return (
        save(folder, tensors_of(reference, layout, without), {**config, **more}, name),
        reference,
        TAPS if version == 3 else (),
    )


@pytest.mark.parametrize("case", CASES)
def test_layouts(tmp_path: Path, target: Source, streams: dict[int, Array], case: str) -> None:
    version, layout, extra, _, _ = CASES[case]
    folder, reference, taps = written(tmp_path, target, case)
    assert looks_like_eagle(folder)
    head = read_eagle(folder, target)
    assert (head.version, head.layout, head.form.taps) == (version, layout, taps)
    assert distance(head, reference, streams, taps) < TOLERANCE
    assert head.layers == reference.layers
    assert head.draft_vocabulary == len(reference.token_ids)
    if len(reference.token_ids) < VOCAB:
        assert head.token_ids is not None
        assert head.token_ids.tolist() == reference.token_ids.tolist()
    else:
        assert head.token_ids is None
    biases = {name for name, module in head.model.named_modules() if getattr(module, "bias", None) is not None}
    assert len(biases) == len([name for name in extra if name.endswith(".bias")])
    assert len(head.warnings) == 1 + (case == "SpecForge-3.1")  # none names its target
    assert not any(parameter.requires_grad for parameter in head.model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in head.model.parameters())


@pytest.mark.parametrize("case", ["official-1", "official-3", "SpecForge-3.1"])
def test_pickle_files(tmp_path: Path, target: Source, case: str) -> None:
    first, _, _ = written(tmp_path / "safe", target, case)
    second, _, _ = written(tmp_path / "bin", target, case, "pytorch_model.bin")
    assert looks_like_eagle(second)
    assert read_eagle(second, target).fingerprint == read_eagle(first, target).fingerprint


def test_what_is_shared_is_the_targets_memory(tmp_path: Path, target: Source) -> None:
    head = read_eagle(written(tmp_path / "1", target, "official-1")[0], target)
    assert head.shares == ("embedding", "lm_head")
    assert head.model.embed_tokens.weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert head.model.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()  # type: ignore[operator]
    head = read_eagle(written(tmp_path / "3", target, "official-3")[0], target)
    assert head.shares == ("embedding",)
    head = read_eagle(written(tmp_path / "narrow", target, "official-3-narrow")[0], target)
    assert head.shares == ()


V1_MISTAKES: dict[str, dict[str, Any]] = {
    "input norm left out": {"skip": ("0.input",)},  # and so of a head without one that is given one
    "output norm left out": {"skip": ("norm",)},
    "bias dropped": {"skip": ("fc.bias",)},
    "feature before embedding": {"feature_first": True},
    "normed state passed on": {"normed_state": True},
    "theta": {"theta": 1e6},
    "linear rope": {"rope_divisor": 2.0},
}
V3_MISTAKES: dict[str, dict[str, Any]] = {
    "residual not normed": {"normed_residual": False},
    "state not normed": {"normed_state": False},
    "feature before embedding": {"feature_first": True},
    "input norm left out": {"skip": ("0.input",)},
    "fc_norm left out": {"skip": ("fc_norm.1",)},
    "theta": {"theta": 1e6},
}


@pytest.mark.parametrize("mistake", V1_MISTAKES)
def test_reference_tells_version_1_variants_apart(
    tmp_path: Path, target: Source, streams: dict[int, Array], mistake: str
) -> None:
    folder, reference, _ = written(tmp_path, target, "HASS")
    wrong = replace(reference, **V1_MISTAKES[mistake])
    assert distance(read_eagle(folder, target), wrong, streams, ()) > 100 * TOLERANCE


@pytest.mark.parametrize("mistake", V3_MISTAKES)
def test_reference_tells_version_3_variants_apart(
    tmp_path: Path, target: Source, streams: dict[int, Array], mistake: str
) -> None:
    folder, reference, taps = written(tmp_path, target, "speculators-3.1")
    wrong = replace(reference, **V3_MISTAKES[mistake])
    assert distance(read_eagle(folder, target), wrong, streams, taps) > 100 * TOLERANCE


def test_a_normal_input_norm_would_be_seen_in_a_plain_head(
    tmp_path: Path, target: Source, streams: dict[int, Array]
) -> None:
    """Pitfall 18: an ordinary layer's input norm in an EAGLE-1 head, even with weights of one."""
    folder, reference, _ = written(tmp_path, target, "official-1")
    head = read_eagle(folder, target)
    assert head.form == EagleForm(1)
    normal = replace(reference, weights={**reference.weights, "0.input": np.ones(WIDTH)})
    assert distance(head, normal, streams, ()) > 100 * TOLERANCE


# ---- one head, many layouts ----


def test_layouts_of_one_version_3_head_agree(tmp_path: Path, target: Source) -> None:
    reference = make_reference(target, 3)
    heads = [
        read_eagle(
            save(tmp_path / name, tensors_of(reference, name, ("embedding",)), config_of(reference, name)), target
        )
        for name in ("official", "SpecForge", "speculators", "ModelOpt")
    ]
    assert [head.layout for head in heads] == ["official", "SpecForge", "speculators", "ModelOpt"]
    assert len({head.fingerprint for head in heads}) == 1


def test_fingerprint_sees_tensors_form_rope_and_ids(tmp_path: Path, target: Source) -> None:
    reference = make_reference(target, 3)
    tensors, config = tensors_of(reference, "official", ("embedding",)), config_of(reference, "official")
    prints = [read_eagle(save(tmp_path / "a", tensors, config), target).fingerprint]
    other_ids = torch.from_numpy(IDS - np.arange(len(IDS))).clone()
    other_ids[-1] -= 1
    mask = tensors["t2d"].clone()
    mask[318:] = torch.tensor([True, False])
    changed = tensors["norm.weight"].clone()
    changed[3] += 0.001
    for name, more_tensors, more in (
        ("tensor", {"norm.weight": changed}, {}),
        ("ids", {"d2t": other_ids, "t2d": mask}, {}),
        ("theta", {}, {"rope_theta": 20000.0}),
        ("taps", {}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}),
        ("norm", {}, {"norm_output": True}),
        ("heads", {}, {"num_attention_heads": 8, "num_key_value_heads": 4}),
    ):
        prints.append(read_eagle(save(tmp_path / name, tensors | more_tensors, config | more), target).fingerprint)
    assert len(set(prints)) == 7
    assert read_eagle(save(tmp_path / "b", tensors, config), target).fingerprint == prints[0]


@pytest.mark.parametrize(
    ("layout", "given", "taps"),
    [
        ("official", None, (2, 4, 5)),
        ("official", [1, 3, 4], (1, 3, 4)),
        ("official", [0, 3, 8], (0, 3, 8)),
        ("speculators", None, (2, 4, 5)),
        ("speculators", [1, 3, 4], (1, 3, 4)),
        ("SpecForge", None, (2, 4, 5)),
        ("SpecForge", [1, 3, 4], (2, 4, 5)),
        ("SpecForge", [2, 4, 7], (3, 5, 8)),
        ("ModelOpt", [], (2, 4, 5)),
        ("ModelOpt", [1, 3, 4], (2, 4, 5)),
    ],
)
def test_taps_follow_the_writer(
    tmp_path: Path,
    target: Source,
    streams: dict[int, Array],
    layout: str,
    given: list[int] | None,
    taps: tuple[int, ...],
) -> None:
    """Pitfall 14: the same numbers are other tensors, the writer decides which."""
    reference = make_reference(target, 3)
    config = config_of(reference, layout)
    place = config if layout in ("official", "speculators") else config["eagle_config"]
    place["eagle_aux_hidden_state_layer_ids"] = given
    head = read_eagle(save(tmp_path, tensors_of(reference, layout, ("embedding",)), config), target)
    assert head.form.taps == taps
    if max(taps) < LAYERS:
        assert distance(head, reference, streams, taps) < TOLERANCE
        off_by_one = tuple(tap + 1 for tap in taps)
        assert distance(head, reference, streams, off_by_one) > 100 * TOLERANCE


# ---- norms ----


def open_head(folder: Path, target: Source, layout: str, drop: str) -> Path:
    case = {"speculators": "speculators-3.1", "SpecForge": "SpecForge-3.1"}[layout]
    folder, _, _ = written(folder, target, case)
    config = json.loads((folder / "config.json").read_text())
    del config[drop]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("layout", "name", "why"),
    [
        ("speculators", "norm_before_residual", "which vLLM takes for true and speculators for false"),
        ("SpecForge", "norm_output", "though the head has fc_norm"),
    ],
)
def test_open_norms_must_be_named(
    tmp_path: Path, target: Source, streams: dict[int, Array], layout: str, name: str, why: str
) -> None:
    folder = open_head(tmp_path, target, layout, name)
    with pytest.raises(CheckpointError, match=rf"{name} is missing, {why}.* say --norm {name}=true or --norm {name}=f"):
        read_eagle(folder, target)
    assert any(f"{name} is missing" in warning for warning in read_eagle(folder, None).warnings)
    yes, no = (read_eagle(folder, target, norms={name: value}) for value in (True, False))
    assert (getattr(yes.form, name), getattr(no.form, name)) == (True, False)
    assert f"{name} true: the command line says so" in yes.reasons
    assert np.abs(torch_draft(yes, streams)[3][-1] - torch_draft(no, streams)[3][-1]).max() > 0.01


def test_norms_that_are_not_open(tmp_path: Path, target: Source) -> None:
    """Official EAGLE-3 has neither, speculators' norm_output is false for all its readers."""
    assert read_eagle(written(tmp_path / "o", target, "official-3")[0], target).form == EagleForm(3, TAPS)
    head = read_eagle(open_head(tmp_path / "s", target, "speculators", "norm_output"), target)
    assert head.form.norm_before_residual
    assert not head.form.norm_output


def test_the_command_line_counts_before_config_json(tmp_path: Path, target: Source) -> None:
    folder, _, _ = written(tmp_path, target, "SpecForge-3.1")
    assert any(
        "norm_output is true, which meant something else" in text for text in read_eagle(folder, target).warnings
    )
    head = read_eagle(folder, target, norms={"norm_output": False})
    assert not head.form.norm_output
    assert any("norm_output is true, the command line says false and counts" in text for text in head.warnings)


def test_norms_nobody_can_name(tmp_path: Path, target: Source) -> None:
    folder, _, _ = written(tmp_path / "3", target, "official-3")
    with pytest.raises(
        CheckpointError, match=r"--norm fc_norm: not a norm that a head leaves open; those are norm_befo"
    ):
        read_eagle(folder, target, norms={"fc_norm": True})
    folder, _, _ = written(tmp_path / "1", target, "official-1")
    with pytest.raises(
        CheckpointError, match=r"--norm norm_output: this is an EAGLE-1 head, which leaves no norm open"
    ):
        read_eagle(folder, target, norms={"norm_output": True})


@pytest.mark.parametrize(
    ("case", "key", "held"),
    [
        ("SpecForge-3.1", "fc_norm", "fc_norm.0.weight"),
        ("speculators-norms", "norm_before_fc", "input_norm.weight"),
        ("speculators-1-layernorms", "layernorms", "embedding_layernorm.weight"),
    ],
)
def test_norm_weights_against_config(
    tmp_path: Path, target: Source, streams: dict[int, Array], case: str, key: str, held: str
) -> None:
    """A norm in the file is used although config.json denies it; one that it promises must be there."""
    folder, reference, taps = written(tmp_path, target, case)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: False}))
    head = read_eagle(folder, target)
    assert distance(head, reference, streams, taps) < TOLERANCE
    assert any(f"{key} is false, but the file holds '{held}'; it is used" in warning for warning in head.warnings)
    tensors = load_file(folder / "model.safetensors")
    del tensors[held]
    save(folder, tensors, {**config, key: True})
    with pytest.raises(CheckpointError, match=rf"tensor '{re.escape(held)}' is missing"):
        read_eagle(folder, target)


@pytest.mark.parametrize(
    ("case", "key", "said", "bias"),
    [
        ("official-1", "bias", False, "holds 'fc.bias'"),
        ("official-1-theta", "bias", True, "has no 'fc.bias'"),
        ("official-1-theta", "bias", None, "has no 'fc.bias'"),  # the official reader takes it for true
        ("official-1-qkv-bias", "qkv_bias", False, "holds 'layers.0.self_attn.q_proj.bias'"),
        ("SpecForge-bias", "attention_bias", False, "holds 'layers.0.self_attn.q_proj.bias'"),
    ],
)
def test_biases_against_config(
    tmp_path: Path, target: Source, streams: dict[int, Array], case: str, key: str, said: bool | None, bias: str
) -> None:
    """Pitfall 11: what the file holds is used, and the contradiction told."""
    folder, reference, taps = written(tmp_path, target, case)
    config = {**json.loads((folder / "config.json").read_text()), key: said}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    head = read_eagle(folder, target)
    assert distance(head, reference, streams, taps) < TOLERANCE
    shown = json.dumps(True if said is None else said)
    assert any(f"{key} is {shown}, but the file {bias}; the file counts" in warning for warning in head.warnings)


# ---- sizes and rope ----


def test_missing_settings(tmp_path: Path, target: Source, streams: dict[int, Array]) -> None:
    """33B's max_sequence_length, no head counts that the shapes tell, no rope_theta: 10000 whatever the target's is."""
    folder, reference, _ = written(tmp_path, target, "official-1-mixtral")
    config = json.loads((folder / "config.json").read_text())
    for name in (
        "max_position_embeddings",
        "num_key_value_heads",
        "intermediate_size",
        "num_hidden_layers",
        "vocab_size",
    ):
        del config[name]
    (folder / "config.json").write_text(json.dumps({**config, "max_sequence_length": 4096}))
    head = read_eagle(folder, target)
    assert distance(head, reference, streams, ()) < TOLERANCE
    assert head.model.config.max_position_embeddings == 4096
    assert "rope_theta 10000: config.json has none" in head.reasons


def test_speculators_leaves_out_transformers_defaults(tmp_path: Path, target: Source) -> None:
    reference = make_reference(target, 3, heads=32, kv_heads=32, head_dim=2)
    config = config_of(reference, "speculators")
    for name in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act", "vocab_size"):
        del config["transformer_layer_config"][name]
    head = read_eagle(save(tmp_path, tensors_of(reference, "speculators", ("embedding",)), config), target)
    assert head.model.config.num_attention_heads == 32


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_other_rope_types_are_the_heads_own(tmp_path: Path, target: Source, kind: str) -> None:
    folder, _, _ = written(tmp_path, target, "SpecForge")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": rope}))
    head = read_eagle(folder, target)
    assert head.model.config.rope_parameters["rope_type"] == kind
    assert head.model.rotary_emb.inv_freq.device.type == "cpu"
    plain = 1e6 ** (-np.arange(0, 16, 2) / 16)
    found = head.model.rotary_emb.inv_freq.double().numpy()
    assert np.allclose(found[0], plain[0])  # fast channels stay, slow ones turn eight times slower
    assert np.allclose(found[-1], plain[-1] / 8)


# ---- draft vocabulary ----


def test_ids_in_any_order_are_sorted_with_their_rows(tmp_path: Path, target: Source, streams: dict[int, Array]) -> None:
    shuffled = np.random.default_rng(3).permutation(IDS)
    reference = make_reference(target, 3, ids=shuffled)
    folder = save(tmp_path, tensors_of(reference, "official", ("embedding",)), config_of(reference, "official"))
    head = read_eagle(folder, target)
    assert head.token_ids is not None
    assert head.token_ids.tolist() == IDS.tolist()
    order = shuffled.argsort()
    ascending = replace(
        reference, token_ids=IDS, weights={**reference.weights, "lm_head": reference.weights["lm_head"][order]}
    )
    assert distance(head, ascending, streams, TAPS) < TOLERANCE
    assert reference.draft(PROMPT[1:], [streams[tap] for tap in TAPS], STEPS)[0] == torch_draft(head, streams)[0]


def test_a_map_of_the_whole_vocabulary_is_none(tmp_path: Path, target: Source) -> None:
    folder, _, _ = written(tmp_path, target, "official-3-whole-vocabulary")
    tensors = load_file(folder / "model.safetensors")
    assert "d2t" not in tensors
    maps = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    config = json.loads((folder / "config.json").read_text())
    head = read_eagle(save(tmp_path / "mapped", tensors | maps, config), target)
    assert head.token_ids is None
    assert head.fingerprint == read_eagle(folder, target).fingerprint


# ---- bad input ----

Change = Callable[[Tensors, Config], Any]


def bad(config: Config, **changes: Any) -> None:
    config.update(changes)


D2T = torch.from_numpy(IDS - np.arange(len(IDS)))
BAD: list[tuple[str, str, Change, str]] = [
    # case, what is wrong, the change, the message
    (
        "official-1",
        "hidden size",
        lambda t, c: bad(c, hidden_size=32),
        r"'fc\.weight' has shape \[64, 128\] but config",
    ),
    (
        "official-1",
        "vocabulary",
        lambda t, c: bad(c, vocab_size=400),
        r"vocabulary of 400 tokens but the target has 320",
    ),
    (
        "official-3",
        "vocabulary",
        lambda t, c: bad(c, vocab_size=400),
        r"vocabulary of 400 tokens but the target has 320",
    ),
    (
        "official-1",
        "own embedding",
        lambda t, c: t.update({"embed_tokens.weight": torch.zeros(300, WIDTH)}),
        r"vocabulary of 300 tokens but the target has 320; use a head made for this model",
    ),
    (
        "official-3",
        "target width",
        lambda t, c: bad(c, target_hidden_size=32),
        r"features of target_hidden_size 32 but the target's are 64 wide; use a head made for this model",
    ),
    (
        "official-3",
        "fc",
        lambda t, c: t.update({"fc.weight": torch.zeros(WIDTH, 3 * 80)}),
        r"fc\.weight reads 240 numbers but 3 layers of a target 64 wide make 192",
    ),
    (
        "official-3-narrow",
        "no embedding",
        lambda t, c: t.pop("embed_tokens.weight"),
        r"has no embed_tokens\.weight, and the target's is \[320, 64\] but the head is 48 wide",
    ),
    ("official-3", "no lm_head", lambda t, c: t.pop("lm_head.weight"), r"tensor 'lm_head\.weight' is missing"),
    (
        "official-3",
        "missing",
        lambda t, c: t.pop("midlayer.mlp.up_proj.weight"),
        r"tensor 'midlayer\.mlp\.up_proj\.weight' is missing; the head is incomplete",
    ),
    (
        "speculators",
        "missing",
        lambda t, c: t.pop("layers.0.mlp.up_proj.weight"),
        r"tensor 'layers\.0\.mlp\.up_proj\.weight' is missing; the head is incomplete",
    ),
    ("speculators", "no fc", lambda t, c: t.pop("fc.weight"), r"tensor 'fc\.weight' is missing"),
    (
        "official-3",
        "unknown",
        lambda t, c: t.update({"parallel_heads.0.weight": torch.zeros(2, 2)}),
        r"tensor 'parallel_heads\.0\.weight' is in no known EAGLE-3 layout",
    ),
    (
        "official-1",
        "unknown",
        lambda t, c: t.update({"layers.0.self_attn.q_norm.weight": torch.ones(16)}),
        r"tensor 'layers\.0\.self_attn\.k_norm\.weight' is missing",
    ),
    (
        "official-3",
        "NaN",
        lambda t, c: t["fc.weight"].view(-1)[5:6].fill_(torch.nan),
        r"tensor 'fc\.weight' holds NaN or infinite values",
    ),
    (
        "official-3",
        "inf",
        lambda t, c: t["lm_head.weight"].view(-1)[5:6].fill_(torch.inf),
        r"tensor 'lm_head\.weight' holds NaN or infinite values",
    ),
    (
        "official-3",
        "integers",
        lambda t, c: t.update({"norm.weight": torch.ones(WIDTH, dtype=torch.int32)}),
        r"tensor 'norm\.weight' is torch\.int32; quantised heads are not supported",
    ),
    (
        "official-3",
        "int8 without scale",
        lambda t, c: t.update({"fc.weight": torch.ones(WIDTH, 3 * WIDTH, dtype=torch.int8)}),
        r"tensor 'fc\.weight\.scale' is missing",
    ),
    ("official-3", "no d2t", lambda t, c: t.pop("d2t"), r"tensor 'd2t' is missing, though the head drafts 16 of 320"),
    ("ModelOpt-3", "no d2t", lambda t, c: t.pop("d2t"), r"tensor 'd2t' is missing, though the head drafts 16 of 320"),
    (
        "official-3",
        "floats",
        lambda t, c: t.update(d2t=D2T.float()),
        r"d2t is torch\.float32 \[16\]; expected int64 \[draft vocabulary\]",
    ),
    ("official-3", "short", lambda t, c: t.update(d2t=D2T[:-1]), r"d2t has 15 entries but lm_head\.weight has 16 rows"),
    (
        "ModelOpt-3",
        "range",
        lambda t, c: t.update(d2t=torch.cat((D2T[:-1], D2T[-1:] + 1))),
        r"read as offsets \(target id = draft id \+ d2t\[draft id\]\), holds id 320, outside the target's 320 tokens",
    ),
    ("ModelOpt-3", "negative", lambda t, c: t.update(d2t=D2T - 4), r"holds id -1, outside the target's 320 tokens"),
    (
        "ModelOpt-3",
        "twice",
        lambda t, c: t.update(d2t=torch.cat((D2T[:1], D2T[:1] - 1, D2T[2:]))),
        r"holds id 3 more than once",
    ),
    (
        "ModelOpt-3",
        "absolute ids",
        lambda t, c: t.update(d2t=torch.from_numpy(IDS)),
        r"read as offsets .* holds id 325, outside",
    ),
    (
        "official-3",
        "t2d of others",
        lambda t, c: t["t2d"].copy_(t["t2d"].roll(1)),
        r"d2t names target id 3, which t2d lacks, t2d has 16; the two do not belong together",
    ),
    (
        "official-3",
        "t2d of more",
        lambda t, c: t["t2d"][:1].fill_(True),
        r"d2t names 16 ids, t2d has 17; the two do not belong together",
    ),
    (
        "official-3",
        "long t2d",
        lambda t, c: t.update(t2d=torch.ones(400, dtype=torch.bool)),
        r"t2d is \[400\] but the t",
    ),
    (
        "official-3-whole-vocabulary",
        "too many rows",
        lambda t, c: t.update({"lm_head.weight": torch.zeros(330, WIDTH)}),
        r"lm_head\.weight has 330 rows but the target 320 tokens",
    ),
    (
        "official-3",
        "taps beyond",
        lambda t, c: bad(c, eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        r"eagle_aux_hidden_state_layer_ids is \[2, 4, 9\]; expected different layers, ascending, out of the target's 8",
    ),
    (
        "SpecForge",
        "taps beyond",
        lambda t, c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        r"is \[2, 4, 8\]; expected different layers, ascending, out of the target's 8",
    ),
    (
        "official-3",
        "negative taps",
        lambda t, c: bad(c, eagle_aux_hidden_state_layer_ids=[-1, 2, 4]),
        r"is \[-1, 2, 4\]; expected different layers",
    ),
    (
        "official-3",
        "two taps",
        lambda t, c: bad(c, eagle_aux_hidden_state_layer_ids=[2, 4]),
        r"fc\.weight reads 192 numbers but 2 layers of a target 64 wide make 128",
    ),
    (
        "official-3",
        "tap names",
        lambda t, c: bad(c, eagle_aux_hidden_state_layer_ids=["low"]),
        r"is \['low'\]; expected a list of layer numbers",
    ),
    (
        "official-3",
        "rope type",
        lambda t, c: bad(c, rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        r"config\.json: rope type 'spiral' is unknown; known are default, linear",
    ),
    (
        "official-3",
        "nested rope",
        lambda t, c: bad(c, rope_parameters={"full_attention": {"rope_theta": 1e6}}),
        r"rope settings .* are of no known form",
    ),
    ("official-3", "no factor", lambda t, c: bad(c, rope_scaling={"type": "linear"}), r"not a usable layer \(.*factor"),
    ("official-3", "theta", lambda t, c: bad(c, rope_theta="big"), r"rope_theta is 'big'; expected a positive number"),
    (
        "official-3",
        "partial",
        lambda t, c: bad(c, partial_rotary_factor=0.5),
        r"partial_rotary_factor is 0\.5; only 1\.0 is supported",
    ),
    (
        "official-3",
        "head counts",
        lambda t, c: bad(c, num_key_value_heads=4),
        r"k_proj\.weight' has shape \[32, 128\] but config\.json makes it \[64, 128\]",
    ),
    (
        "official-3",
        "no heads",
        lambda t, c: c.pop("num_attention_heads"),
        r"config\.json: num_attention_heads is missing",
    ),
    (
        "official-3",
        "count",
        lambda t, c: bad(c, num_attention_heads="4"),
        r"num_attention_heads is '4'; expected a positive integer",
    ),
    (
        "ModelOpt-3-deep",
        "fewer layers",
        lambda t, c: bad(c, num_hidden_layers=3),
        r"config\.json says num_hidden_layers 3 but the file holds 2",
    ),
    ("official-3", "model type", lambda t, c: bad(c, model_type="gemma2"), r"model_type 'gemma2' is not supported"),
    ("official-3", "activation", lambda t, c: bad(c, hidden_act="loud"), r"hidden_act 'loud' is unknown"),
    (
        "official-3",
        "window",
        lambda t, c: bad(c, use_sliding_window=True),
        r"sliding-window attention are not supported",
    ),
    (
        "speculators",
        "other kind",
        lambda t, c: bad(c, speculators_model_type="dflash"),
        r"speculators_model_type is 'dflash'; heads that can be read are 'eagle' and 'eagle3'",
    ),
    ("speculators", "flag", lambda t, c: bad(c, norm_output="yes"), r"norm_output is 'yes'; expected true or false"),
    (
        "speculators-norms",
        "two norms",
        lambda t, c: t.update({"fc_norm.0.weight": torch.ones(WIDTH)}),
        r"has both fc_norm and input_norm",
    ),
    ("official-3", "nothing", lambda t, c: t.clear(), r"no EAGLE head: neither 'midlayer\.\*' nor an fc\.weight among"),
]


@pytest.mark.parametrize(("case", "what", "change", "message"), BAD, ids=[f"{case}: {what}" for case, what, *_ in BAD])
def test_bad_input(tmp_path: Path, target: Source, case: str, what: str, change: Change, message: str) -> None:
    del what
    folder, _, _ = written(tmp_path, target, case)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save(folder, tensors, config)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_eagle(folder, target)
    assert str(tmp_path) in str(caught.value)


def test_a_target_of_another_width_or_too_few_layers(tmp_path: Path) -> None:
    wide = Source(Path("wide"), tiny_model("llama", hidden_size=96, num_hidden_layers=LAYERS), None, "f", "c", (2,))
    good = Source(Path("good"), tiny_model("llama", num_hidden_layers=LAYERS), None, "f", "c", (2,))
    low = Source(Path("low"), tiny_model("llama", num_hidden_layers=6), None, "f", "c", (2,))
    folder, _, _ = written(tmp_path / "1", good, "official-1")
    with pytest.raises(CheckpointError, match=r"features of hidden_size 64 but the target's are 96 wide"):
        read_eagle(folder, wide)
    folder, _, _ = written(tmp_path / "3", good, "official-3")
    with pytest.raises(
        CheckpointError, match=r"fc\.weight reads 192 numbers but 3 layers of a target 96 wide make 288"
    ):
        read_eagle(folder, wide)
    with pytest.raises(CheckpointError, match=r"2, L//2, L-3 are no three layers of a target of 6"):
        read_eagle(folder, low)


def test_bad_files(tmp_path: Path, target: Source) -> None:
    with pytest.raises(CheckpointError, match=r"no EAGLE head found; expected one of model\.safetensors\.index\.json"):
        read_eagle(tmp_path, target)
    assert not looks_like_eagle(tmp_path)
    folder, _, _ = written(tmp_path / "head", target, "official-3")
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing or empty; an EAGLE head needs its sizes"):
        read_eagle(folder, target)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_eagle(folder, target)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or no safetensors file"):
        read_eagle(folder, target)
    (folder / "model.safetensors").unlink()

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("this must not run",)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Code()}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a plain tensor file .*never run"):
        read_eagle(folder, target)
    assert not looks_like_eagle(folder)


def test_harmless_extras(tmp_path: Path, target: Source) -> None:
    folder, _, _ = written(tmp_path, target, "speculators")
    before = read_eagle(folder, target).fingerprint
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tensors |= {
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "verifier_norm.weight": torch.ones(WIDTH),
        "verifier_lm_head.weight": torch.ones(16, WIDTH),
    }
    assert read_eagle(save(folder, tensors, config), target).fingerprint == before


def test_config_that_is_wrong_where_tensors_tell(tmp_path: Path, target: Source) -> None:
    folder, _, _ = written(tmp_path, target, "ModelOpt-3-deep")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "draft_vocab_size": 32000}))
    head = read_eagle(folder, target)
    assert head.layers == 2
    assert any("config.json says num_hidden_layers 1, the file holds 2" in warning for warning in head.warnings)
    assert any("config.json says draft_vocab_size 32000, d2t has 16 entries" in warning for warning in head.warnings)


# ---- writing ----


@pytest.mark.parametrize("layout", ["official", "speculators"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("ModelOpt-1")])
def test_written_heads_are_read_again(tmp_path: Path, target: Source, case: str, layout: str) -> None:
    """The random weights are fp16 numbers, so the very same head comes back, without a word from the command line."""
    head = read_eagle(written(tmp_path / "in", target, case)[0], target)
    write_eagle(head, tmp_path / "out", layout)
    again = read_eagle(tmp_path / "out", target)
    old = "speculators-eagle1" if head.version == 1 else "speculators"
    assert again.layout == (layout if layout == "official" else old)
    assert again.form == head.form
    assert again.shares == head.shares
    assert again.fingerprint == head.fingerprint
    assert again.model.config.rope_parameters == head.model.config.rope_parameters
    assert (again.token_ids is None) == (head.token_ids is None)


@pytest.mark.parametrize("case", ["official-1", "HASS", "official-3", "SpecForge-3.1", "ModelOpt-3-deep"])
def test_foreign_readers_find_the_names_they_know(tmp_path: Path, target: Source, case: str) -> None:
    """Where a layout has a head's every part, its own names are written."""
    folder, reference, _ = written(tmp_path / "in", target, case)
    write_eagle(read_eagle(folder, target), tmp_path / "out")
    expected = set(load_file(folder / "model.safetensors"))
    expected |= {"t2d"} if case.startswith("ModelOpt") else set()
    expected = {key.replace("hidden_layernorm", "layers.0.input_layernorm") for key in expected}
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == expected
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for name, value in sizes_of(reference).items():
        assert config[name] == value


def test_a_trained_head_with_all_that_is_ours(tmp_path: Path, target: Source, streams: dict[int, Array]) -> None:
    """A version 1 head of two layers, all norms and a draft vocabulary; a version 3 head with the target's rows."""
    folder, reference, _ = written(tmp_path / "in", target, "ModelOpt-1-norms")
    foreign = read_eagle(folder, target)
    ids = torch.from_numpy(IDS)
    rows = target.lm_head.weight.detach()[ids]  # type: ignore[operator]
    foreign.model.lm_head.weight.data.copy_(rows)
    head = make_head(tmp_path, foreign.model, target, ids)
    assert head.target_fingerprint == target.fingerprint
    write_eagle(head, tmp_path / "one")
    assert "lm_head.weight" not in load_file(tmp_path / "one" / "model.safetensors")
    again = read_eagle(tmp_path / "one", target)
    assert again.fingerprint == head.fingerprint
    assert again.warnings == ()
    assert torch.equal(again.model.lm_head.weight, rows)
    same = replace(reference, weights={**reference.weights, "lm_head": rows.double().numpy()})
    assert distance(again, same, streams, ()) < TOLERANCE
    with pytest.raises(CheckpointError, match="speculators' form of EAGLE-1 has one layer"):
        write_eagle(head, tmp_path / "bad", "speculators")

    third = read_eagle(written(tmp_path / "3", target, "official-3")[0], target)
    third.model.lm_head.weight.data.copy_(rows)
    write_eagle(make_head(tmp_path, third.model, target, ids), tmp_path / "three")
    assert "lm_head.weight" not in load_file(tmp_path / "three" / "model.safetensors")
    again = read_eagle(tmp_path / "three", target)
    assert again.shares == ("embedding", "lm_head")
    assert torch.equal(again.model.lm_head.weight, rows)
    config = json.loads((tmp_path / "three" / "config.json").read_text())
    del config["speccompile_eagle"]["shares"]
    (tmp_path / "three" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing"):
        read_eagle(tmp_path / "three", target)


def test_heads_for_another_target_are_refused(tmp_path: Path, target: Source) -> None:
    head = read_eagle(written(tmp_path / "in", target, "official-3")[0], target)
    write_eagle(replace_target(head, target), tmp_path / "out")
    other = replace(target, fingerprint="e" * 64)
    with pytest.raises(
        CheckpointError, match=rf"fingerprint {'f' * 64} but this target's is {'e' * 64}; use the model"
    ):
        read_eagle(tmp_path / "out", other)


def replace_target(head: EagleHead, target: Source) -> EagleHead:
    return make_head(head.path, head.model, target, head.token_ids, head.shares)


@pytest.mark.parametrize("case", ["official-1", "official-3-narrow", "speculators-norms"])
def test_int8(tmp_path: Path, target: Source, case: str) -> None:
    """Each row within half a step of its largest weight / 127; vectors, ids and form exactly."""
    head = read_eagle(written(tmp_path / "in", target, case)[0], target)
    write_eagle(head, tmp_path / "out", "speculators" if "speculators" in case else "official", "int8")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for key, value in stored.items() if key.endswith("proj.weight")} == {torch.int8}
    again = read_eagle(tmp_path / "out", target)
    assert again.form == head.form
    assert (again.token_ids is None) or again.token_ids.tolist() == IDS.tolist()
    before, after = own_tensors(head), own_tensors(again)
    assert before.keys() == after.keys()
    moved = 0.0
    for name, value in before.items():
        if value.dim() == 1:
            torch.testing.assert_close(after[name], value, rtol=0, atol=0)
            continue
        step = value.abs().amax(-1, keepdim=True) / 127
        assert ((after[name] - value).abs() <= step * 0.501).all()
        moved = max(moved, float((after[name] - value).abs().max()))
    assert moved > 0


def test_writing_errors(tmp_path: Path, target: Source) -> None:
    folder, _, _ = written(tmp_path / "in", target, "official-3")
    head = read_eagle(folder, target)
    with pytest.raises(CheckpointError, match="layout 'SpecForge' is unknown; use one of official, speculators"):
        write_eagle(head, tmp_path / "out", "SpecForge")
    with pytest.raises(CheckpointError, match="dtype 'int4' is unknown; use one of fp16, int8"):
        write_eagle(head, tmp_path / "out", dtype="int4")
    head.model.norm.weight.data[0] = 1e6
    with pytest.raises(CheckpointError, match=r"norm\.weight reaches 1e\+06, too large for fp16"):
        write_eagle(head, tmp_path / "out")
    with pytest.raises(CheckpointError, match="was read without its target, so its taps are unknown"):
        write_eagle(read_eagle(folder, None), tmp_path / "out")
    for ids in (torch.tensor([5, 4, 9]), torch.from_numpy(IDS).flip(0)):
        with pytest.raises(CheckpointError, match=f"{len(ids)} token ids for 16 lm_head rows; give one for each row"):
            make_head(tmp_path, head.model, target, ids)
    assert not (tmp_path / "out").exists()


# ---- inspect ----


def test_inspect(tmp_path: Path, target: Source, speccompile: Cli) -> None:
    folder, _, _ = written(tmp_path / "3", target, "SpecForge-3.1")
    facts = describe(folder)
    json.dumps(facts)
    assert facts["kind"] == "eagle head"
    assert (facts["version"], facts["layout"]) == (3, "SpecForge")
    assert facts["reasons"][:2] == [
        "EAGLE-3: there is a tensor 'midlayer.hidden_norm.weight'",
        "layout SpecForge: architectures names LlamaForCausalLMEagle3",
    ]
    assert facts["taps"] == [2, 4, 5]
    assert (facts["fusion_norm"], facts["norm_output"], facts["norm_before_residual"]) == ("each", True, False)
    assert (facts["draft_vocabulary"], facts["vocab_size"]) == (16, VOCAB)
    assert (facts["embedding"], facts["lm_head"]) == ("the target's", "its own")
    assert facts["rope"]["rope_theta"] == 10000.0
    assert facts["fingerprint"] == read_eagle(folder, target).fingerprint

    folder, _, _ = written(tmp_path / "plain", target, "official-3")
    facts = describe(folder)
    assert (facts["taps"], facts["fingerprint"]) == (None, None)  # they depend on how many layers the target has
    assert facts["reads"] == "what enters the target's layers 2, L//2, L-3"

    folder, _, _ = written(tmp_path / "1", target, "official-1")
    facts = describe(folder)
    assert (facts["version"], facts["layout"], facts["biases"]) == (1, "official", ["fc"])
    assert facts["reasons"][0] == "EAGLE-1: fc.weight is [64, 128], [H, 2H], and there is no hidden_norm"
    assert facts["lm_head"] == "the target's"
    assert facts["fingerprint"] == read_eagle(folder, target).fingerprint
    status, out, _ = speccompile("inspect", folder)
    assert status == 0
    shown = " ".join(out.split())
    assert "EAGLE-1: fc.weight is [64, 128], [H, 2H], and there is no hidden_norm" in shown
    assert "a wrong target shows only as low acceptance" in shown
    assert facts["parameters"] == sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
