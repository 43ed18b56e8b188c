"""What `speccompile inspect` says of a bundle, a model, Medusa heads or an EAGLE head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from speccompile.graphs.errors import CheckpointError
from speccompile.graphs.manifest import MANIFEST_FILE
from speccompile.graphs.tree import AdaptiveChain, TokenTree, tree_from_json

CONFIGS_OF_MODELS = ("architectures", "model_type")


def describe(path: Path) -> dict[str, Any]:
    """Facts about whatever is at `path`, as JSON.

    Raises:
        SpecCompileError: when nothing there can be read.
    """
    if (path / MANIFEST_FILE).is_file():
        return describe_bundle(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; give a bundle, a model or heads.")
    from speccompile.compiler.draft_model import slim_facts
    from speccompile.compiler.eagle_head import looks_like_eagle
    from speccompile.compiler.medusa_heads import read_heads

    if (slim := slim_facts(path)) is not None:
        return {"kind": "draft model", "path": str(path), **slim}
    if looks_like_eagle(path):
        return describe_eagle(path)
    try:
        heads = read_heads(path)
    except CheckpointError as not_heads:
        if path.suffix != ".gguf" and not (path / "config.json").is_file():
            raise
        try:
            return describe_model(path)
        except CheckpointError as not_model:
            raise CheckpointError(f"{not_model} As heads: {not_heads}") from not_model
    return {
        "kind": "medusa heads",
        "path": str(path),
        "layout": heads.layout,
        "heads": heads.num_heads,
        "heads_in_config": heads.config_heads,
        "blocks_per_head": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "lm_head": "the target's" if heads.lm_heads is None else f"{len(heads.lm_heads)} of their own",
        "draft_vocabulary": heads.draft_vocabulary,
        "fingerprint": heads.fingerprint,
        "target_fingerprint": heads.target_fingerprint,
    }


def describe_eagle(path: Path) -> dict[str, Any]:
    """An EAGLE head: what it was taken for and why; what depends on its target stays open."""
    from speccompile.compiler.eagle_head import own_tensors, read_eagle

    head = read_eagle(path, None)
    form, config = head.form, head.model.config
    switches = {
        1: ("join", "fusion_norm", "embedding_norm", "feature_norm", "input_norm", "output_norm"),
        3: ("fusion_norm", "norm_before_residual", "norm_output"),
    }[head.version]
    return {
        "kind": "eagle head",
        "path": str(path),
        "version": head.version,
        "layout": head.layout,
        "reasons": list(head.reasons),
        "layers": head.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "parameters": sum(tensor.numel() for tensor in own_tensors(head).values()),
        "reads": (
            "the post-norm hidden state"
            if not form.taps
            else f"what enters the target's layers {list(form.taps) if head.taps_known else '2, L//2, L-3'}"
        ),
        "taps": list(form.taps) if head.taps_known else None,
        **{name: getattr(form, name) for name in (*switches, "query_norm")},
        "biases": [name for name, module in head.model.named_modules() if getattr(module, "bias", None) is not None],
        "rope": config.rope_parameters,
        "embedding": "the target's" if "embedding" in head.shares else "its own",
        "lm_head": "the target's" if "lm_head" in head.shares else "its own",
        "vocab_size": config.vocab_size,
        "draft_vocabulary": head.draft_vocabulary,
        "fingerprint": head.fingerprint or None,
        "target_fingerprint": head.target_fingerprint,
        "warnings": list(head.warnings),
    }


def describe_bundle(path: Path) -> dict[str, Any]:
    """A bundle's manifest, with every graph's inputs and outputs."""
    from speccompile.runtime.backends.ort import graph_io
    from speccompile.runtime.bundle import Bundle

    bundle = Bundle.open(path)
    facts = {"kind": "bundle", "path": str(path), **bundle.manifest.to_json()}
    for name, info in facts["graphs"].items():
        info["inputs"], info["outputs"] = graph_io(path / info["file"])
        info["bytes"] = sum(f["bytes"] for file, f in facts["files"].items() if file.startswith(info["file"]))
        del name
    return facts


def describe_model(path: Path) -> dict[str, Any]:
    """A model: what tracing would find."""
    from speccompile.compiler.checkpoint import read_model
    from speccompile.graphs.target import survey

    source = read_model(path)
    found = survey(source.model, 2)
    layer = found.layers[0]
    return {
        "kind": "model",
        "path": str(path),
        "architecture": source.architecture,
        "parameters": sum(p.numel() for p in source.model.parameters()),
        "layers": len(found.layers),
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "windows": [layer.window for layer in found.layers],
        "softcap": layer.softcap,
        "hidden_size": found.width,
        "vocab_size": found.vocab_size,
        "eos_ids": list(source.eos_ids),
        "chat_template": source.tokenizer.chat_template is not None,
        "fingerprint": source.fingerprint,
        "config_fingerprint": source.config_fingerprint,
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """Print facts for a person."""
    if facts["kind"] != "bundle":
        _show_pairs(facts, console)
        return
    _show_pairs({"kind": "bundle", "path": facts["path"], "method": facts["method"], **facts["target"]}, console)
    for part in ("heads", "draft", "eagle", "lookahead", "lookup"):
        if facts[part]:
            _show_pairs({part: "", **facts[part]}, console)
    for name, graph in facts["graphs"].items():
        table = Table(
            "",
            "name",
            "type",
            "shape",
            title=f"{name}: {graph['file']}, {graph['dialect']}, opset {graph['opset']}, {graph['precision']}, "
            f"{graph['traced_nodes']} nodes traced, {graph['nodes']} after fusing, {graph['bytes'] / 1e6:.1f} MB",
        )
        for direction in ("inputs", "outputs"):
            shown = [io for io in graph[direction] if ".key" not in io["name"] and ".value" not in io["name"]]
            for io in shown:
                table.add_row(direction[:-1], io["name"], io["type"], str(io["shape"]))
            if caches := [io for io in graph[direction] if io not in shown]:
                table.add_row(
                    direction[:-1],
                    f"{caches[0]['name']} ... ({len(caches)})",
                    caches[0]["type"],
                    str(caches[0]["shape"]),
                )
        console.print(table)
    tree = tree_from_json(facts["tree"])
    if isinstance(tree, TokenTree):
        console.print(f"tree of {len(tree)} nodes, depth {tree.max_depth}", tree.draw(), sep="\n")
    else:
        what = "chain of adaptive length" if isinstance(tree, AdaptiveChain) else "tree, grown anew every round,"
        console.print(f"{what} of at most {len(tree)} nodes")
    table = Table("proof", "figures")
    for name, figures in facts["proof"].items():
        table.add_row(name, ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    console.print(table)


def _show_pairs(facts: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        sentences = isinstance(value, list) and name in ("reasons", "warnings")
        table.add_row(f"[bold]{name}[/bold]", escape("\n".join(value) if sentences else str(value)))
    console.print(table)
