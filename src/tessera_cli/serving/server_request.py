"""A request as OpenAI's routes take it, with vLLM's names for what OpenAI does not have."""

import json
from dataclasses import dataclass, fields
from typing import Any, cast

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import UsageError
from tessera_cli.serving.shared_fields import SHARED_FIELDS

Messages = list[dict[str, str]]

_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}


@dataclass(frozen=True)
class ServerRequest:
    """A prompt as token ids, as text or as messages, and how to answer it."""

    prompt: list[int] | str | Messages
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None

    @property
    def messages(self) -> Messages | None:
        """The prompt as a conversation; None where it is none."""
        is_chat = isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], dict)
        return cast(Messages, self.prompt) if is_chat else None

    @property
    def token_ids(self) -> list[int]:
        """The prompt as token ids, which it has to be."""
        assert isinstance(self.prompt, list)
        assert self.messages is None
        return cast(list[int], self.prompt)

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def route(self) -> str:
        return "/chat/completions" if self.is_chat else "/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON that is sent; what has its default is left out, so that plain servers understand it.

        Raises:
            UsageError: something is asked for that the route has no field for.
        """
        params = self.params
        fields: dict[str, Any] = {
            "model": model,
            "messages" if self.is_chat else "prompt": self.prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }
        fields |= {
            name: getattr(params, name) for name in SHARED_FIELDS if getattr(params, name) != _DEFAULTS[name]
        }
        if params.stop:
            fields["stop"] = list(params.stop)
        if params.stop_token_ids:
            fields["stop_token_ids"] = list(params.stop_token_ids)
        if params.logit_bias:
            fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": params.logprobs}
            fields |= chat if self.is_chat else {"logprobs": params.logprobs}
        if self.priority:
            fields["priority"] = self.priority
        if self.cache_salt is not None:
            fields["cache_salt"] = self.cache_salt
        return fields | self._form()

    def _form(self) -> dict[str, Any]:
        form = self.params.structured_output
        if self.params.prompt_logprobs is not None:
            raise UsageError("prompt_logprobs cannot be asked of a server", hint="leave --base-url out")
        if form is None:
            return {}
        if form.json_schema is None or not self.is_chat:
            raise UsageError(
                "of a server only a chat's answer can have a form, and only that of a JSON schema",
                hint="use --json-schema with --chat, or leave --base-url out",
            )
        schema = {"name": "answer", "schema": json.loads(str(form.json_schema)), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
