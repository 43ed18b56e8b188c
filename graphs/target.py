"""The target model as a module on the graph contract, and its trace into an ONNX graph."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from speccompile.graphs import contract
from speccompile.graphs.attention import (
    AttentionLayer,
    PassThroughCache,
    Trace,
    foreign_attention,
    survey_attention,
)
from speccompile.graphs.errors import TraceError
from speccompile.graphs.single_ops import RotaryTables, emit_rms_norm, emit_rotary, half_table, record_rotary

# Rope types whose table changes with the length of the text, so that no graph can hold it.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Survey:
    """What one eager pass over a model tells about it.

    Args:
        layers: its attention layers, in the order in which they run.
        rotary: its rotary tables, for positions 0 .. max_length-1.
        max_length: positions the graph is made for.
        width: feature width F of the post-norm hidden state.
        vocab_size: rows of the lm_head.
    """

    layers: tuple[AttentionLayer, ...]
    rotary: RotaryTables
    max_length: int
    width: int
    vocab_size: int

    @property
    def windows(self) -> list[int | None]:
        """Distinct windows, full attention first."""
        windows = {layer.window for layer in self.layers}
        return sorted(windows, key=lambda window: -1 if window is None else window)


def survey(model: nn.Module, max_length: int) -> Survey:
    """Run `model` once, eagerly, on two tokens and write down what its attention layers need.

    Raises:
        TraceError: for a model that cannot be traced faithfully, naming the reason.
    """
    _refuse_by_config(model)
    trace, rotary = Trace(), RotaryTables()
    module = TargetModule(model, trace, None)
    with (
        torch.no_grad(),
        quiet_exporter(),
        foreign_attention(model, survey_attention(trace)),
        record_rotary(model, max_length + 1, rotary),  # a lone token's twin lies behind the last position
    ):
        logits, (hidden,) = module.run_model(torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None], None, None)
    name, expected = type(model).__name__, model.config.get_text_config().num_hidden_layers
    if len(trace.layers) != expected:
        raise TraceError(
            f"{name}: {len(trace.layers)} of {expected} layers use replaceable attention; state-space, hybrid and "
            "shared-cache architectures are not supported."
        )
    if len({(layer.kv_heads, layer.head_dim) for layer in trace.layers}) != 1:
        raise TraceError(f"{name}: layers differ in key/value heads or head size; one cache shape is needed for all.")
    return Survey(tuple(trace.layers), rotary, max_length, hidden.shape[-1], logits.shape[-1])


def _refuse_by_config(model: nn.Module) -> None:
    config, name = model.config.get_text_config(), type(model).__name__
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope if all(isinstance(value, dict) for value in rope.values()) else {"": rope}
    for parameters in nested.values():
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            raise TraceError(
                f"{name}: rope type '{parameters['rope_type']}' changes with the length of the text and cannot be "
                f"held in one graph; supported are default, linear, llama3, yarn and other fixed types."
            )
    if getattr(config, "attention_chunk_size", None):
        raise TraceError(
            f"{name}: chunked attention (attention_chunk_size {config.attention_chunk_size}) is not supported."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise TraceError(f"{name}: encoder-decoder models are not supported; give a causal language model.")


class Tail(nn.Module):
    """Makes a graph's outputs of logits and streams.

    Args:
        outputs: names of what `forward` gives.
        taps: the layers whose incoming residual stream it wants; the number of layers stands for what leaves the
            last. Without any it gets one stream: the post-norm hidden state, or the state that an EAGLE head passes on.
    """

    def __init__(self, outputs: Sequence[str], taps: Sequence[int] = ()) -> None:
        super().__init__()
        self.outputs, self.taps = list(outputs), tuple(taps)

    def forward(self, logits: Tensor, streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """logits [B,R,V] and streams [B,T,F], float32 -> the tensors named by `outputs`."""
        raise NotImplementedError


class TargetTail(Tail):
    """What a target graph gives: logits and their argmax, and hidden states where the method needs them.

    Args:
        fusion: makes hidden states of the streams of `taps`.
    """

    def __init__(self, with_hidden: bool, fusion: nn.Module | None = None, taps: Sequence[int] = ()) -> None:
        super().__init__([contract.NEXT_IDS, contract.LOGITS] + [contract.HIDDEN] * with_hidden, taps)
        self.fusion = fusion

    def forward(self, logits: Tensor, streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
        hidden = streams[0]
        if self.fusion is not None:
            dtype = next(self.fusion.parameters()).dtype
            hidden = self.fusion([stream.to(dtype) for stream in streams]).float()
        return (logits.argmax(-1), logits, hidden)[: len(self.outputs)]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers that a model's residual stream runs through.

    Raises:
        TraceError: when there is no one list of as many modules as the config has layers.
    """
    config: Any = model.config
    count = config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise TraceError(f"{type(model).__name__}: its {count} layers cannot be told apart; no features can be tapped.")
    return lists[0]


@contextmanager
def tapping(model: nn.Module, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While `model` runs, the residual streams [B,T,F] of `taps` (see `Tail`), by tap.

    Raises:
        TraceError: for a tap that the model has not.
    """
    streams: dict[int, Tensor] = {}
    layers = decoder_layers(model) if taps else nn.ModuleList()
    if taps and not 0 <= min(taps) <= max(taps) <= len(layers):
        raise TraceError(f"{type(model).__name__}: features of layers {list(taps)} asked for; it has {len(layers)}.")

    def entering(tap: int) -> Callable[..., None]:
        def keep(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            streams[tap] = args[0] if args else options["hidden_states"]

        return keep

    def leaving(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        streams[len(layers)] = out[0] if isinstance(out, tuple) else out

    with ExitStack() as stack:
        for tap in taps:
            hook = (
                layers[tap].register_forward_pre_hook(entering(tap), with_kwargs=True)
                if tap < len(layers)
                else layers[-1].register_forward_hook(leaving)
            )
            stack.callback(hook.remove)
        yield streams


class TargetModule(nn.Module):
    """`model` on the graph contract, but for what a dialect makes of it: see `graphs.gqa` and `graphs.scatter`.

    Args:
        tail: makes the graph's outputs of logits and streams.
    """

    def __init__(self, model: nn.Module, trace: Trace, survey: Survey | None, tail: Tail | None = None) -> None:
        super().__init__()
        self.model, self.trace, self.survey, self.tail = model, trace, survey, tail
        parameters = inspect.signature(model.forward).parameters
        if model.get_output_embeddings() is None:
            raise TraceError(
                f"{type(model).__name__}: no output embedding (lm_head) found; give a causal language model."
            )
        if "position_ids" not in parameters:
            raise TraceError(
                f"{type(model).__name__}: forward() takes no position_ids; tree positions cannot be given to it."
            )
        self.dtype = next(model.parameters()).dtype
        for index, (cos, sin) in enumerate(survey.rotary.tables if survey else ()):
            self.register_buffer(f"cos_{index}", half_table(cos).to(self.dtype), persistent=False)
            self.register_buffer(f"sin_{index}", half_table(sin).to(self.dtype), persistent=False)

    def rotary(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Table `index` and this trace's positions, for `emit_rotary`."""
        assert self.trace.position_ids is not None
        return getattr(self, f"cos_{index}"), getattr(self, f"sin_{index}"), self.trace.position_ids

    def run_model(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        rows: Tensor | None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The whole model (soft-caps and logit scaling live outside the inner one).

        Args:
            features: [B,T,F], what an EAGLE head reads beside its tokens.

        Returns:
            logits [B,R,V] of the wanted rows, and for every row the tail's streams [B,T,F]; without taps what the
            lm_head reads, or a head's state.
        """
        seen: list[Tensor] = []
        taps = self.tail.taps if self.tail is not None else ()
        beside = {} if features is None else {contract.FEATURES: features}

        def keep_wanted(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            seen.append(args[0])
            return args if rows is None else (args[0].index_select(1, rows), *args[1:])

        hook = self.model.get_output_embeddings().register_forward_pre_hook(keep_wanted)
        try:
            with tapping(self.model, taps) as streams:
                out = self.model(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    attention_mask=mask,
                    past_key_values=PassThroughCache(),
                    use_cache=True,
                    **beside,
                )
        finally:
            hook.remove()
        if taps:
            return out.logits, [streams[tap] for tap in taps]
        return out.logits, [seen[0] if features is None else out.hidden_states[-1]]

    def answer(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        logit_rows: Tensor,
        past: Sequence[Tensor],
        features: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """The tail's outputs, and the present of every layer.

        Args:
            mask: what the model is given as its attention mask, lest it makes one; nothing else reads it.
        """
        assert self.tail is not None
        trace = self.trace
        trace.past = list(zip(past[0::2], past[1::2], strict=True))
        trace.position_ids, trace.layers, trace.present = position_ids, [], []
        if features is not None:
            features = features.to(self.dtype)
        logits, streams = self.run_model(input_ids, position_ids, mask, logit_rows, features)
        return (*self.tail(logits.float(), [stream.float() for stream in streams]), *trace.present)


@dataclass(frozen=True)
class Argument:
    """An argument of a traced `forward`: the names of the graph's inputs that it becomes, an example, and which sizes
    are dynamic, nested like the example."""

    names: Sequence[str]
    example: Any
    dynamic: Any


EXAMPLE_BATCH, EXAMPLE_TOKENS = 2, 5  # torch.export takes sizes 0 and 1 for constants
ANY_BATCH, ANY_TOKENS = Dim("B", min=1, max=4096), Dim("T", min=1, max=65536)
ANY_ROWS, ANY_CAPACITY = Dim("R", min=1, max=65536), Dim("C", min=1, max=1 << 20)


def shared_arguments(module: TargetModule, features: int | None) -> tuple[Argument, Argument, Argument, list[Argument]]:
    """What both dialects' `forward` take: ids, positions, wanted rows, and as the last ones the cache and features.

    Args:
        features: width of the features that an EAGLE head reads beside its tokens; None for everything else.
    """
    assert module.survey is not None
    batch, tokens, layers = EXAMPLE_BATCH, EXAMPLE_TOKENS, module.survey.layers
    per_token, parts = {0: ANY_BATCH, 1: ANY_TOKENS}, 2 * len(layers)
    shape = (batch, layers[0].kv_heads, 64, layers[0].head_dim)
    past = Argument(
        contract.past_names(len(layers)),
        [torch.zeros(shape, dtype=module.dtype) for _ in range(parts)],
        [{0: ANY_BATCH, 2: ANY_CAPACITY} for _ in range(parts)],
    )
    read = [] if features is None else [Argument([contract.FEATURES], torch.zeros(batch, tokens, features), per_token)]
    return (
        Argument([contract.INPUT_IDS], torch.zeros(batch, tokens, dtype=torch.long), per_token),
        Argument([contract.POSITION_IDS], torch.arange(tokens).repeat(batch, 1), per_token),
        Argument([contract.LOGIT_ROWS], torch.arange(3), {0: ANY_ROWS}),
        [past, *read],
    )


def trace_module(
    module: TargetModule, attend: Callable[..., tuple[Tensor, None]], arguments: Sequence[Argument], opset: int
) -> ir.Model:
    """Trace a model on the contract, its attention replaced by a dialect's."""
    model, survey, tail = module.model, module.survey, module.tail
    assert survey is not None and tail is not None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(quiet_exporter())
        stack.enter_context(foreign_attention(model, attend))
        stack.enter_context(emit_rotary(model, survey.rotary, module.rotary))
        stack.enter_context(emit_rms_norm(model))
        stack.enter_context(emit_rms_norm(tail))
        stack.enter_context(_dense_experts(model))
        program = torch.onnx.export(
            module.eval(),
            tuple(argument.example for argument in arguments),
            dynamo=True,
            opset_version=opset,
            input_names=[name for argument in arguments for name in argument.names],
            output_names=[*tail.outputs, *contract.present_names(len(survey.layers))],
            dynamic_shapes=tuple(argument.dynamic for argument in arguments),
            verbose=False,
            optimize=False,
        )
    assert program is not None, "torch.onnx.export returns a program when dynamo=True"
    return program.model


@contextmanager
def _dense_experts(model: Any) -> Iterator[None]:
    """Let a mixture of experts run as batched matmuls: its other forms depend on data or do not export."""
    text = model.config.get_text_config()
    if not any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        yield
        return
    before = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Keep notes on axis names, missing torchvision and coming renames away from the user."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
