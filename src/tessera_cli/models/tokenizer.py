"""Text to token ids and back, chat templates included; `tokenizers` and jinja2, no torch.

`transformers` would do the same and cost two seconds at every start, since it loads torch. The tests hold
this file to its results.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from tessera_cli.errors import DataError, ModelError

Message = Mapping[str, Any]

# What makes a directory's tokenizer, copied as it is to a student trained with it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class TokenStream:
    """Text of a growing list of token ids, never half a character.

    The pieces of `step`, and `finish` after the last, make up exactly `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._text = ""

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id) or ""
        self._text += piece
        return piece

    def finish(self) -> str:
        """What `decode` shows beyond the pieces so far: the marks of a character that never became whole."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""


class Tokenizer:
    """A model's tokenizer and chat template.

    Attributes:
        vocab_size: ids that the tokenizer knows, added tokens included.
        chat_template: the Jinja source, or None for a base model.
        path: the directory that it was read from.
    """

    def __init__(
        self, fast: FastTokenizer, settings: dict[str, Any], chat_template: str | None, path: Path
    ) -> None:
        self._fast = fast
        self.path = path
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self._special = {
            name: _content(settings[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if settings.get(name)
        }
        self.bos_token_id = self._id("bos_token")
        self.pad_token_id = self._id("pad_token")
        eos = self._id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)

    @classmethod
    def from_dir(cls, path: Path) -> "Tokenizer":
        """Read `path/tokenizer.json` and what stands beside it.

        Raises:
            ModelError: no tokenizer.json, or a file that cannot be read as what it should be.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json",
                hint="save the model's fast tokenizer there with transformers' `save_pretrained`",
            )
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception for every fault of the file
            raise ModelError(f"{file} cannot be read: {error}") from error
        # Truncation and padding that were saved with it belong to another program's batches.
        fast.no_truncation()
        fast.no_padding()
        file = path / "tokenizer_config.json"
        try:
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            return cls(fast, settings, _chat_template(path, settings), path)
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:  # odd
            raise ModelError(f"{file} cannot be read: {type(error).__name__}: {error}") from error

    @cached_property
    def num_ids(self) -> int:
        """The vocabulary rows that a model needs for every id: more than `vocab_size` where ids have gaps."""
        return 1 + max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with whatever the tokenizer puts around it (BOS) unless told not to."""
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel where the process allows it."""
        return [e.ids for e in self._fast.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that make no character become U+FFFD."""
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self) -> TokenStream:
        """A new incremental decoder."""
        return TokenStream(self._fast)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text that the chat template makes of `messages` (each with `role` and `content`).

        `tools` are function definitions as OpenAI has them; a template may leave them unmentioned.

        Raises:
            ModelError: the model has no chat template, or it is broken.
            DataError: the template refuses these messages.
        """
        template = self._template
        try:
            return template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **self._special,
            )
        except _TemplateRefusal as error:
            raise DataError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # it is a program, and can fail in any way that one can
            raise ModelError(f"the chat template of {self.path} fails: {error}") from error

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of `render_chat`; the template writes BOS itself, so none is added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def fingerprint(self) -> str:
        """SHA-256 over all that decides ids: vocabulary, merges, added tokens, normaliser, pre-tokeniser."""
        state = json.loads(self._fast.to_str())
        decides = {
            k: state[k] for k in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Copy the tokenizer's files to the existing directory `path`, byte for byte."""
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, path / name)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise ModelError(
                f"{self.path} has no chat template", hint="give plain prompts (`--raw`, format `text`)"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {self.path} is broken: {error}") from error

    def _id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._fast.token_to_id(token)


class _TemplateRefusal(jinja2.TemplateError):
    """A chat template called `raise_exception`."""


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates; the plain one is called `default`
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str | None):
        raise TypeError("`chat_template` is not text")
    return template
