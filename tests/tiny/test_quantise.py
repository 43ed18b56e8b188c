"""How weights are rounded: GPTQ against its paper's formulas in float64, ranges, smoothing, and what it is all for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from scipy.special import log_softmax

from speccompile.compiler.calibrate import Activations, speak
from speccompile.compiler.quantise import (
    DAMPING,
    INT4_BLOCK,
    best_factor,
    block_range,
    folded_tables,
    gptq,
    nearest_int4,
    quantise_target,
    round_with_hessian,
    smoothing_factors,
)
from speccompile.compiler.write_graph import write_graph
from speccompile.graphs.errors import TraceError
from speccompile.graphs.gqa import trace_gqa
from speccompile.graphs.passes import FoldWeights, PackTables, clean, finish_gqa_target, smoothable
from speccompile.graphs.rounding import Rounded, in_blocks
from speccompile.graphs.target import TargetTail, survey
from speccompile.runtime.backends.ort import OrtTarget
from tests.tiny.models import tiny_model
from tests.tiny.passes import Array, graph, kinds, normal

LOUD = (5, 40, 77)  # channels that the norms of the traced model make large


# ---- GPTQ ----


def correlated(inner: int, rows: int = 400, seed: int = 0) -> Array:
    """Activations float32 [rows,K] whose channels differ in size and go together, as those of a model do."""
    rng = np.random.default_rng([seed, inner])
    mixed = rng.standard_normal((rows, inner)) @ rng.standard_normal((inner, inner)) / np.sqrt(inner)
    common = rng.standard_normal((rows, 4)) @ rng.standard_normal((4, inner))
    return ((mixed + common) * np.exp(rng.normal(0, 0.7, inner))).astype(np.float32)


def second_moments(x: Array) -> torch.Tensor:
    return torch.from_numpy(x.T @ x)


def nearest(weights: Array, rounded: Rounded) -> Array:
    """Levels float64 [N,K], in the ranges of `rounded`."""
    assert rounded.zeros is not None
    scales, zeros = (
        np.repeat(part.astype(np.float64), INT4_BLOCK, 1)[:, : weights.shape[1]]
        for part in (rounded.scales, rounded.zeros)
    )
    return np.clip(np.rint(weights / scales) + zeros, 0, 15)


def stands_for(levels: Array, rounded: Rounded) -> Array:
    assert rounded.zeros is not None
    scales, zeros = (
        np.repeat(part.astype(np.float64), INT4_BLOCK, 1)[:, : levels.shape[1]]
        for part in (rounded.scales, rounded.zeros)
    )
    return (levels - zeros) * scales


def error(weights: Array, levels: Array, rounded: Rounded, hessian: torch.Tensor) -> float:
    """tr(E H Et): the squared error of the products, summed over the activations."""
    wrong = weights - stands_for(levels, rounded)
    return float(np.einsum("nk,kl,nl->", wrong, hessian.double().numpy(), wrong))


def levels_of(rounded: Rounded, inner: int) -> Array:
    return rounded.integers.reshape(len(rounded.integers), -1)[:, :inner].astype(np.float64)


def paper(weights: Array, hessian: torch.Tensor, rounded: Rounded) -> Array:
    """Levels [N,K] as arXiv 2210.17323 defines them: the update of eq. 2, and what is left of the inverse from eq. 3.

    The one that matters most, by H's diagonal, comes first; 1 % of the diagonal's mean is added to it.
    """
    assert rounded.zeros is not None
    left, wide = weights.astype(np.float64), hessian.double().numpy().copy()
    silent = np.diag(wide) == 0
    wide[silent, silent] = 1
    order = np.argsort(-np.diag(wide), kind="stable")
    wide += np.eye(len(wide)) * DAMPING * np.diag(wide).mean()
    levels = np.zeros_like(left)
    inverse = np.linalg.inv(wide)
    for q in order:
        scale = rounded.scales[:, q // INT4_BLOCK].astype(np.float64)
        zero = rounded.zeros[:, q // INT4_BLOCK].astype(np.float64)
        levels[:, q] = np.clip(np.rint(left[:, q] / scale) + zero, 0, 15)
        off = left[:, q] - (levels[:, q] - zero) * scale
        left -= np.outer(off / inverse[q, q], inverse[q])
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return levels


@pytest.mark.parametrize("inner", [64, 200, 288])  # within one batch of columns, and not; blocks cut short
def test_gptq_is_what_its_paper_says(inner: int) -> None:
    weights, hessian = normal(12, inner), second_moments(correlated(inner, 2 * inner))
    rounded = round_with_hessian(torch.from_numpy(weights), hessian)
    found, wanted = levels_of(rounded, inner), paper(weights, hessian, rounded)
    # One weight on the edge between two levels may fall the other way in float32, and takes the rest of its row along.
    assert (found == wanted).mean() > 0.98
    assert (nearest(weights, rounded) == wanted).mean() < 0.9  # it is not just rounding
    errors = [error(weights, levels, rounded, hessian) for levels in (found, wanted)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_gptq_is_never_worse_than_the_nearest_levels(seed: int) -> None:
    inner = (96, 128, 160, 213, 288)[seed]
    weights, x = normal(16, inner, seed=seed), correlated(inner, seed=seed)
    hessian = second_moments(x)
    rounded = round_with_hessian(torch.from_numpy(weights), hessian)
    found = error(weights, levels_of(rounded, inner), rounded, hessian)
    assert found < 0.5 * error(weights, nearest(weights, rounded), rounded, hessian)
    # The same, said with activations and the table that is stored.
    products = x.astype(np.float64) @ (weights - rounded.weights(inner).astype(np.float64)).T
    assert found == pytest.approx((products**2).sum(), rel=1e-3)


@pytest.mark.parametrize("block", [32, 64])
def test_even_levels_are_the_papers_in_blocks_around_zero(block: int) -> None:
    """As TensorRT reads them: no zeros of their own, and scales that float16 holds."""
    weights, hessian = normal(12, 192), second_moments(correlated(192, 400))
    rounded = round_with_hessian(torch.from_numpy(weights), hessian, block, even=True)
    assert rounded.zeros is None and rounded.integers.shape == (12, 192 // block, block)
    np.testing.assert_array_equal(rounded.scales, rounded.scales.astype(np.float16).astype(np.float32))
    # The same with zeros spelt out, and each block as many of 32, is what the paper's update gives.
    repeated = np.repeat(rounded.scales, block // INT4_BLOCK, 1)
    spelt = Rounded(4, rounded.integers.reshape(12, -1, INT4_BLOCK), repeated, np.full(repeated.shape, 8, np.uint8))
    found, wanted = levels_of(rounded, 192), paper(weights, hessian, spelt)
    assert (found == wanted).mean() > 0.98
    assert error(weights, found, spelt, hessian) < 0.5 * error(weights, nearest(weights, spelt), spelt, hessian)


def test_gptq_gives_four_bits_in_the_ranges_of_the_blocks() -> None:
    weights = normal(7, 213)
    rounded = round_with_hessian(torch.from_numpy(weights), second_moments(correlated(213)))
    assert rounded.bits == 4 and rounded.zeros is not None
    assert (rounded.integers.shape, rounded.integers.dtype) == ((7, 7, 32), np.uint8)
    assert rounded.integers.max() == 15 and rounded.zeros.max() <= 15
    assert (rounded.scales.dtype, rounded.zeros.dtype) == (np.float32, np.uint8)
    for channel, place in np.ndindex(7, 7):
        block = in_blocks(weights, 32)[channel, place : place + 1]
        scale, zero = block_range(torch.from_numpy(block))
        assert rounded.scales[channel, place] == scale.item() and rounded.zeros[channel, place] == zero.item()


@pytest.mark.parametrize("inner", [96, 213])
def test_nearest_levels(inner: int) -> None:
    weights = normal(9, inner)
    rounded = nearest_int4(weights)
    np.testing.assert_array_equal(levels_of(rounded, inner), nearest(weights, rounded))
    chosen = round_with_hessian(torch.from_numpy(weights), second_moments(correlated(inner)))
    np.testing.assert_array_equal(rounded.scales, chosen.scales)  # the same ranges
    np.testing.assert_array_equal(rounded.zeros, chosen.zeros)  # type: ignore[arg-type]
    wrong = np.abs(rounded.weights(inner) - weights)
    assert 0 < np.sqrt((wrong**2).mean()) < 0.1  # sixteen levels for numbers of about 1


def test_uncorrelated_activations_leave_nothing_to_make_good() -> None:
    weights = normal(9, 96)
    hessian = torch.diag(torch.linspace(1, 50, 96))
    rounded = round_with_hessian(torch.from_numpy(weights), hessian)
    np.testing.assert_array_equal(levels_of(rounded, 96), nearest(weights, rounded))


def test_silent_activations() -> None:
    """Channels that were zero throughout take the nearest levels and disturb nobody."""
    weights, x = normal(9, 96), correlated(96)
    silent = np.array([0, 17, 50, 51, 95])
    x[:, silent] = 0
    rounded = round_with_hessian(torch.from_numpy(weights), second_moments(x))
    levels = levels_of(rounded, 96)
    np.testing.assert_array_equal(levels[:, silent], nearest(weights, rounded)[:, silent])
    wanted = paper(weights, second_moments(x), rounded)
    assert (levels == wanted).mean() > 0.98
    nothing = round_with_hessian(torch.from_numpy(weights), torch.zeros(96, 96))
    np.testing.assert_array_equal(levels_of(nothing, 96), nearest(weights, nothing))


def test_what_is_given_stays_as_it_is() -> None:
    weights, hessian = torch.from_numpy(normal(5, 64)), second_moments(correlated(64))
    before = weights.clone(), hessian.clone()
    round_with_hessian(weights, hessian)
    assert torch.equal(weights, before[0]) and torch.equal(hessian, before[1])


# ---- ranges ----


def rounded_in(weights: Array, scale: Array, zero: Array) -> Array:
    levels = np.clip(np.rint(weights.astype(np.float64) / scale[:, None]) + zero[:, None], 0, 15)
    return (levels - zero[:, None]) * scale[:, None]


def ranges(weights: Array) -> tuple[Array, Array]:
    scale, zero = (part.double().numpy() for part in block_range(torch.from_numpy(weights)))
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert (zero == np.rint(zero)).all() and ((zero >= 0) & (zero <= 15)).all()
    return scale, zero


def test_sixteen_levels_are_found_again() -> None:
    rng = np.random.default_rng(0)
    zeros = np.array([0, 3, 8, 15])
    levels = rng.integers(0, 16, (4, 32))
    levels[:, 0], levels[:, 1] = 0, 15
    weights = ((levels - zeros[:, None]) * np.array([[0.01], [1], [3], [1e-4]])).astype(np.float32)
    scale, zero = ranges(weights)
    np.testing.assert_array_equal(zero, zeros)
    np.testing.assert_allclose(rounded_in(weights, scale, zero), weights, rtol=1e-5)


def test_ranges_are_no_worse_than_from_least_to_largest() -> None:
    """Measured as the choice is made, and clearly better where one weight is far out."""
    weights = normal(200, 32)
    weights[:100, 0] *= 4
    low, high = weights.min(-1).clip(max=0).astype(np.float64), weights.max(-1).clip(min=0).astype(np.float64)
    whole = (high - low) / 15
    for power, least in ((2.4, 1.0), (2.0, 1.03)):
        found, plain = (
            (np.abs(rounded_in(weights, scale, zero) - weights) ** power).sum(-1)
            for scale, zero in (ranges(weights), (whole, np.rint(-low / whole)))
        )
        assert (found <= plain * (1 + 1e-5)).all() or power != 2.4
        assert found.sum() * least < plain.sum()


def test_zero_is_a_level_of_every_range() -> None:
    """Padding, and weights of nothing, cost nothing."""
    weights = np.abs(normal(6, 32)) + 2  # all on one side of it
    weights[3:] *= -1
    weights[::3, 7] = 0
    scale, zero = ranges(weights)
    found = rounded_in(weights, scale, zero)
    assert (zero == [0, 0, 0, 15, 15, 15]).all()
    assert not found[::3, 7].any()
    assert np.abs(found - weights).max() < np.abs(weights).max() / 15
    nothing = np.zeros((2, 32), np.float32)
    assert not rounded_in(nothing, *ranges(nothing)).any()


# ---- smoothing ----


def int8_error(x: Array, w: Array) -> float:
    """Squared error of x w with rows of x and columns of w rounded to 255 levels, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    row, column = np.abs(x).max(-1, keepdims=True) / 127, np.abs(w).max(0) / 127
    return float(((np.rint(x / row) * row @ (np.rint(w / column) * column) - x @ w) ** 2).sum())


def test_loud_channels_are_made_quieter_and_the_error_falls() -> None:
    x, w = normal(300, 96), normal(96, 64)
    loud = [3, 30, 60]
    x[:, loud] *= 50
    factor = best_factor(x, np.abs(x).max(0), w)
    assert factor is not None
    assert (factor.shape, factor.dtype) == ((96,), np.float32)
    assert (factor > 0).all()
    assert factor[loud].min() > 5 * np.delete(factor, loud).max()
    assert int8_error(x / factor, w * factor[:, None]) < 0.2 * int8_error(x, w)


def test_loud_weights_keep_their_share() -> None:
    """Where a loud channel meets loud weights, moving all of its size into them would only move the error."""
    x, w = normal(300, 96), normal(96, 64)
    x[:, 3] *= 50
    x[:, 30] *= 50
    w[30] *= 50
    factor = best_factor(x, np.abs(x).max(0), w)
    assert factor is not None
    assert factor[3] > 2 * factor[30]
    assert int8_error(x / factor, w * factor[:, None]) < int8_error(x, w)


def test_no_factor_where_none_helps() -> None:
    """Whole steps throughout: there is no error to lower."""
    rng = np.random.default_rng(0)
    x, w = (rng.choice([-1.0, 1.0], shape).astype(np.float32) for shape in ((50, 64), (64, 32)))
    assert int8_error(x, w) < 1e-20
    assert best_factor(x, np.abs(x).max(0), w) is None


def test_rows_and_channels_of_zeros_do_no_harm() -> None:
    x, w = normal(100, 96), normal(96, 64)
    x[:, 3] *= 50
    x[7], x[:, 9], w[11] = 0, 0, 0
    factor = best_factor(x, np.abs(x).max(0), w)
    assert factor is not None
    assert np.isfinite(factor).all() and (factor > 0).all()


# ---- a whole model ----


@dataclass(frozen=True)
class Traced:
    """A small llama with three loud channels in each norm: as torch has it, finished but unrounded, and written."""

    model: Any
    graph: ir.Model
    exact: Path
    texts: Array


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    model = tiny_model("llama", **sizes, tie_word_embeddings=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter *= 0.5
            elif "layernorm" in name:
                parameter[list(LOUD)] *= 30
    graph = trace_gqa(model, survey(model, 128), TargetTail(False))
    clean(graph)
    finish_gqa_target(graph, one_as_two=True)
    folder = tmp_path_factory.mktemp("exact")
    whole = graph.clone()
    FoldWeights()(whole)
    clean(whole)
    write_graph(whole, folder, "target")
    texts = speak(OrtTarget(folder / "target.onnx", threads=1), [[token] for token in range(5, 17)], 64)
    return Traced(model, graph, folder / "target.onnx", texts)


def logits_off(traced: Traced, graph: ir.Model, folder: Path) -> float:
    """Mean squared error of a rounded graph's logits against eager torch, on other texts than it was made with."""
    write_graph(graph, folder, "target")
    target = OrtTarget(folder / "target.onnx", threads=1)
    texts = speak(OrtTarget(traced.exact, threads=1), [[1]] * 4, 48, seed=1)
    with torch.no_grad():
        wanted = traced.model(input_ids=torch.from_numpy(texts)).logits.double().numpy()
    count = np.arange(48)
    found = [target.open(48).run(ids, count, np.tri(48, dtype=np.bool_), count).logits[0].copy() for ids in texts]
    return float(((np.array(found) - wanted) ** 2).mean() / wanted.var())


def test_smoothing_lowers_the_error_of_int8_logits(traced: Traced, tmp_path: Path) -> None:
    smooth, plain = rounded_graphs(traced, "int8")
    assert kinds(smooth) == kinds(plain)
    assert kinds(smooth)["MatMulIntegerToFloat"] == 3 * 2
    assert (kinds(smooth)["GatherBlockQuantized"], kinds(smooth)["MatMulNBits"]) == (1, 3)  # the tied table, down
    before, after = (logits_off(traced, graph, tmp_path) for graph in (plain, smooth))
    assert after < 0.5 * before
    assert after < 0.03


def rounded_graphs(traced: Traced, precision: str) -> tuple[ir.Model, ir.Model]:
    """With and without regard to activations."""
    graphs = traced.graph.clone(), traced.graph.clone()
    for rounded, texts in zip(graphs, (traced.texts.tolist(), []), strict=True):
        quantise_target(rounded, precision, traced.exact, texts, lambda _: None)
        assert not any(map(reads_weights, rounded.graph))
    return graphs


def reads_weights(node: ir.Node) -> bool:
    """Whether it reads a large table in float32."""
    tables = (value.const_value for value in node.inputs if value is not None and value.is_initializer())
    return any(t is not None and t.dtype == ir.DataType.FLOAT and t.size > 1 << 14 for t in tables)


def test_loud_channels_of_a_model_are_found(traced: Traced) -> None:
    graph = traced.graph.clone()
    PackTables()(graph)
    FoldWeights(part_bytes=None)(graph)
    factors = smoothing_factors(graph, traced.exact, traced.texts.tolist())
    from_norms = [
        factor for name, factor in factors.items() if smoothable(graph)[name].makers[0][0].name and len(factor) == 128
    ]
    assert len(from_norms) >= 4  # two norms in each of two layers
    for factor in from_norms[:4]:
        assert factor[list(LOUD)].min() > np.median(np.delete(factor, LOUD))


def test_gptq_lowers_the_error_of_int4_logits(traced: Traced, tmp_path: Path) -> None:
    chosen, plain = rounded_graphs(traced, "int4")
    for rounded in (chosen, plain):
        bits = [node.attributes["bits"].as_int() for node in rounded.graph if node.op_type == "MatMulNBits"]
        assert bits == [8, 8, 4, 4] * 2 + [8]  # around attention, in the feed-forward layers, and the lm_head
    before, after = (logits_off(traced, graph, tmp_path) for graph in (plain, chosen))
    assert after < 0.7 * before
    assert after < 0.1


# ---- text and activations to calibrate on ----


def test_activations_are_those_of_the_model(traced: Traced) -> None:
    """What products read, against torch's own modules."""
    graph = traced.graph.clone()
    FoldWeights(part_bytes=None)(graph)
    names = list(smoothable(graph))
    layers = traced.model.model.layers
    modules = [
        module for layer in layers for module in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    ]
    text = traced.texts[0, :20]
    seen: list[Array] = []
    hooks = [module.register_forward_pre_hook(lambda _, given: seen.append(given[0][0].numpy())) for module in modules]
    with torch.no_grad():
        traced.model(input_ids=torch.from_numpy(text)[None])
    for hook in hooks:
        hook.remove()
    (found,) = Activations(traced.exact, names).of([text.tolist()])
    assert set(found) == set(names)
    for wanted in seen:
        gaps = [np.abs(values - wanted).max() for values in found.values() if values.shape == wanted.shape]
        assert min(gaps) < 1e-4 * np.abs(wanted).max()


def test_the_model_speaks_from_its_own_distribution(traced: Traced) -> None:
    """The mean surprise of what it says is the entropy of its distributions; other rules are far off."""
    target, prompts = OrtTarget(traced.exact, threads=1), [[7], [8, 9, 10], list(range(20, 50))] * 20
    texts = speak(target, prompts, 12, seed=3)
    assert (texts.shape, texts.dtype) == ((60, 12), np.int64)
    assert all(text[: len(prompt)].tolist() == prompt[:12] for text, prompt in zip(texts, prompts, strict=True))
    drawn = np.array([np.arange(1, 12) >= len(prompt) for prompt in prompts])
    with torch.no_grad():
        logits = traced.model(input_ids=torch.from_numpy(texts)).logits[:, :-1].double().numpy()
    logprobs = log_softmax(logits, -1)
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    variance = (np.exp(logprobs) * (logprobs + entropy[..., None]) ** 2).sum(-1)
    entropy, deviation = entropy[drawn].mean(), np.sqrt(variance[drawn].sum()) / drawn.sum()

    def surprise(tokens: Array) -> float:
        return float(-np.take_along_axis(logprobs, tokens[..., None], -1)[..., 0][drawn].mean())

    assert abs(surprise(texts[:, 1:]) - entropy) < 4 * deviation
    for wrong in (logits.argmax(-1), np.random.default_rng(0).integers(logits.shape[-1], size=texts[:, 1:].shape)):
        assert abs(surprise(wrong) - entropy) > 8 * deviation
    np.testing.assert_array_equal(speak(target, prompts, 12, seed=3), texts)
    assert len(np.unique(texts[::3, 1])) > 10  # texts of one prompt differ


# ---- small graphs ----


def feed_forward(more: str = "", **weights: Array) -> ir.Model:
    """A graph on the contract without attention: the embedding is read by two products."""
    return graph(
        f"""agraph (int64[B,T] input_ids, int64[B,T] position_ids, bool[B,T,T] tree_mask, int64[B] past_length,
            int64[R] logit_rows) => (float[B,T,256] y, float[B,T,256] z) <float[B,T,96] h> {{
            h = Gather(E, input_ids)
            y = MatMul(h, V)
            z = MatMul(h, W)
            {more}
        }}""",
        E=normal(300, 96),
        V=normal(96, 256, seed=1),
        W=normal(96, 256, seed=2),
        **weights,
    )


def test_products_of_one_activation_each_keep_their_own_weights(tmp_path: Path) -> None:
    """They share its second moments and nothing else."""
    texts = np.random.default_rng(0).integers(300, size=(4, 40))
    write_graph(feed_forward(), tmp_path, "target")
    rounded = gptq(folded_tables(feed_forward()), tmp_path / "target.onnx", texts.tolist(), lambda _: None)
    assert set(rounded) == {"V", "W"}
    hessian = second_moments(normal(300, 96)[texts.ravel()])
    for name, seed in (("V", 1), ("W", 2)):
        weights = normal(96, 256, seed=seed).T
        levels = levels_of(rounded[name], 96)
        assert (levels == paper(weights, hessian, rounded[name])).mean() > 0.98
        assert error(weights, levels, rounded[name], hessian) < error(
            weights, nearest(weights, rounded[name]), rounded[name], hessian
        )


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_model_that_rounding_hardly_reaches_is_refused(precision: str, tmp_path: Path) -> None:
    """Most of its weights are stacks of experts."""
    small, large = feed_forward(), feed_forward("x = MatMul(h, X)", X=normal(8, 96, 256))
    quantise_target(small, precision, tmp_path / "none", [], lambda _: None)
    assert not any(map(reads_weights, small.graph))
    large.graph.outputs.append(
        next(node.outputs[0] for node in large.graph if "X" in [v.name for v in node.inputs if v])
    )
    with pytest.raises(TraceError) as caught:
        quantise_target(large, precision, tmp_path / "none", [], lambda _: None)
    sentence = str(caught.value)
    # 8 x 96 x 256 weights of 300 x 96 + 2 x 96 x 256 more
    assert f"--precision: 72% of the model's weights are in operators that {precision} does not reach" in sentence
    assert "use --precision fp32" in sentence and "\n" not in sentence
