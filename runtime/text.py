"""Text in and out: tokenizer, chat template, incremental decoding and stop strings.

Everything here gives what transformers gives for the same `tokenizer.json` and `chat_template.jinja`
(`PreTrainedTokenizerFast.encode`, `decode(skip_special_tokens=True)`, `apply_chat_template`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from speccompile.graphs.errors import BundleError, GenerationError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (or not yet) UTF-8
CONTEXT_TOKENS = 8  # left context kept for decoding: well over the 4 bytes of a character


class Text:
    """A tokenizer and its chat template.

    Args:
        tokenizer: truncation and padding are switched off.
        chat_template: jinja source, or None.
        special_tokens: strings a template may name, such as {"bos_token": "<s>", "eos_token": "</s>"}.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str] | None = None) -> Text:
        """Read `tokenizer.json` and, where there is one, `chat_template.jinja`.

        Raises:
            BundleError: when `tokenizer.json` is missing or not a tokenizer.
        """
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path}: not a readable tokenizer ({error}); rebuild the bundle.") from error
        template = folder / "chat_template.jinja"
        return cls(tokenizer, template.read_text("utf-8") if template.is_file() else None, special_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer's post-processor adds."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; ids the tokenizer does not know count for nothing."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: object
    ) -> list[int]:
        """Token ids of a conversation under the chat template.

        Args:
            messages: such as [{"role": "user", "content": "Hello"}]; keys whose value is None are left out.
            add_generation_prompt: end with the header of the assistant's turn.
            variables: further names for the template, such as enable_thinking=False.

        Raises:
            GenerationError: without a template, for an empty or malformed conversation, or when the template
                refuses it.
        """
        rendered = self.render_chat(messages, add_generation_prompt, **variables)
        return list(self.tokenizer.encode(rendered, add_special_tokens=False).ids)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """The text that `chat` encodes; arguments and errors as there."""
        if self.chat_template is None:
            raise GenerationError(
                "chat: the bundle has no chat_template.jinja; pass the prompt as plain text, "
                "or rebuild from a model folder whose tokenizer has a chat template."
            )
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise GenerationError(
                f"chat: messages is {messages!r:.80}; it must be a non-empty list of objects "
                'such as {"role": "user", "content": "Hello"}.'
            )
        try:
            # Through JSON: a template may come from anywhere, so it gets plain data and no methods of ours.
            given = [{key: value for key, value in m.items() if value is not None} for m in messages]
            plain = json.loads(json.dumps(given))
            return self._template.render(
                **{"tools": None, "documents": None, **self.special_tokens, **variables},
                messages=plain,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is code: it can raise anything
            raise GenerationError(
                f"chat: the chat template does not take these messages ({error}); check their roles and keys."
            ) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled in the environment of transformers' `utils/chat_template_utils.py`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        assert self.chat_template is not None
        return environment.from_string(self.chat_template)

    # ---- what incremental decoding must know ----

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` skips."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the pieces <0x00> .. <0xFF> where the decoder turns them into bytes."""
        decoder = json.loads(self.tokenizer.decoder.__getstate__()) if self.tokenizer.decoder else {}
        if not any(step.get("type") == "ByteFallback" for step in decoder.get("decoders", [decoder])):
            return frozenset()
        ids = (self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's words: here just a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class Detokenizer:
    """Decodes token by token; the pieces joined are `Text.decode` of all ids, however they are split.

    Held back until they are settled:
    1. the last character when it is U+FFFD: it may be the first bytes of a character still to come;
    2. a run of byte pieces (<0x..>, SentencePiece's byte fallback): one wrong byte turns the whole run into
       U+FFFD, so it is settled only by the piece after it.

    Decoders look at neighbours (a first piece loses its leading space), so each push decodes a window: a few
    tokens of left context plus the new ones. The cost of a push does not grow with the text.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._window: list[int] = []
        self._byte_run: list[int] = []
        self._emitted = 0  # characters of the decoded window already returned

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` settle."""
        for token in ids:
            if token in self._text.special_ids or self._text.tokenizer.id_to_token(token) is None:
                continue  # `decode` skips it, so bytes on both sides of it join
            self._byte_run.append(token)
            if token not in self._text.byte_ids:
                self._window += self._byte_run
                self._byte_run = []
        text = self._text.decode(self._window)
        settled = len(text) - text.endswith(REPLACEMENT)
        new = text[self._emitted : settled]
        self._emitted = settled
        if len(self._window) > 2 * CONTEXT_TOKENS:
            self._window = self._window[-CONTEXT_TOKENS:]
            # Counted from the end: less context may change how the first characters read, never the last.
            self._emitted = len(self._text.decode(self._window)) - (len(text) - settled)
        return new

    def flush(self) -> str:
        """The text still held back; the next push starts a new text."""
        rest = self._text.decode(self._window + self._byte_run)[self._emitted :]
        self._window, self._byte_run, self._emitted = [], [], 0
        return rest


class StopStrings:
    """Cuts a text before the first stop string to be completed, the same however the text is split.

    Where two are completed by the same character, the longer one counts.

    Raises:
        GenerationError: when a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise GenerationError("stop: a stop string is empty; give it a character or leave it out.")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can no longer be part of a stop string, and whether one was completed.

        After a hit the rest of the text is dropped, and the next push starts anew.
        """
        held = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if found:
            self._held = ""
            return held[: min(found)[1]], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """The text still held back, when no more is coming."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """Turns accepted tokens into text to show, and says after which token a stop string was completed."""

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(text)
        self._stops = StopStrings(stops)
        self._token_by_token = bool(stops)

    def push(self, ids: Sequence[int]) -> tuple[str, int | None]:
        """Take the tokens of one round.

        Returns:
            The text to show, cut before a stop string; and how many of `ids` belong to the answer when a stop
            string was completed, counting the token that completed it, else None.
        """
        if not self._token_by_token:
            return self._detokenizer.push(ids), None
        shown = ""
        for count, token in enumerate(ids, 1):
            piece, hit = self._stops.push(self._detokenizer.push([token]))
            shown += piece
            if hit:
                return shown, count
        return shown, None

    def finish(self) -> tuple[str, bool]:
        """The text still held back, at the end of the answer; and whether it completed a stop string."""
        piece, hit = self._stops.push(self._detokenizer.flush())
        return (piece, True) if hit else (piece + self._stops.flush(), False)
