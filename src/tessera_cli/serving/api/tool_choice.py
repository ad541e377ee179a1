"""Which tools a chat may or has to call; what is promised of the calls is a form of the answer."""

import json

from tessera_cli.engine.sampling_params import StructuredOutput
from tessera_cli.errors import UsageError
from tessera_cli.serving.api.protocol import ChatCompletionRequest, Function, NamedTool, Tool
from tessera_cli.serving.api.tool_calls import CLOSE, OPEN

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# As `json.dumps` writes, and as the models learned it.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_tools(body: ChatCompletionRequest) -> None:
    """Refuse what cannot be kept to.

    Raises:
        UsageError: a choice without tools, or of none of them; tools that no call can tell apart; calls in an
            answer that has a form already.
    """
    if body.tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise UsageError(f"{name} is set, and there are no tools", param=name)
        return
    if body.tool_choice == "none":
        return
    if body.response_form is not None:
        raise UsageError("an answer with a response_format cannot call tools", param="response_format")
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise UsageError("two tools have the same name", param="tools")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise UsageError(
            f"tool_choice wants {body.tool_choice.function.name!r}, which is none of the tools",
            hint=f"the tools are {', '.join(names)}",
            param="tool_choice.function.name",
        )


def offered_tools(body: ChatCompletionRequest) -> list[Tool] | None:
    """The tools that the model is told of."""
    return None if body.tool_choice == "none" else body.tools


def form_of_calls(body: ChatCompletionRequest) -> StructuredOutput | None:
    """The form of an answer whose calls are promised something; None where they are the model's own affair.

    A call is as the model writes one by itself, with arguments that the schema allows: that of every tool
    where a call has to come, and of strict ones where text may come as well.
    """
    functions = [tool.function for tool in body.tools or ()]
    is_single = body.parallel_tool_calls is False
    match body.tool_choice:
        case "none":
            return None
        case NamedTool(function=chosen):
            start = f'"{OPEN}" rest_of_call'
            functions = [function for function in functions if function.name == chosen.name]
        case "required":
            start = f'"{OPEN}" rest_of_call' + ("" if is_single else f' ("\\n{OPEN}" rest_of_call)*')
        case _:
            if not (is_single or any(function.strict for function in functions)):
                return None
            start = f"(until_call rest_of_call){'?' if is_single else '*'} text?"
            functions = [
                function
                if function.strict
                else function.model_copy(update={"parameters": {"type": "object"}})
                for function in functions
            ]
    return StructuredOutput(grammar=_grammar(start, functions))


def _grammar(start: str, functions: list[Function]) -> str:
    """Calls in llguidance's dialect of Lark; the schema of each function is a document of its own."""
    names = [f"call_{number}" for number in range(len(functions))]
    rules = [
        f"start: {start}",
        f"until_call[lazy]: /(.|\\n)*{OPEN}/",
        "text: TEXT",
        f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{OPEN}(.|\\n)*/",
        f"rest_of_call: {' | '.join(names)}",
    ]
    after = json.dumps(f"}}\n{CLOSE}")
    for name, function in zip(names, functions, strict=True):
        schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
        before = json.dumps(f'\n{{"name": {json.dumps(function.name)}, "arguments": ')
        document = json.dumps({"type": "object", **schema, "x-guidance": _SPACES})
        rules.append(f"{name}: {before} %json {document} {after}")
    return "\n".join(rules)
