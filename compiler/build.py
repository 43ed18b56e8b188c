"""checkpoint -> modules -> graphs -> bundle, with the proof before the publishing."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from speccompile.compiler.calibrate import TOKENS as CALIBRATION_TOKENS
from speccompile.compiler.calibrate import prompts, speak
from speccompile.compiler.checkpoint import Source, read_model
from speccompile.compiler.draft_model import DraftModel, cut_lm_head, read_draft
from speccompile.compiler.eagle_head import EagleHead, read_eagle
from speccompile.compiler.medusa_heads import MedusaHeads, check_against, read_heads
from speccompile.compiler.prove import prove
from speccompile.compiler.publish import staged
from speccompile.compiler.quantise import PRECISIONS, quantise_scatter, quantise_target
from speccompile.compiler.write_graph import write_graph
from speccompile.graphs import gqa, scatter
from speccompile.graphs.draft_model import DraftTail
from speccompile.graphs.errors import BundleError, CheckpointError, ProofError, SpecCompileError, TraceError
from speccompile.graphs.manifest import (
    MANIFEST_FILE,
    METHODS,
    SCHEMA,
    DraftInfo,
    EagleInfo,
    FileInfo,
    GraphInfo,
    HeadsInfo,
    Manifest,
    TargetInfo,
    TokenizerInfo,
    file_info,
)
from speccompile.graphs.medusa import MedusaModule, export_medusa
from speccompile.graphs.passes import (
    FoldWeights,
    PackTables,
    clean,
    finish_gqa_target,
    finish_scatter,
    quantise,
)
from speccompile.graphs.passes.weight_only import KINDS as WEIGHT_ONLY
from speccompile.graphs.settings import LOOKUP_TREE, LookaheadSettings, LookupSettings
from speccompile.graphs.target import Survey, Tail, TargetTail, survey
from speccompile.graphs.tree import ROOT_ALONE, AdaptiveChain, DraftTree, DynamicTree, TokenTree, load_tree
from speccompile.runtime.backends.ort import OrtTarget
from speccompile.runtime.decoder import load

DEFAULT_MAX_LENGTH = 8192
DEFAULT_TOP_K = 10
DRAFT_PRECISIONS = ("int8", "fp32")
# dialect -> precision of the target -> what its graph computes in
DIALECTS = {
    "gqa": dict.fromkeys(PRECISIONS, "fp32"),
    "scatter": {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", **dict.fromkeys(WEIGHT_ONLY, "fp16")},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DRAFT_TREE = AdaptiveChain(8, 0.4)
EAGLE_TREE = DynamicTree(10, 0.1, depth=5)  # SmolLM2-135M in fp32 on two CPU cores
EXACT = "exact"  # folder with graphs before rounding, while a bundle is made
TOKEN_MAP_FILE = "draft_tokens.npy"
LARGEST_WEIGHT = 1e30
PROOF_CAPACITY = 1024  # tokens a sequence may hold while the bundle is proved
VERSIONED = ("speccompile", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "numpy")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How the graphs of one bundle are made.

    Args:
        folder: of the bundle.
        max_length: most tokens of prompt and answer.
        dialect: of attention, one of `DIALECTS`.
        precision: of the target's weights. In dialect scatter it is also what everything computes in; weights in eight
            or four bits are multiplied in sixteen.
        draft_precision: of the weights that draft, in dialect gqa. In scatter they are as wide as what is computed.
        calibrate: see `build`.
    """

    folder: Path
    max_length: int
    dialect: str = "gqa"
    precision: str = "fp32"
    draft_precision: str = "fp32"
    calibrate: bool = True
    report: Report = lambda _: None

    @property
    def exact(self) -> Path:
        """Folder for graphs that the proof needs beside the bundle's own; each is there if it is another."""
        return self.folder / EXACT

    @property
    def computes(self) -> str:
        """One of `DTYPES`."""
        return DIALECTS[self.dialect][self.precision]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.computes]

    @property
    def rounds_activations(self) -> bool:
        """Whether a last bit may tip an integer: then the target verifies chains only (see `runtime.decoder`)."""
        return self.dialect == "gqa" and self.precision != "fp32"

    @property
    def rounds_drafts(self) -> bool:
        return self.dialect == "gqa" and self.draft_precision != "fp32"

    @property
    def provable(self) -> bool:
        """Whether ONNX Runtime's CPU kernels run the bundle's own graphs. What they lack, bfloat16, is proved on twins
        in float32, from the same trace."""
        return self.computes != "bf16"


def build(
    model: Path,
    out: Path,
    *,
    method: str = "medusa",
    dialect: str = "gqa",
    precision: str = "fp32",
    calibrate: bool = True,
    heads: Path | None = None,
    draft: Path | None = None,
    head: Path | None = None,
    norms: Mapping[str, bool] | None = None,
    lookahead: LookaheadSettings | None = None,
    lookup: LookupSettings | None = None,
    tree: DraftTree | None = None,
    draft_precision: str | None = None,
    max_length: int | None = None,
    force: bool = False,
    report: Report = lambda _: None,
) -> Manifest:
    """Make one bundle and publish it at `out`, or publish nothing.

    Args:
        model: transformers folder or .gguf file.
        method: one of `METHODS`.
        dialect: of attention: "gqa", made for ONNX Runtime, or "scatter", which TensorRT reads, too.
        precision: of the target's weights, one of `DIALECTS[dialect]`. What is emitted is then what plain decoding of
            the rounded target emits.
        calibrate: whether weights are rounded with regard to what they are multiplied with, on answers that the model
            writes itself; else each to its nearest level.
        heads: Medusa heads (any layout `read_heads` knows); a model with merged heads needs none.
        draft: the draft model (see `compiler.draft_model`).
        head: the EAGLE head, in any layout `compiler.eagle_head` knows.
        norms: what the head's config leaves open of its norms.
        lookahead: W, N and G of method lookahead.
        lookup: how method prompt-lookup looks up; with another method that drafts, its guesses join those.
        tree: draft tree; default: what comes with heads, draft model or head, else a small one that fits them.
        draft_precision: of the weights that draft, "int8" (default) or "fp32", in dialect gqa; what is emitted never
            depends on it. In dialect scatter they are as wide as what is computed.
        max_length: most tokens of prompt and answer; default: the model's own limit, at most 8192.
        report: called with what is being done.

    Raises:
        SpecCompileError: naming what is wrong; nothing is left behind.
    """
    if dialect == "scatter" and draft_precision is not None:
        raise SpecCompileError(
            "--draft-precision: goes with --dialect gqa; in scatter drafts are in fp16, bf16 or fp32."
        )
    draft_precision = draft_precision or "int8"
    _check_parts(method, heads, draft, head, norms, lookahead, lookup, tree, draft_precision)
    if dialect not in DIALECTS:
        raise SpecCompileError(f"--dialect: '{dialect}' is unknown; use one of {', '.join(DIALECTS)}.")
    if precision not in DIALECTS[dialect]:
        raise SpecCompileError(
            f"--precision: '{precision}' is unknown in dialect {dialect}; use one of {', '.join(DIALECTS[dialect])}."
        )
    with staged(out, force) as folder:
        report("reading the model")
        source = read_model(model)
        limit = _max_length(source, max_length)
        plan = Plan(folder, limit, dialect, precision, draft_precision, calibrate, report)
        plan.exact.mkdir()
        drafted = _read_heads(source, heads or model, report) if method == "medusa" else None
        small = _read_draft(source, draft, report) if draft is not None else None
        eagle = _read_eagle(source, head, norms or {}, report) if head is not None else None
        if method == "lookahead":
            lookahead = lookahead or LookaheadSettings()
        if method == "prompt-lookup":
            lookup = lookup or LookupSettings()
        chosen = tree or _default_tree(method, heads or draft or head, drafted, lookahead)
        if plan.rounds_activations and method == "lookahead":
            report(
                f"warning: --method lookahead: of its guesses one is verified a round, as the target is in {precision}."
            )
        if plan.rounds_activations and METHODS[method][1]:
            if tree is None:
                chosen = _one_path(chosen)
            elif chosen != _one_path(chosen):
                report(f"warning: --tree: only its likeliest path is run, as the target is in {precision}.")
        if drafted:
            _check_tree(drafted, chosen, source)
        with _refusing(source):
            found = survey(source.model, limit)
        graphs = {"target": write_target(source, found, _target_tail(drafted, eagle), plan)}
        draft_info = eagle_info = None
        if drafted:
            report("tracing the heads")
            graphs["medusa"] = write_heads_graph(source, drafted, chosen, plan)
        if small:
            with _refusing(small):
                graphs["draft"], draft_info = write_draft_graph(small, chosen, plan)
        if eagle:
            with _refusing(eagle):
                graphs["eagle"], eagle_info = write_eagle_graph(eagle, chosen, plan)
        report("writing the tokenizer")
        tokenizer = write_tokenizer(source, folder)
        manifest = Manifest(
            schema=SCHEMA,
            method=method,
            target=_target_info(source, found),
            graphs=graphs,
            files={f.name: file_info(f) for f in sorted(folder.iterdir()) if f.is_file()},
            tokenizer=tokenizer,
            eos_ids=list(source.eos_ids),
            tree=chosen.to_json(),
            heads=_heads_info(drafted, found, chosen) if drafted else None,
            draft=draft_info,
            eagle=eagle_info,
            lookahead=lookahead,
            lookup=lookup,
            versions={name: importlib.metadata.version(name) for name in VERSIONED},
        )
        write_manifest(manifest, folder)
        eager_heads = medusa_module(source, drafted, _top_k(chosen, drafted.draft_vocabulary)) if drafted else None
        try:
            proved = folder if plan.provable else _twin_bundle(manifest, plan)
            decoder = load(proved, check_hashes=False, capacity=PROOF_CAPACITY)
            proof = prove(decoder, source, eager_heads, small, eagle, report, plan.exact if plan.provable else None)
            if not plan.provable:
                proof["twin"] = {"precision": "fp32"}
        except ProofError as error:
            raise ProofError(f"{error} Nothing was published.") from error
        shutil.rmtree(plan.exact)
        manifest = replace(manifest, proof=proof)
        write_manifest(manifest, folder)
        report("publishing")
    return manifest


def verify(
    bundle: Path,
    against: Path | None,
    heads: Path | None = None,
    draft: Path | None = None,
    head: Path | None = None,
    norms: Mapping[str, bool] | None = None,
    threads: int | None = None,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Prove a published bundle again.

    Args:
        against, heads, draft, head: the model, Medusa heads, draft model and EAGLE head to compare with; without them
            the bundle is checked against itself.
        norms: as in `build`.

    Returns:
        figures as in the manifest.

    Raises:
        BundleError: when a file was altered, or the bundle was made from another model or other heads.
        ProofError: when a check fails.
    """
    report("checking hashes")
    decoder = load(bundle, threads)
    manifest = decoder.bundle.manifest
    if against is None:
        return prove(decoder, None, report=report)
    report("reading the model")
    source = read_model(against)
    if source.fingerprint != manifest.target.fingerprint:
        raise BundleError(
            f"{bundle}: made from a model with fingerprint {manifest.target.fingerprint[:12]}... but {against} has "
            f"{source.fingerprint[:12]}...; give the model it was built from."
        )
    drafted = _read_heads(source, heads, report) if heads else None
    small = _read_draft(source, draft, report) if draft else None
    eagle = _read_eagle(source, head, norms or {}, report) if head else None
    for what, path, ours, given in (
        ("heads", heads, manifest.heads, drafted),
        ("draft model", draft, manifest.draft, small),
        ("EAGLE head", head, manifest.eagle, eagle),
    ):
        if given and ours is None:
            raise BundleError(f"{bundle}: method {manifest.method} has no {what} to compare with {path}.")
        if given and ours and given.fingerprint != ours.fingerprint:
            raise BundleError(
                f"{bundle}: its {what} had fingerprint {ours.fingerprint[:12]}... but {path} has "
                f"{given.fingerprint[:12]}...; give the {what} it was built with."
            )
    eager = medusa_module(source, drafted, manifest.heads.top_k) if drafted and manifest.heads else None
    return prove(decoder, source, eager, small, eagle, report)


def write_target(source: Source, found: Survey, tail: TargetTail, plan: Plan) -> GraphInfo:
    """Trace, fuse and write target.onnx and its weights; weights fused on the way are made as they are written."""
    report, precision = plan.report, plan.precision
    report("tracing the target")
    with _refusing(source):
        graph, traced = _fused(source.model, found, tail, "target", plan)
    if plan.dialect == "scatter":
        if precision in WEIGHT_ONLY:
            report("writing the exact target")
            write_graph(graph, plan.exact, "target")
            # From here on its weights stay in that file, and the copy of the model that it was traced from may go.
            graph = ir.load(plan.exact / "target.onnx")
            texts = _calibration(source, found, plan) if precision == "int4" else []
            quantise_scatter(graph, precision, plan.exact / "target.onnx", texts, report)
    elif precision != "fp32":
        report("writing the exact target")
        write_graph(_folded(graph.clone()), plan.exact, "target")
        texts = _calibration(source, found, plan)
        quantise_target(graph, precision, plan.exact / "target.onnx", texts, report)
    else:
        _folded(graph)
    report("writing the target")
    write_graph(graph, plan.folder, "target")
    return _graph_info("target", graph, traced, precision, plan)


def _calibration(source: Source, found: Survey, plan: Plan) -> Any:
    """Texts that the exact target has written to round its weights by; none if that is not wanted."""
    if not plan.calibrate:
        return []
    plan.report("writing text to calibrate on")
    tokens = min(CALIBRATION_TOKENS, found.max_length)
    return speak(OrtTarget(plan.exact / "target.onnx"), prompts(source.tokenizer, tokens // 2), tokens)


def write_draft_graph(draft: DraftModel, tree: DraftTree, plan: Plan) -> tuple[GraphInfo, DraftInfo]:
    """Trace and write draft.onnx, on what it can of the target's weights, and the ids of its tokens."""
    plan.report("tracing the draft model")
    found = survey(draft.model, min(plan.max_length, draft.max_length or plan.max_length))
    tail = DraftTail(draft.token_ids, _top_k(tree, found.vocab_size))
    info = _write_model(draft.model, found, tail, "draft", plan)
    return info, DraftInfo(architecture=draft.architecture, **_drafting_facts(draft, found, tail, plan.folder))


def write_eagle_graph(head: EagleHead, tree: DraftTree, plan: Plan) -> tuple[GraphInfo, EagleInfo]:
    """Trace and write eagle.onnx and the ids of its tokens, as `write_draft_graph` does for a draft model.

    Its rope reaches as far as the target's positions, whatever its config says: heads are trained on short texts, and
    what they guess behind those may be worse, never wrong.
    """
    plan.report("tracing the EAGLE head")
    found = survey(head.model, plan.max_length)
    tail = DraftTail(head.token_ids, _top_k(tree, found.vocab_size), with_state=True)
    info = _write_model(head.model, found, tail, "eagle", plan, features=head.model.feature_width)
    facts = _drafting_facts(head, found, tail, plan.folder)
    return info, EagleInfo(architecture=head.layout, **facts, version=head.version, taps=list(head.form.taps))


def _drafting_facts(drafting: DraftModel | EagleHead, found: Survey, tail: DraftTail, folder: Path) -> dict[str, Any]:
    """What a manifest says of a draft model and of a head alike; the ids of their tokens are written to `folder`."""
    ids = drafting.token_ids
    if ids is not None:
        np.save(folder / TOKEN_MAP_FILE, ids.numpy())
    return {
        "fingerprint": drafting.fingerprint,
        "layers": drafting.layers,
        "draft_vocabulary": found.vocab_size,
        "token_map": None if ids is None else TOKEN_MAP_FILE,
        "top_k": tail.top_k,
        "max_length": found.max_length,
        "target_fingerprint": drafting.target_fingerprint,
    }


def _target_tail(drafted: MedusaHeads | None, eagle: EagleHead | None) -> TargetTail:
    """What the target has to give for the method."""
    if eagle is None:
        return TargetTail(drafted is not None)
    return TargetTail(True, eagle.model.fusion if eagle.form.taps else None, eagle.form.taps)


def _write_model(
    model: Any, found: Survey, tail: Tail, name: str, plan: Plan, features: int | None = None
) -> GraphInfo:
    """Trace and write what drafts, on what it can of the target's weights."""
    graph, traced = _fused(model, found, tail, name, plan, features)
    plan.report(f"writing the {name}")
    precision = plan.computes
    if plan.dialect == "gqa":
        precision = "int8" if plan.rounds_drafts else "fp32"
        if plan.rounds_drafts:
            write_graph(_folded(graph.clone()), plan.exact, name)
            if plan.rounds_activations:
                PackTables()(graph)  # as the target's embedding is stored, for one to do
        _folded(graph)
        if plan.rounds_drafts:
            quantise(graph)
    write_graph(graph, plan.folder, name, owner="target")
    return _graph_info(name, graph, traced, precision, plan)


def _graph_info(name: str, graph: ir.Model, traced: int, precision: str, plan: Plan) -> GraphInfo:
    opset = graph.opset_imports[""]
    return GraphInfo(f"{name}.onnx", plan.dialect, opset, precision, len(list(graph.graph)), traced)


def _folded(graph: ir.Model) -> ir.Model:
    """The graph, changed in place: its weights as their products read them, and nothing left that no node reads."""
    FoldWeights()(graph)
    clean(graph)
    return graph


def _fused(
    model: Any, found: Survey, tail: Tail, name: str, plan: Plan, features: int | None = None
) -> tuple[ir.Model, int]:
    """The traced graph, fused, its weights not folded yet; and its nodes before fusing."""
    if plan.dialect == "scatter":
        graph, traced = _scattered(model, found, tail, plan.dtype, features)
        if not plan.provable:
            plan.report(f"tracing the {name}'s twin in fp32")
            twin, _ = _scattered(model, found, tail, torch.float32, features)
            _require_twins(graph, twin, f"{type(model).__name__}: its graph in {plan.precision}")
            write_graph(twin, plan.exact, name, owner=None if name == "target" else "target")
        return graph, traced
    graph = gqa.trace_gqa(model, found, tail, features)
    clean(graph)
    traced = len(list(graph.graph))
    plan.report(f"fusing the {name}")
    finish_gqa_target(graph, one_as_two=isinstance(tail, TargetTail))
    return graph, traced


def _scattered(model: Any, found: Survey, tail: Tail, dtype: torch.dtype, features: int | None) -> tuple[ir.Model, int]:
    graph = scatter.trace_scatter(scatter.cast_model(model, dtype), found, scatter.cast_model(tail, dtype), features)
    clean(graph)
    traced = len(list(graph.graph))
    finish_scatter(graph)
    return graph, traced


def _require_twins(graph: ir.Model, twin: ir.Model, what: str) -> None:
    """Hold a graph against its twin in float32: the same nodes, and the same numbers but for what its dtype rounds.

    Raises:
        TraceError: where they differ.
    """

    def nodes(model: ir.Model) -> list[tuple[str, str]]:
        kept = (node for node in model.graph if node.op_type != "Cast")
        return [(node.op_type, str(sorted(map(str, node.attributes.values())))) for node in kept]

    if nodes(graph) != nodes(twin):
        raise TraceError(f"{what} has other nodes than in fp32; use fp16 or fp32.")
    whole = twin.graph.initializers
    for name, value in graph.graph.initializers.items():
        # A norm's scale stays in float32 where the rest does not, and then goes by another name.
        other = name if name in whole else name.replace(".traced_scale", ".weight")
        ours, theirs = value.const_value, whole[other].const_value if other in whole else None
        if ours is None or theirs is None:
            raise TraceError(f"{what} has weights '{name}', which it has not in fp32; use fp16 or fp32.")
        kept, exact = (tensor.numpy().astype(np.float64) for tensor in (ours, theirs))
        lowest = kept.size == 1 and kept.max() < -LARGEST_WEIGHT  # stands for "not seen"; each dtype has its own
        if not lowest and not np.allclose(kept, exact, rtol=2**-8, atol=0):  # bfloat16 rounds by half of that
            raise TraceError(f"{what} has other weights '{name}' than in fp32; use fp16 or fp32.")


def _twin_bundle(manifest: Manifest, plan: Plan) -> Path:
    """The bundle with twins of its graphs, for the proof."""
    for file in plan.folder.iterdir():
        if file.is_file() and not (plan.exact / file.name).exists():
            shutil.copy(file, plan.exact / file.name)
    graphs = {name: replace(info, precision="fp32") for name, info in manifest.graphs.items()}
    # Loaded at once and never again: nobody looks at hashes.
    files = {f.name: FileInfo("", f.stat().st_size) for f in plan.exact.iterdir() if f.name != MANIFEST_FILE}
    write_manifest(replace(manifest, graphs=graphs, files=files), plan.exact)
    return plan.exact


def medusa_module(source: Source, heads: MedusaHeads, top_k: int) -> MedusaModule:
    """The heads as the module that is traced, on this target's lm_head where they have none of their own."""
    head = source.lm_head
    return MedusaModule(
        heads.blocks,
        heads.lm_heads,
        top_k,
        token_map=heads.token_map,
        logit_scale=heads.logit_scale,
        target_lm_head=head.weight.detach(),  # type: ignore[union-attr,operator]
        target_lm_head_bias=head.bias.detach() if getattr(head, "bias", None) is not None else None,  # type: ignore[union-attr,operator]
    ).eval()


def write_heads_graph(source: Source, heads: MedusaHeads, tree: DraftTree, plan: Plan) -> GraphInfo:
    """Trace and write medusa.onnx, giving as many guesses per head as the tree has ranks (at least ten)."""
    module = medusa_module(source, heads, _top_k(tree, heads.draft_vocabulary))
    if not plan.provable:
        write_graph(export_medusa(module), plan.exact, "medusa")
    graph = export_medusa(module.to(plan.dtype))
    nodes, precision = len(list(graph.graph)), plan.computes
    if plan.rounds_drafts:
        write_graph(graph, plan.exact, "medusa")
        quantise(graph)
        precision = "int8"
    write_graph(graph, plan.folder, "medusa", owner="target")
    return replace(_graph_info("medusa", graph, nodes, precision, plan), dialect="plain")


def write_tokenizer(source: Source, folder: Path) -> TokenizerInfo:
    """tokenizer.json, chat_template.jinja and generation_config.json, as transformers writes them."""
    scratch = folder / "tokenizer"
    source.tokenizer.save_pretrained(scratch)
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (scratch / name).is_file():
            (scratch / name).rename(folder / name)
    shutil.rmtree(scratch)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{source.path}: its tokenizer cannot be written as tokenizer.json.")
    source.model.generation_config.save_pretrained(folder)
    special = {
        name: str(token) for name, token in source.tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    return TokenizerInfo(file_info(folder / "tokenizer.json").sha256, special)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.to_json(), indent=1) + "\n", "utf-8")


def _read_heads(source: Source, path: Path, report: Report) -> MedusaHeads:
    report("reading the heads")
    heads = read_heads(path)
    config = source.model.config.get_text_config()
    for warning in check_against(heads, config.hidden_size, config.vocab_size, source.fingerprint):
        report(f"warning: {warning}")
    return heads


def _check_parts(
    method: str,
    heads: Path | None,
    draft: Path | None,
    head: Path | None,
    norms: Mapping[str, bool] | None,
    lookahead: LookaheadSettings | None,
    lookup: LookupSettings | None,
    tree: DraftTree | None,
    draft_precision: str,
) -> None:
    """Refuse what the method has no use for, before anything is read."""
    if method not in METHODS:
        raise SpecCompileError(f"--method: '{method}' is unknown; use one of {', '.join(METHODS)}.")
    if draft_precision not in DRAFT_PRECISIONS:
        raise SpecCompileError(
            f"--draft-precision: '{draft_precision}' is unknown; use one of {', '.join(DRAFT_PRECISIONS)}."
        )
    for option, value, methods in (
        ("--heads", heads, ("medusa",)),
        ("--draft", draft, ("draft",)),
        ("--head", head, ("eagle",)),
        ("--norm", norms or None, ("eagle",)),
        ("lookahead's settings", lookahead, ("lookahead",)),
        ("prompt lookup's settings", lookup, ("prompt-lookup", "medusa", "draft", "eagle")),
        ("--tree", tree, ("medusa", "draft", "eagle", "prompt-lookup")),
    ):
        if value is not None and method not in methods:
            raise SpecCompileError(f"{option}: of no use to method {method}; it goes with {' or '.join(methods)}.")
    if method == "draft" and draft is None:
        raise SpecCompileError("--draft: method draft needs a draft model; give a folder or .gguf file.")
    if method == "eagle" and head is None:
        raise SpecCompileError("--head: method eagle needs a head; give its folder.")
    if method == "prompt-lookup" and tree is not None and not isinstance(tree, DynamicTree):
        raise SpecCompileError("--tree: prompt lookup grows its trees; give dynamic-N or dynamic-N-FLOOR.")
    if method == "prompt-lookup" and isinstance(tree, DynamicTree) and (tree.depth or tree.top_k):
        raise SpecCompileError("--tree: prompt lookup copies at any depth; give dynamic-N or dynamic-N-FLOOR alone.")
    if method == "medusa" and isinstance(tree, AdaptiveChain):
        raise SpecCompileError("--tree: heads draft a whole tree at once; adaptive-N is for draft models and EAGLE.")


def _read_draft(source: Source, path: Path, report: Report) -> DraftModel:
    """The draft model, its lm_head cut down to the tokens it may say."""
    report("reading the draft model")
    draft = read_draft(path, source)
    for warning in draft.warnings:
        report(f"warning: {warning}")
    if draft.token_ids is not None:
        cut_lm_head(draft.model, draft.token_ids)
    return draft


def _read_eagle(source: Source, path: Path, norms: Mapping[str, bool], report: Report) -> EagleHead:
    report("reading the EAGLE head")
    head = read_eagle(path, source, norms=norms)
    for warning in head.warnings:
        report(f"warning: {warning}")
    return head


def _default_tree(
    method: str, path: Path | None, heads: MedusaHeads | None, lookahead: LookaheadSettings | None
) -> DraftTree:
    """The tree that comes with heads, draft model or head (tree.json beside them), else one that suits the method."""
    if path is not None and (path / "tree.json").is_file():
        return load_tree(path / "tree.json")
    if heads is not None:  # a chain of all heads, with two siblings
        return TokenTree.from_paths([*([0] * depth for depth in range(1, heads.num_heads + 1)), [1], [2]])
    if lookahead is not None:
        return DynamicTree(lookahead.nodes, 0.0 if lookahead.window else LOOKUP_TREE.floor)
    if method == "draft":
        return DRAFT_TREE
    if method == "eagle":
        return EAGLE_TREE
    return LOOKUP_TREE if method == "prompt-lookup" else ROOT_ALONE


def _one_path(tree: DraftTree) -> DraftTree:
    """What is left of a tree for a rounded target, whose runtime verifies chains (see `runtime.decoder`)."""
    if isinstance(tree, DynamicTree):
        return replace(tree, top_k=1)
    if isinstance(tree, AdaptiveChain) or len(tree) == tree.max_depth + 1:
        return tree
    return TokenTree.chain(tree.max_depth)


def _top_k(tree: DraftTree, draft_vocabulary: int | None) -> int:
    """Best tokens that a drafting graph names: as many as a node of the tree can have children, at least ten, if there
    are so many."""
    children = max(tree.ranks) + 1 if isinstance(tree, TokenTree) else getattr(tree, "top_k", None)
    wanted = max(DEFAULT_TOP_K, children or 0)
    return min(wanted, draft_vocabulary) if draft_vocabulary else wanted


def _check_tree(heads: MedusaHeads, tree: DraftTree, source: Source) -> None:
    """Before minutes of tracing: whether the heads reach as deep and as wide as the tree."""
    if not isinstance(tree, TokenTree):
        return
    if tree.max_depth > heads.num_heads:
        raise BundleError(f"tree: depth {tree.max_depth} needs {tree.max_depth} heads; these are {heads.num_heads}.")
    tokens = heads.draft_vocabulary or source.model.config.get_text_config().vocab_size
    if max(tree.ranks) >= tokens:
        raise BundleError(f"tree: rank {max(tree.ranks)} needs more than the heads' {tokens} draft tokens.")


@contextmanager
def _refusing(source: Source | DraftModel | EagleHead) -> Iterator[None]:
    """Whatever an architecture nobody tried makes the tracer raise is a refusal by name."""
    try:
        yield
    except (SpecCompileError, OSError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        kind = source.layout if isinstance(source, EagleHead) else source.architecture
        raise TraceError(f"{source.path}: {kind} cannot be traced ({reason}).") from error


def _max_length(source: Source, wanted: int | None) -> int:
    config = source.model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or DEFAULT_MAX_LENGTH
    if wanted is not None and not 2 <= wanted <= own:
        raise SpecCompileError(f"--max-length: {wanted} is outside 2 .. {own}, what this model's positions allow.")
    return wanted or min(own, DEFAULT_MAX_LENGTH)


def _target_info(source: Source, found: Survey) -> TargetInfo:
    layer = found.layers[0]
    return TargetInfo(
        architecture=source.architecture,
        fingerprint=source.fingerprint,
        config_fingerprint=source.config_fingerprint,
        vocab_size=found.vocab_size,
        layers=len(found.layers),
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        width=found.width,
        max_length=found.max_length,
    )


def _heads_info(heads: MedusaHeads, found: Survey, tree: DraftTree) -> HeadsInfo:
    return HeadsInfo(
        fingerprint=heads.fingerprint,
        layout=heads.layout,
        count=heads.num_heads,
        blocks=heads.num_layers,
        draft_vocabulary=heads.draft_vocabulary or found.vocab_size,
        top_k=_top_k(tree, heads.draft_vocabulary),
        target_fingerprint=heads.target_fingerprint,
    )


__all__ = ["build", "medusa_module", "write_heads_graph", "write_target", "write_tokenizer"]
