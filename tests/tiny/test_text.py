"""Text in and out, against tokenizers' own whole-text decoding and transformers' chat rendering.

Four small tokenizers are trained here, one for each way of joining pieces: byte-level BPE (GPT-2, Llama-3,
Qwen), Metaspace BPE with byte fallback (Llama-2, Gemma), WordPiece, and BPE with an end-of-word suffix.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from speccompile.graphs.errors import BundleError, GenerationError
from speccompile.runtime.text import CONTEXT_TOKENS, Detokenizer, StopStrings, Text, TextStream

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it?",
    "def main():\n    print('hello, world')\n\n# the end of the file\n",
    "Grüße aus Köln: schöne, süße Äpfel. Привет, мир! こんにちは世界",
    "one two three four five six seven eight nine ten   eleven",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# The emoji and the last scripts are not in the corpus: they come out as single bytes.
WORDS = [
    "the",
    "dog's",
    "Grüße",
    "мир",
    "世界",
    "🙂",
    "👩‍👩‍👧",
    "é",
    "ไทย",
    "\n",
    "  two  spaces",
    ".",
    "isn't",
    "�",
    "🇳🇱!",
]


@cache
def text_of(kind: str) -> Text:
    return Text(TOKENIZERS[kind](), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>"])  # added, but not special: it must show
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL]))
    data = json.loads(tokenizer.to_str())
    for byte in range(256):
        data["model"]["vocab"][f"<0x{byte:02X}>"] = len(data["model"]["vocab"])
    data["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL]))
    return tokenizer


def end_of_word() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
}


def pieces_of(ids: Sequence[int], rng: random.Random) -> Iterator[Sequence[int]]:
    """The ids in order, in pieces of 0 to 6, mostly small."""
    start = 0
    while start < len(ids):
        size = rng.choice([0, 1, 1, 1, 1, 2, 3, 6])
        yield ids[start : start + size]
        start += size


# ---- encoding ----


def test_encoding_is_that_of_transformers() -> None:
    text = text_of("byte_level")
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    for sentence in ["The dog", "", "<|im_start|>user", "Grüße 🙂 <think>"]:
        assert text.encode(sentence) == theirs(sentence)["input_ids"]
        assert text.encode(sentence)[0] == 0  # the post-processor's <s>
        ids = text.encode(sentence)
        assert text.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_left_in_the_file_are_off() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(Text(tokenizer).encode("The quick brown fox jumps over the lazy dog")) not in (4, 64)


def test_load_reads_the_folder_and_names_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a readable tokenizer"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a readable tokenizer"):
        Text.load(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Text.load(tmp_path).chat_template is None
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}ü", "utf-8")
    assert Text.load(tmp_path, {"bos_token": "<s>"}).render_chat([{"role": "user"}]) == "<s>ü"


# ---- chat ----

TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n",
    "llama-2": "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.first and system is defined %}"
    "{% set content = '<<SYS>>' + system + '<</SYS>>' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content + ' ' + eos_token }}{% endif %}{% endfor %}",
    "blocks": """
    {#- white space control, as in the templates written by hand -#}
    {%- set ns = namespace(last='none') %}
    {% for m in messages %}
        {% if m.role == 'system' %}
            {% continue %}
        {% endif %}
        {%- set ns.last = m.role %}
  <{{ m.role }}> {{ m.content | trim }}
    {% endfor %}
last: {{ ns.last }}{{ '' if tools is none and documents is none else 'tools' }}

""",
    "generation": "{% set x = 'outer' %}{% for m in messages if m.role == 'user' %}{{ m.content }}"
    "{% endfor %}"
    "{% generation %}{% set x = 'inner' %}{{ messages[-1].content }}|{{ x }}{% endgeneration %}\n{{ x }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}"
    "{% if unset is defined %}no{% endif %}{% if extra is defined %}{{ extra }}{% endif %}",
}
CHATS = [
    [{"role": "user", "content": " Hello <b>&'ü</b> 🙂 "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<|im_start|>Hi"},
        {"role": "assistant", "content": "Yes\n", "tool_calls": None},
        {"role": "user", "content": "And?"},
    ],
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["short", "long"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_is_that_of_transformers(name: str, chat: list[dict[str, object]], prompt: bool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=TEMPLATES[name], **special)
    ours = Text(byte_level(), TEMPLATES[name], special)
    options = {"add_generation_prompt": prompt, "extra": [1, "x"]}
    assert ours.render_chat(chat, **options) == theirs.apply_chat_template(chat, tokenize=False, **options)
    assert ours.chat(chat, **options) == theirs.apply_chat_template(chat, return_dict=False, **options)


def test_chat_does_not_add_a_second_bos() -> None:
    text = Text(byte_level(), "{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    assert text.chat([{"role": "user", "content": "dog"}]).count(0) == 1
    assert text.encode("dog").count(0) == 1


@pytest.mark.parametrize(
    ("template", "messages", "found"),
    [
        (None, [{"role": "user", "content": "x"}], "no chat_template.jinja; pass the prompt as plain text"),
        ("x", [], "must be a non-empty list"),
        ("x", ["hello"], "must be a non-empty list"),
        (TEMPLATES["llama-2"], [{"role": "assistant", "content": "x"}], "roles must alternate"),
        ("{{ messages[0].content + '' }}", [{"role": "user"}], "no attribute 'content'"),
        ("{% for %}", [{"role": "user"}], "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user"}], "unsafe"),
        ("{{ messages.append(1) }}", [{"role": "user"}], "unsafe|not safely callable"),
        ("x", [{"role": "user", "content": object()}], "not JSON serializable"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(template: str | None, messages: list, found: str) -> None:
    with pytest.raises(GenerationError, match=found):
        Text(byte_level(), template).chat(messages)


# ---- incremental decoding ----


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_decoded_text(kind: str) -> None:
    """Real text, any split; several times the window, so that it moves."""
    text, rng = text_of(kind), random.Random(kind)
    for _ in range(60):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.choice([0, 1, 5, 60])))
        ids = text.encode(words)
        detokenizer = Detokenizer(text)
        pieces = [detokenizer.push(piece) for piece in pieces_of(ids, rng)]
        assert "".join(pieces) + detokenizer.flush() == text.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_for_any_ids(kind: str) -> None:
    """What a bad model may emit: broken UTF-8, special tokens in the middle, ids beyond the tokenizer."""
    text, rng = text_of(kind), random.Random(kind)
    size = text.tokenizer.get_vocab_size()
    odd = [*text.byte_ids, *text.special_ids, size, size + 500]
    for _ in range(300):
        ids = [rng.choice(odd) if rng.random() < 0.5 else rng.randrange(size) for _ in range(rng.randrange(120))]
        detokenizer = Detokenizer(text)
        pieces = [detokenizer.push(piece) for piece in pieces_of(ids, rng)]
        assert "".join(pieces) + detokenizer.flush() == text.decode(ids)


def test_text_is_given_out_as_soon_as_it_is_whole() -> None:
    text = text_of("byte_level")
    ids = text.encode("the dog 🙂 isn't 世界 é")
    detokenizer, shown, waits = Detokenizer(text), "", 0
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push([token])
        whole = text.decode(ids[:count])
        assert shown == whole.removesuffix("\ufffd")
        waits += whole.endswith("\ufffd")
    assert waits >= 3  # the emoji alone is four tokens
    assert detokenizer.flush() == ""


def test_metaspace_keeps_spaces_between_pieces_and_drops_the_first() -> None:
    text = text_of("metaspace")
    ids = text.encode("the dog the dog")
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.push([token]) for token in ids]
    assert pieces[0][0] == "t"
    assert "".join(pieces) == "the dog the dog"


def test_a_run_of_byte_pieces_waits_for_its_end() -> None:
    """One wrong byte makes the decoder replace the whole run, so nothing of it may be shown before."""
    text = text_of("metaspace")
    vocabulary = text.tokenizer.get_vocab()
    smile = [vocabulary[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    dog = text.encode("dog")
    detokenizer = Detokenizer(text)
    assert detokenizer.push(smile) == ""
    assert detokenizer.push(dog).startswith("🙂")
    assert detokenizer.push(smile) == ""
    assert detokenizer.push(smile[:1]) == ""
    assert detokenizer.push(dog).startswith("\ufffd" * 5)
    assert detokenizer.push(smile) == ""
    assert detokenizer.flush() == "🙂"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_the_cost_of_a_push_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(kind)
    decoded = []
    decode = Text.decode
    monkeypatch.setattr(Text, "decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids))
    detokenizer = Detokenizer(text)
    broken = text.byte_ids or text.encode("é")[1:2]  # a first byte, again and again
    for token in [*text.encode("the lazy dog isn't 世界 " * 100), *list(broken)[:1] * 500]:
        detokenizer.push([token])
    assert max(decoded) <= 2 * CONTEXT_TOKENS + 1
    assert len(decoded) > 1000


# ---- stop strings ----


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """By trying every end, then every start: the text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], True
    return text, False


def test_stop_strings_cut_the_same_however_the_text_is_split() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(4000):
        stops = ["".join(rng.choices("ab\n", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        text = "".join(rng.choices("ab\n", k=rng.randrange(20)))
        expected, expected_hit = first_stop(text, stops)
        matcher, shown, hit, start = StopStrings(stops), "", False, 0
        while start < len(text) and not hit:
            size = rng.randint(0, 4)
            piece, hit = matcher.push(text[start : start + size])
            shown, start = shown + piece, start + size
        if not hit:
            shown += matcher.flush()
        assert (shown, hit) == (expected, expected_hit)
        hits += hit
    assert 1000 < hits < 3500


def test_stop_strings_hold_back_no_more_than_they_must() -> None:
    matcher = StopStrings(["\n\nUser:", "END"])
    assert matcher.push("some text E") == ("some text ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("T\n") == ("ENT", False)
    assert matcher.push("\n\nUser") == ("\n", False)  # the second and third line end may begin the stop
    assert matcher.push(": hi") == ("", True)
    assert matcher.push("next") == ("next", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(GenerationError, match="a stop string is empty"):
        StopStrings(["x", ""])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_stream_keeps_tokens_up_to_the_one_that_completes_a_stop(kind: str) -> None:
    """Against the shortest start of the ids whose decoded text holds a stop string."""
    text, rng = text_of(kind), random.Random(kind)
    stops = ["dog's", "e\n", "世", "ten el", ". I"]
    hits = 0
    for _ in range(80):
        words = [*WORDS[:6], *" ".join(CORPUS[:4]).split(" ")]
        ids = text.encode(" ".join(rng.choice(words) for _ in range(rng.randrange(40))))
        whole = [text.decode(ids[:n]) for n in range(len(ids) + 1)]
        kept = next((n for n in range(len(ids) + 1) if first_stop(whole[n], stops)[1]), None)
        stream, shown, pushed, stopped = TextStream(text, stops), "", 0, None
        for piece in pieces_of(ids, rng):
            new, count = stream.push(piece)
            shown += new
            if count is not None:
                stopped = pushed + count
                break
            pushed += len(piece)
        if stopped is None:
            rest, hit = stream.finish()
            shown += rest
            stopped = len(ids) if hit else None
        if kept is None:
            assert stopped is None
            assert shown == text.decode(ids)
        else:
            assert stopped is not None
            # A byte run is settled by the piece after it, so a stop string inside one is seen a token later.
            later = next((n for n in range(kept, len(ids)) if ids[n] not in text.byte_ids), len(ids) - 1) + 1
            assert stopped == (later if ids[kept - 1] in text.byte_ids else kept)
            assert shown == first_stop(whole[kept], stops)[0]
        hits += kept is not None
    assert hits > 10


def test_stream_without_stops_is_the_detokenizer() -> None:
    text = text_of("byte_level")
    ids = text.encode("the dog 🙂")
    stream = TextStream(text)
    assert stream.push(ids[:-1]) == ("the dog ", None)
    assert stream.push(ids[-1:]) == ("🙂", None)
    assert stream.finish() == ("", False)


def test_stop_completed_by_held_back_text_is_found_at_the_end() -> None:
    text = text_of("metaspace")
    smile = [text.tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    stream = TextStream(text, ["🙂"])
    assert stream.push([*text.encode("dog"), *smile]) == ("dog", None)
    assert stream.finish() == ("", True)
