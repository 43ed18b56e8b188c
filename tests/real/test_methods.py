"""Draft model, EAGLE, lookahead, prompt lookup and what lookup joins, on SmolLM2: the same words, in fewer rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from speccompile.compiler.prove import TIE_GAP, first_difference, top_two_gap
from speccompile.graphs.settings import LookupSettings
from speccompile.graphs.tree import DynamicTree, TokenTree
from speccompile.runtime import Decoder
from speccompile.tools.bench.contestants import lookahead_variant, lookup_variant, variant
from speccompile.tools.prompts import first_turns

pytestmark = pytest.mark.real

PROMPTS, NEW_TOKENS = 3, 48
COUNTING = "Count from 1 to 60, separated by commas."
REPEATING = "Repeat this line ten times: the cat sat on the mat and the dog sat on the log."


def methods(decoder: Decoder, drafting: Decoder, eagle: Decoder) -> Iterator[tuple[str, Decoder]]:
    yield "lookahead", lookahead_variant(decoder, "5,3,5")
    yield "n-grams", lookahead_variant(decoder, "0,3,5")
    yield "prompt lookup", lookup_variant(decoder)
    yield "heads and lookup", variant(decoder, decoder.tree, lookup=LookupSettings())
    yield "draft model", drafting
    yield "draft tree", variant(drafting, TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]))
    yield "dynamic draft tree", variant(drafting, DynamicTree(6, 0.1))
    yield "head that drafts", eagle
    yield "EAGLE-2's draft tree", variant(eagle, DynamicTree(24, depth=6, top_k=5))
    yield "static draft tree of a head", variant(eagle, TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]]))
    yield "draft of a head and lookup", variant(eagle, DynamicTree(8, 0.06), lookup=LookupSettings())


def test_greedy_words_are_those_of_plain_decoding(
    smollm2_decoder: Decoder, smollm2_draft_decoder: Decoder, smollm2_eagle_decoder: Decoder
) -> None:
    """A few prompts; `python -m speccompile.tools.bench` does all 80."""
    for text in first_turns(limit=PROMPTS):
        ids = smollm2_decoder.text.chat([{"role": "user", "content": text}])
        options = {"max_new_tokens": NEW_TOKENS}
        plain = smollm2_decoder.generate(ids, speculate=False, sequence=smollm2_decoder.new_sequence(), **options)
        for name, decoder in methods(smollm2_decoder, smollm2_draft_decoder, smollm2_eagle_decoder):
            ours = decoder.generate(ids, sequence=decoder.new_sequence(), **options)
            place = first_difference(ours.token_ids, plain.token_ids)
            tie = place is not None and top_two_gap(smollm2_decoder, [*ids, *plain.token_ids[:place]]) < TIE_GAP["fp32"]
            assert place is None or tie, name
            if "draft" in name:
                assert ours.stats.accepted > 4, name


def test_repetitive_text_comes_in_leaps(smollm2_decoder: Decoder) -> None:
    ids = smollm2_decoder.text.chat([{"role": "user", "content": COUNTING}])
    for numbers, least in (("5,3,5", 3), ("7,5,7", 5)):  # N tokens in one step, one more than the original emits
        decoder = lookahead_variant(smollm2_decoder, numbers)
        stats = decoder.generate(ids, max_new_tokens=96, sequence=decoder.new_sequence()).stats
        assert stats.longest_round >= least, numbers
    ids = smollm2_decoder.text.chat([{"role": "user", "content": REPEATING}])
    decoder = lookup_variant(smollm2_decoder)
    stats = decoder.generate(ids, max_new_tokens=96, sequence=decoder.new_sequence()).stats
    assert stats.longest_round > 8
    assert stats.mean_accepted_tokens > 2


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_words_of_chosen_drafts_are_those_of_plain_decoding(
    smollm2_decoder: Decoder, temperature: float
) -> None:
    ids = smollm2_decoder.text.chat([{"role": "user", "content": COUNTING}])
    options = {"max_new_tokens": 40, "temperature": temperature, "top_p": 0.9, "seed": 1}
    plain = smollm2_decoder.generate(ids, speculate=False, sequence=smollm2_decoder.new_sequence(), **options)
    for decoder in (lookahead_variant(smollm2_decoder, "5,3,5"), lookup_variant(smollm2_decoder)):
        assert decoder.generate(ids, sequence=decoder.new_sequence(), **options).token_ids == plain.token_ids


def test_an_eagle_head_accepts_more_than_the_draft_model_it_stands_on(
    smollm2_draft_decoder: Decoder, smollm2_eagle_decoder: Decoder
) -> None:
    """The features count: with the same tree, over the same answers."""
    tree = DynamicTree(8, 0.05)
    means = []
    for decoder in (variant(smollm2_draft_decoder, tree), variant(smollm2_eagle_decoder, tree)):
        emitted = rounds = 0
        for text in first_turns(limit=6):
            asked = [{"role": "user", "content": text}]
            stats = decoder.generate(asked, max_new_tokens=NEW_TOKENS, sequence=decoder.new_sequence()).stats
            emitted, rounds = emitted + stats.emitted - 1, rounds + stats.rounds
        means.append(emitted / rounds)
    assert means[1] > means[0] > 1.4
