"""What requests may say. Whatever is not written here is refused by its name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.errors import UsageError
from tessera_cli.serving.shared_fields import SHARED_FIELDS


class Body(BaseModel):
    """A part of a request: nothing unknown, and no text where a number belongs."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """`include_usage` asks for one more event, with the token counts; nothing here is ever padded."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class ClientFields(Body):
    """What every request may say; null is the same as leaving a field out.

    `priority` and `cache_salt` are those of `Engine.add_request`. `user` and its newer name
    `safety_identifier` join the access log. The rest is about OpenAI's own machines: clients send it unasked,
    and it has no effect.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    user: str | None = None
    safety_identifier: str | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None


class SamplingFields(ClientFields):
    """What completions and chats have in common.

    The second half is not OpenAI's and goes by vLLM's names.
    """

    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """The fields as the engine takes them; `others` are those that the routes name differently.

        Raises:
            UsageError: a value that means nothing.
        """
        if self.stream_options is not None and not self.stream:
            raise UsageError("stream_options is for streams, and stream is not set", param="stream_options")
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("temperature", *SHARED_FIELDS)}
        fields["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        fields["stop_token_ids"] = self.stop_token_ids
        fields["logit_bias"] = None if self.logit_bias is None else _token_biases(self.logit_bias)
        fields |= others
        return SamplingParams(**{name: value for name, value in fields.items() if value is not None})

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)]
    )
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Literal[1] | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """The engine's parameters that have another name here."""
        return {"prompt_logprobs": "logprobs"}


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One turn; only an assistant's turn that calls tools may be without content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """`strict` may say anything: the schema is always kept to."""

    name: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatCompletionRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """The engine's parameters that have another name here."""
        names = {"prompt": "messages", "logprobs": "top_logprobs", "grammar": "tools"}
        names |= dict.fromkeys(("json_schema", "json_object", "structured_output"), "response_format")
        return names | ({} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"})

    @property
    def response_form(self) -> StructuredOutput | None:
        """The form that `response_format` asks for, None for any text."""
        match self.response_format:
            case JsonSchemaFormat(json_schema=JsonSchema(schema_=schema)):
                return StructuredOutput(json_schema={} if schema is None else schema)
            case TextFormat(type="json_object"):
                return StructuredOutput(json_object=True)
        return None


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or a chat as the template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    """JSON has texts as keys, and these are token ids."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise UsageError(f"logit_bias has {key[:40]!r} in place of a token id", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}
