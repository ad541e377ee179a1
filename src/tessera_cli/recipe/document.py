"""YAML 1.2 text to plain values, with the line of every key; no aliases, no duplicate keys."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

# The YAML 1.2 core schema: `1e-4` is a number, `on` and `yes` are text. Underscores between digits are ours.
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_CORE_SCHEMA = (
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(rf"({_INT.pattern})$"), list("-+0123456789")),
    ("tag:yaml.org,2002:float", re.compile(rf"({_FLOAT.pattern})$"), list("-+.0123456789")),
)


@dataclass(frozen=True)
class Problem:
    """One fault: `where` is "line 3" or "override", `key` a dotted path or "", `text` what is wrong."""

    where: str
    key: str
    text: str


@dataclass
class Document:
    """The values of a file, the 1-based line of each key path, and the faults found on the way."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would not read back as the same text."""


_PLAIN = (None, "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str")
_Loader.yaml_constructors = {tag: _Loader.yaml_constructors[tag] for tag in _PLAIN}
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:] if base != 10 else text, base)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_document(text: str) -> Document:
    """Read one YAML document.

    A syntax error becomes the document's only problem; duplicate keys are all told.
    """
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            document.value = _construct(loader, node, (), document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}" if mark else "file"
        document.problems = [Problem(where, "", f"not YAML: {error.problem}")]
    except RecursionError:
        document.problems = [Problem("file", "", "not YAML: nested too deeply")]
    except (yaml.YAMLError, ValueError) as error:
        document.problems = [Problem("file", "", f"not YAML: {str(error).splitlines()[0]}")]
    finally:
        if loader is not None:
            loader.dispose()
    return document


def _construct(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, i), document) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _construct_scalar(loader, node)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"line {key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append(Problem(where, dotted(path), "a key must be text"))
            continue
        key = key_node.value
        if key in mapping:
            first = document.lines[(*path, key)]
            document.problems.append(
                Problem(where, dotted((*path, key)), f"given twice, first on line {first}")
            )
            continue
        document.lines[(*path, key)] = key_node.start_mark.line + 1
        mapping[key] = _construct(loader, value_node, (*path, key), document)
    return mapping


def _construct_scalar(loader: _Loader, node: yaml.Node) -> Any:
    try:
        return loader.construct_object(node)
    except (ValueError, KeyError):  # `!!bool x`, or thousands of digits
        problem = f"{node.value[:20]!r} is no {node.tag.rpartition(':')[2]}"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def parse_value(text: str) -> Document:
    """Read the value of a `key=value`: a flow list or mapping, a quoted text, or else one plain scalar."""
    if text.startswith(("[", "{", '"', "'")):
        return parse_document(text)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    try:
        return Document(value=_construct_scalar(loader, yaml.ScalarNode(tag, text)))
    except yaml.MarkedYAMLError as error:
        return Document(problems=[Problem("override", "", f"not YAML: {error.problem}")])


def dump_document(value: Any) -> str:
    """Write `value` as YAML that `parse_document` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)


def dotted(path: KeyPath) -> str:
    """``("data", "train", 0)`` as ``data.train.0``."""
    return ".".join(str(part) for part in path)
