"""Which tools a chat may or has to call; a call that has to come is a form of the answer."""

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
        UsageError: a choice without tools, or of none of them; promises about calls that are free to come.
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
    if forced_form(body) is None:
        _check_free_calls(body, body.tools)


def offered_tools(body: ChatCompletionRequest) -> list[Tool] | None:
    """The tools that the model is told of."""
    return None if body.tool_choice == "none" else body.tools


def forced_form(body: ChatCompletionRequest) -> StructuredOutput | None:
    """The form of an answer that has to be a call; None where text may come as well.

    It is a call as the model writes one by itself, with arguments that the tool's schema allows.
    """
    functions = [tool.function for tool in body.tools or ()]
    match body.tool_choice:
        case NamedTool(function=chosen):
            functions = [function for function in functions if function.name == chosen.name]
            return StructuredOutput(grammar=_grammar(functions, has_several=False))
        case "required":
            has_several = body.parallel_tool_calls is not False
            return StructuredOutput(grammar=_grammar(functions, has_several=has_several))
    return None


def _check_free_calls(body: ChatCompletionRequest, tools: list[Tool]) -> None:
    """A call that may come or not is the model's own text, whose arguments and number nothing holds."""
    hint = 'leave it out, or set tool_choice to "required" or to a function'
    if body.parallel_tool_calls is False:
        raise UsageError(
            "parallel_tool_calls cannot be false where calls are free to come",
            hint=hint,
            param="parallel_tool_calls",
        )
    for place, tool in enumerate(tools):
        if tool.function.strict:
            raise UsageError(
                "a tool cannot be strict where calls are free to come",
                hint=hint,
                param=f"tools[{place}].function.strict",
            )


def _grammar(functions: list[Function], *, has_several: bool) -> str:
    """Calls of `functions` in llguidance's dialect of Lark; each has its schema as a document of its own."""
    names = [f"call_{number}" for number in range(len(functions))]
    after = f"}}\n{CLOSE}"
    rules = [
        f"start: call{' (_between call)*' if has_several else ''}",
        f"call: {' | '.join(names)}",
        '_between: "\\n"',
    ]
    for name, function in zip(names, functions, strict=True):
        schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
        before = f'{OPEN}\n{{"name": {json.dumps(function.name)}, "arguments": '
        document = json.dumps({"type": "object", **schema, "x-guidance": _SPACES})
        rules.append(f"{name}: {json.dumps(before)} %json {document} {json.dumps(after)}")
    return "\n".join(rules)
