"""Weights in fewer bits for TensorRT: what is stored, how far it is off, what products give, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

from speccompile.compiler.write_graph import write_graph
from speccompile.graphs.errors import TraceError
from speccompile.graphs.passes import WeightOnly, clean
from speccompile.graphs.passes.weight_only import FP8_LARGEST, int4_block, nearest
from speccompile.graphs.rounding import Rounded
from tests.tiny.passes import Array, graph, kinds, normal, only, run

INNER, OUTER = 192, 96  # three blocks of 64
BODIES = {
    "as it is read": ("y = MatMul(x, W)", ""),
    "transposed": ("t = Transpose<perm = [1, 0]>(W)\n y = MatMul(x, t)", "<{kind}[{inner},{outer}] t>"),
}
KINDS = ("int8", "int4", "fp8")
TYPES = {"fp32": ("float", np.float32), "fp16": ("float16", np.float16)}


def model_with(
    weights: Array, form: str = "as it is read", dtype: str = "fp32", body: str | None = None, **more: Array
) -> ir.Model:
    """The product of x and these weights [K,N]."""
    (inner, outer), (kind, numpy) = weights.shape, TYPES[dtype]
    text, values = BODIES[form]
    return graph(
        f"agraph ({kind}[B,T,{inner}] x) => ({kind}[B,T,{outer}] y) "
        f"{values.format(kind=kind, inner=inner, outer=outer)} {{ {body or text} }}",
        W=np.ascontiguousarray(weights.T if form == "transposed" else weights).astype(numpy),
        **{name: array.astype(numpy) for name, array in more.items()},
    )


def rounded(model: ir.Model, kind: str, **options: Any) -> ir.Node:
    """Apply the pass; the node that makes the table whole."""
    assert WeightOnly(kind, **options)(model).modified
    clean(model)
    node = only(model, "DequantizeLinear")
    assert only(model, "MatMul").inputs[1] is node.outputs[0]
    assert len(node.inputs) == 2  # no zeros
    return node


def parts(node: ir.Node) -> tuple[Array, Array]:
    """Levels [K,N] and the scale of each weight [K,N], both float64."""
    levels, scales = (value.const_value.numpy().astype(np.float64) for value in node.inputs)  # type: ignore[union-attr]
    inner, outer = levels.shape
    if "block_size" not in node.attributes:
        assert scales.shape == (outer,) and node.attributes["axis"].as_int() == 1
        return levels, np.broadcast_to(scales, levels.shape)
    block = node.attributes["block_size"].as_int()
    assert scales.shape == (inner // block, outer) and node.attributes["axis"].as_int() == 0
    return levels, np.repeat(scales, block, 0)


def half_steps(levels: Array, kind: str) -> Array:
    """Half the distance to the next level, in scales. E4M3 has 3 bits behind the point, and none below 2 ** -9."""
    if kind != "fp8":
        return np.full(levels.shape, 0.5)
    powers: Array = np.exp2(np.floor(np.log2(np.maximum(np.abs(levels), 2.0**-6))) - 4)
    return powers


# ---- what is stored ----


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_the_nearest_level(kind: str, dtype: str, form: str) -> None:
    weights = (normal(INNER, OUTER) * np.float32(0.02)).astype(TYPES[dtype][1])
    node = rounded(model_with(weights, form, dtype), kind)
    levels, scales = parts(node)
    stored, scale = node.inputs
    assert stored is not None and scale is not None and stored.const_value is not None
    assert stored.dtype == {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "fp8": ir.DataType.FLOAT8E4M3FN}[kind]
    assert scale.dtype == {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}[dtype]
    assert stored.const_value.nbytes == INNER * OUTER // (2 if kind == "int4" else 1)
    exact = weights.astype(np.float64)
    off, largest = np.abs(levels * scales - exact), np.abs(levels).max(0)
    allowed = half_steps(levels, kind) * scales
    if kind == "int4":  # what is cut off of a range lies beyond the last level
        cut = (exact > 7.5 * scales) | (exact < -8.5 * scales)
        assert (levels[cut] == np.where(exact[cut] > 0, 7, -8)).all()
        assert 0 < cut.sum() < 0.02 * exact.size
        assert (off[~cut] <= allowed[~cut] * 1.0001).all()
        assert (off[cut] <= 3 * scales[cut]).all()
    else:
        assert (off <= allowed * 1.0001).all()
        assert (largest == (127 if kind == "int8" else FP8_LARGEST)).all()
    assert off.max() > 0.9 * allowed.max()  # it did round


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_weights_that_lie_on_levels_are_kept_exactly(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for kind, low, high in (("int8", -127, 127), ("int4", -8, 7)):
        levels = rng.integers(low, high + 1, (INNER, OUTER))
        levels[::64] = low if kind == "int4" else high  # each block reaches the end of its range
        scales = rng.integers(1, 1024, OUTER) / 2.0**16  # ten bits
        weights = (levels * scales).astype(np.float32)
        found, found_scales = parts(rounded(model_with(weights, dtype="fp32"), kind))
        np.testing.assert_array_equal(found * found_scales, weights, err_msg=f"{kind} {dtype}")


def test_scales_of_tiny_weights_are_what_float16_keeps() -> None:
    """Scales of 1e-7 are subnormal there, one or two steps above zero: levels must be chosen for those."""
    weights = normal(INNER, OUTER) * np.float32(1e-5)
    node = rounded(model_with(weights, dtype="fp16"), "int8")
    levels, scales = parts(node)
    assert (scales > 0).all() and scales.max() < 1e-6
    exact = weights.astype(np.float16).astype(np.float64)
    off = np.abs(levels * scales - exact)
    inside = np.abs(exact) <= 127 * scales
    assert (off[inside] <= scales[inside] * 0.5001).all() and inside.mean() > 0.99


def test_a_channel_of_zeros() -> None:
    weights = normal(INNER, OUTER)
    weights[:, 5] = 0
    for kind in KINDS:
        model = model_with(weights)
        levels, scales = parts(rounded(model, kind))
        assert not levels[:, 5].any() and np.isfinite(scales).all()


def test_bfloat16() -> None:
    weights = normal(INNER, OUTER)
    model = model_with(weights)
    table = model.graph.initializers["W"]
    table.const_value = ir.tensor(weights.astype(ir.DataType.BFLOAT16.numpy()), name="W")
    table.dtype = ir.DataType.BFLOAT16
    node = rounded(model, "int4")
    assert node.outputs[0].dtype == ir.DataType.BFLOAT16 == node.inputs[1].dtype  # type: ignore[union-attr]
    levels, scales = parts(node)
    assert np.linalg.norm(levels * scales - weights) < 0.12 * np.linalg.norm(weights)


# ---- how good four bits are ----


@pytest.mark.parametrize("block", [128, 64, 32])
def test_int4_is_near_the_least_error_there_is(block: int) -> None:
    """Against four hundred scales tried for each block, and against the scales that come to mind first."""
    rows = normal(256, block * 4)
    blocks = rows.reshape(256, -1, block).astype(np.float64)

    def error(scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
        levels = np.rint(blocks / scales[..., None]).clip(-8, 7)
        return np.square(levels * scales[..., None] - blocks).sum(-1)

    found = nearest(rows, 4, block)
    ours = np.square(found.weights(rows.shape[1]).reshape(blocks.shape) - blocks).sum(-1)
    largest = np.abs(blocks).max(-1)
    least = np.min([error(largest * share / 7) for share in np.linspace(0.3, 1.1, 400)], 0)
    assert ours.sum() < 1.02 * least.sum()
    assert ours.sum() < 0.93 * error(largest / 7).sum()
    assert ours.sum() < 0.93 * error(largest / 8).sum()


def test_blocks_fit_the_width() -> None:
    assert [int4_block(inner) for inner in (1536, 576, 96, 4096)] == [128, 64, 32, 128]
    weights = normal(200, OUTER)  # no multiple of any
    node = rounded(model_with(weights), "int4")
    assert node.inputs[0].dtype == ir.DataType.INT8  # type: ignore[union-attr]


# ---- what products give ----


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_rounded_weights(kind: str, dtype: str, form: str, tmp_path: Path) -> None:
    model = model_with(normal(INNER, OUTER) * np.float32(0.05), form, dtype)
    levels, scales = parts(rounded(model, kind))
    x = normal(1, 5, INNER).astype(TYPES[dtype][1])
    wanted = x[0].astype(np.float64) @ (levels * scales)
    sizes = np.abs(x[0].astype(np.float64)) @ np.abs(levels * scales)
    (plain,) = run(model, {"x": x})
    write_graph(model, tmp_path, "graph")
    size = (tmp_path / "graph.onnx.data").stat().st_size
    scale_bytes = (3 if kind == "int4" else 1) * OUTER * TYPES[dtype][1]().nbytes
    assert size == levels.size // (2 if kind == "int4" else 1) + (scale_bytes if scale_bytes > 256 else 0)
    options = onnxruntime.SessionOptions()
    # Else it would fuse int8 and int4 with their products to MatMulNBits, and round activations to int8 as well.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(tmp_path / "graph.onnx", options, providers=["CPUExecutionProvider"])
    (loaded,) = session.run(None, {"x": x})
    digits = {"fp32": 2.0**-20, "fp16": 2.0**-10}[dtype]
    for found in (plain, loaded):
        off = np.abs(found[0] - wanted)
        assert (off <= digits * sizes).all(), (off / sizes).max()


def test_a_rounding_of_ones_own() -> None:
    """What GPTQ found, say. Nothing is rounded before the graph is written."""
    rng = np.random.default_rng(0)
    table = Rounded(
        4,
        rng.integers(0, 16, (OUTER, 3, 64)).astype(np.uint8),
        (rng.integers(1, 9, (OUTER, 3)) / 64).astype(np.float32),
    )
    asked: list[tuple[str, tuple[int, ...]]] = []
    weights = normal(INNER, OUTER)

    def rounding(name: str, rows: Array) -> Rounded:
        asked.append((name, rows.shape))
        np.testing.assert_array_equal(rows, weights.T)
        return table

    model = model_with(weights)
    node = rounded(model, "int4", rounding=rounding)
    assert asked == []
    levels, scales = parts(node)
    np.testing.assert_array_equal((levels * scales).T, table.weights(INNER))
    run(model, {"x": normal(1, 1, INNER)})
    assert set(asked) == {("W", (OUTER, INNER))}


# ---- which products ----

MODEL = f"""agraph (int64[B,T] ids, float16[B,R,{INNER}] x) => (float16[B,R,250] logits, float16[B,T,{INNER}] e)
    <float16[{INNER},250] t, float16[B,R,{INNER}] a, float16[B,R,250] b> {{
    e = Gather(E, ids)
    a = MatMul(x, W)
    t = Transpose<perm = [1, 0]>(E)
    b = MatMul(a, t)
    logits = Mul(b, half)
}}"""


@pytest.mark.parametrize(("kind", "head"), [("int8", "INT8"), ("int4", "INT8"), ("fp8", "FLOAT8E4M3FN")])
def test_a_tied_lm_head_takes_eight_bits_and_the_embedding_stays(kind: str, head: str) -> None:
    table = normal(250, INNER).astype(np.float16)
    model = graph(MODEL, E=table, W=normal(INNER, INNER).astype(np.float16), half=np.array(0.5, np.float16))
    assert WeightOnly(kind)(model).modified
    clean(model)
    assert kinds(model) == {"Gather": 1, "MatMul": 2, "DequantizeLinear": 2, "Mul": 1}
    stored = {str(value.name): str(value.dtype) for value in model.graph.initializers.values()}
    assert stored["E"] == "FLOAT16"
    assert [dtype for name, dtype in stored.items() if name.startswith("E.") and "scale" not in name] == [head]
    other = {"int8": "INT8", "int4": "INT4", "fp8": "FLOAT8E4M3FN"}[kind]
    assert [dtype for name, dtype in stored.items() if name.startswith("W.") and "scale" not in name] == [other]
    logits, embedded = run(model, {"ids": np.array([[3, 249]]), "x": normal(1, 2, INNER).astype(np.float16)})
    np.testing.assert_array_equal(embedded[0], table[[3, 249]])
    assert np.isfinite(logits).all()


def test_log_probabilities_come_from_an_lm_head_too() -> None:
    """Of what drafts, there may be no logits among the outputs."""
    model = graph(
        f"""agraph (float[B,{INNER}] x) => (float[B,300] topk_logprobs) <float[B,{INNER}] a, float[B,300] b> {{
            a = MatMul(x, W)
            b = MatMul(a, U)
            topk_logprobs = LogSoftmax(b)
        }}""",
        W=normal(INNER, INNER),
        U=normal(INNER, 300),
    )
    WeightOnly("int4")(model)
    found = [node.inputs[0].dtype for node in model.graph if node.op_type == "DequantizeLinear"]  # type: ignore[union-attr]
    assert found == [ir.DataType.INT4, ir.DataType.INT8]


def test_a_table_that_is_read_twice_is_stored_once() -> None:
    model = model_with(normal(INNER, INNER), body="a = MatMul(x, W)\n y = MatMul(a, W)")
    WeightOnly("int8")(model)
    assert kinds(model) == {"MatMul": 2, "DequantizeLinear": 1}
    names = [str(value.name) for value in model.graph.initializers.values()]
    assert len(names) == 3 and len({name.partition(".")[0] for name in names}) == 1  # W itself, levels and scales


def test_products_that_are_not_accepted_stay() -> None:
    body = "t = Transpose<perm = [1, 0]>(W)\n a = MatMul(x, t)\n y = MatMul(a, U)"
    model = model_with(normal(INNER, INNER), body=body, U=normal(INNER, INNER))
    first = next(node for node in model.graph if node.op_type == "MatMul")
    assert WeightOnly("int8", accepts=lambda node: node is first)(model).modified
    assert WeightOnly("int4")(model).modified  # the rest
    found = [node.inputs[0].dtype for node in model.graph if node.op_type == "DequantizeLinear"]  # type: ignore[union-attr]
    assert found == [ir.DataType.INT8, ir.DataType.INT4]
    assert not WeightOnly("int4")(model).modified


@pytest.mark.parametrize(("body", "shape"), [("y = MatMul(x, W)", (INNER, 8)), ("y = Add(x, W)", (INNER, INNER))])
def test_everything_else_stays(body: str, shape: tuple[int, ...]) -> None:
    model = graph(f"agraph (float[B,T,{INNER}] x) => (float[U,V,W] y) {{ {body} }}", W=normal(*shape))
    before = kinds(model)
    assert not WeightOnly("int8")(model).modified
    assert kinds(model) == before


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("y = MatMul(x, U)", (4, INNER, INNER)),  # a stack of experts
        ("e = Gather(U, x)\n y = Cast<to = 1>(e)", (4, INNER, INNER)),
        ("y = Gemm(x, U)", (INNER, INNER)),
        ("y = MatMul(U, x)", (INNER, INNER)),
    ],
)
def test_a_model_that_is_mostly_out_of_reach_is_refused(body: str, shape: tuple[int, ...]) -> None:
    def with_rest(count: int) -> ir.Model:
        rest = "\n".join(f"z{place} = MatMul(v, W{place})" for place in range(count))
        names = "".join(f", float[B,{INNER}] z{place}" for place in range(count))
        return graph(
            f"agraph (float[U,V,{INNER}] x, float[B,{INNER}] v) => (float[P,Q,S] y{names}) {{ {body} {rest} }}",
            U=normal(*shape),
            **{f"W{place}": normal(INNER, INNER, seed=place) for place in range(count)},
        )

    stack = int(np.prod(shape)) // INNER**2
    enough = 9 * stack  # of the weights a tenth is left
    model = with_rest(enough)
    assert WeightOnly("int8")(model).modified
    refused = with_rest(enough - 1)
    before = kinds(refused)
    with pytest.raises(TraceError) as raised:
        WeightOnly("int8")(refused)
    assert kinds(refused) == before
    share = f"{stack / (stack + enough - 1):.0%}"
    assert str(raised.value) == (
        f"--precision: {share} of the model's weights are in operators that fewer bits do not reach (such as stacks of "
        "experts); use --precision fp16."
    )


# ---- TensorRT reads it ----


@pytest.mark.parametrize("kind", KINDS)
def test_tensorrt_builds_an_engine(kind: str, tmp_path: Path) -> None:
    """With the real builder. The engine holds the weights as they are stored, not as float16."""
    trt = pytest.importorskip("tensorrt_rtx")
    inner, outer = 1024, 2048

    def engine(rewrite: bool) -> int:
        half = {
            name: normal(*shape).astype(np.float16)
            for name, shape in {"W": (inner, outer), "U": (outer, inner)}.items()
        }
        model = graph(
            f"""agraph (float16[T,{inner}] x) => (float16[T,{inner}] y)
                <float16[T,{outer}] a, float16[T,{outer}] b, float16[{outer},{inner}] t> {{
                a = MatMul(x, W)
                b = Relu(a)
                t = Transpose<perm = [1, 0]>(V)
                y = MatMul(b, t)
            }}""",
            W=half["W"],
            V=np.ascontiguousarray(half["U"].T),
        )
        if rewrite:
            WeightOnly(kind)(model)
            clean(model)
        write_graph(model, tmp_path, "graph")
        return built(trt, tmp_path / "graph.onnx", {"x": ((1, inner), (8, inner), (64, inner))})

    weights = 2 * inner * outer
    exact, found = engine(False), engine(True)
    assert exact > 2 * weights
    assert found < {"int8": 1.2, "fp8": 1.2, "int4": 0.7}[kind] * weights


def built(trt: Any, path: Path, profile: dict[str, tuple[tuple[int, ...], ...]]) -> int:
    """Bytes of the engine for sm89."""
    said: list[str] = []

    class Log(trt.ILogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                said.append(message)

    log = Log()
    builder = trt.Builder(log)
    network, config = builder.create_network(0), builder.create_builder_config()
    parser = trt.OnnxParser(network, log)
    assert parser.parse_from_file(str(path)), said
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    shapes = builder.create_optimization_profile()
    for name, (least, usual, most) in profile.items():
        shapes.set_shape(name, least, usual, most)
    config.add_optimization_profile(shapes)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None and not said, said
    return int(engine.nbytes)
