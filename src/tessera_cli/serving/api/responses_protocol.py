"""What `POST /v1/responses` may say."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.serving.api.protocol import (
    Body,
    ChatMessage,
    ClientFields,
    JsonSchema,
    StreamOptions,
    TextFormat,
    TextPart,
)

Nothing = Annotated[list[Any], Field(max_length=0)]


class InputPart(Body):
    """A piece of text; an answer that is sent back has `annotations` and `logprobs`, which say nothing."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Body):
    """One turn, as the user writes it or as an earlier answer had it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: str | None = None


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(Body):
    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesRequest(ClientFields):
    """Text in, text out; the second half is what clients send although they want nothing of it."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None

    stream_options: StreamOptions | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    include: Nothing | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """The engine's parameters that have another name here."""
        names = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
        return names | dict.fromkeys(("json_schema", "json_object", "structured_output"), "text")

    def messages(self) -> list[ChatMessage]:
        """The same as the messages of a chat."""
        messages = []
        if self.instructions is not None:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        for one in self.input:
            content: Any = one.content
            if isinstance(content, list):
                content = [TextPart(type="text", text=part.text) for part in content]
            messages.append(ChatMessage(role=one.role, content=content))
        return messages

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """What it says of sampling.

        Raises:
            UsageError: a value that means nothing.
        """
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            structured_output=self._form(),
        )

    def _form(self) -> StructuredOutput | None:
        match self.text and self.text.format:
            case SchemaFormat(schema_=schema):
                return StructuredOutput(json_schema={} if schema is None else schema)
            case TextFormat(type="json_object"):
                return StructuredOutput(json_object=True)
        return None
