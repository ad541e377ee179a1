"""The schema in words: what a key expects, and which key a wrong one was meant to be."""

import difflib
import json
from functools import cache
from typing import Any

from tessera_cli.recipe.document import KeyPath, dotted
from tessera_cli.recipe.schema import Recipe

# What other distillation and fine-tuning tools call the same thing.
OTHER_NAMES = {
    "lr": "train.learning_rate",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "local_batch_size": "train.micro_batch_size",
    "grad_accum_steps": "train.gradient_accumulation_steps",
    "gradient_accumulation": "train.gradient_accumulation_steps",
    "grad_accum": "train.gradient_accumulation_steps",
    "epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "total_tokens": "train.max_tokens",
    "num_tokens": "train.max_tokens",
    "lr_scheduler_type": "train.lr_scheduler",
    "scheduler": "train.lr_scheduler",
    "warmup_steps": "train.warmup_ratio",
    "grad_clip": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
    "precision": "train.dtype",
    "max_length": "data.max_seq_len",
    "max_seq_length": "data.max_seq_len",
    "sequence_len": "data.max_seq_len",
    "sequence_length": "data.max_seq_len",
    "seq_len": "data.max_seq_len",
    "cutoff_len": "data.max_seq_len",
    "sample_packing": "data.packing",
    "packed": "data.packing",
    "packed_sequence": "data.packing",
    "completion_only_loss": "data.train_on",
    "assistant_only_loss": "data.train_on",
    "train_on_inputs": "data.train_on",
    "train_on_input": "data.train_on",
    "train_on_prompt": "data.train_on",
    "mask_history": "data.train_on",
    "datasets": "data.train",
    "train_files": "data.train",
    "lmbda": "data.on_policy",
    "buffer_size": "data.shuffle_buffer",
    "shuffle_buffer_size": "data.shuffle_buffer",
    "test_datasets": "data.eval",
    "validation": "data.eval",
    "kd_alpha": "loss.kd_weight",
    "kd_ratio": "loss.kd_weight",
    "alpha": "loss.kd_weight",
    "kd_ce_alpha": "loss.ce_weight",
    "sft_alpha": "loss.ce_weight",
    "beta": "loss.mixture_weight",
    "kd_temperature": "loss.temperature",
    "loss_type": "loss.kind",
    "teacher_model": "teacher.model",
    "teacher_model_name_or_path": "teacher.model",
    "model_name_or_path": "teacher.model",
    "base_model": "teacher.model",
    "num_layers": "student.num_hidden_layers",
    "n_layers": "student.num_hidden_layers",
    "n_layer": "student.num_hidden_layers",
    "torch_dtype": "teacher.dtype",
    "eval_steps": "eval.every",
    "eval_interval": "eval.every",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
}


def suggest(path: KeyPath) -> str:
    """Say what is wrong with the unknown key at `path`, and what was meant where that can be told."""
    section, key = _pattern(path[:-1]), str(path[-1]).replace("-", "_")
    prefix = f"{section}." if section else ""
    siblings = [name[len(prefix) :] for name in key_schemas() if name.startswith(prefix)]
    siblings = [name for name in siblings if "." not in name]
    unknown = "unknown key" if section else "unknown key at top level"
    if key in siblings:
        return f"{unknown}, did you mean `{key}`?"
    elsewhere = [name for name in key_schemas() if name.rpartition(".")[2] == key and "*" not in name]
    target = OTHER_NAMES.get(key) or (elsewhere[0] if len(elsewhere) == 1 else None)
    if target is None and (close := difflib.get_close_matches(key, siblings, n=1)):
        target = prefix + close[0]
    if target is None and len(elsewhere) > 1:
        return f"{unknown}, did you mean {' or '.join(f'`{name}`' for name in elsewhere)}?"
    if target is None:
        everywhere = {name.rpartition(".")[2]: name for name in key_schemas() if "*" not in name}
        close = difflib.get_close_matches(key, everywhere, n=1, cutoff=0.75)
        target = everywhere[close[0]] if close else None
    if target is None:
        return unknown
    home, _, name = target.rpartition(".")
    if home == section:
        return f"{unknown}, did you mean `{name}`?"
    return f"belongs to section `{home}` ({target})" if home else f"{unknown}, did you mean `{name}`?"


def expectation(path: KeyPath) -> str:
    """What the schema expects at `path`, such as ``an integer ≥ 1``."""
    if path and isinstance(path[-1], int):
        return _describe(key_schemas().get(_pattern(path[:-1]), {}).get("items", {}))
    return _describe(key_schemas().get(_pattern(path), {}))


def show(value: Any) -> str:
    """A value as it would be written in YAML's flow style, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


@cache
def key_schemas() -> dict[str, dict[str, Any]]:
    """The JSON schema of every key, by dotted path; ``*`` stands for a place in a list."""
    schema = Recipe.model_json_schema()
    found: dict[str, dict[str, Any]] = {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for name, child in node.get("properties", {}).items():
            child = _resolve(child, schema["$defs"])
            found[prefix + name] = child
            walk(child, f"{prefix}{name}.")
            walk(_resolve(child.get("items", {}), schema["$defs"]), f"{prefix}{name}.*.")

    walk(schema, "")
    return found


def _resolve(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    sections = [option for option in node.get("anyOf", ()) if "$ref" in option]
    # A section that may be left out is a section or null.
    reference = (sections[0] if len(sections) == 1 else node).get("$ref")
    return definitions[reference.rpartition("/")[2]] if reference else node


def _pattern(path: KeyPath) -> str:
    return dotted(tuple("*" if isinstance(part, int) else part for part in path))


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "a section",
}


def _describe(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe(option) for option in schema["anyOf"])
    if "const" in schema:
        return show(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(show(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return "a non-empty list" if schema.get("minItems") else "a list"
    if "pattern" in schema:
        return "letters, digits, dots, dashes and underscores"
    if schema.get("minLength"):
        return "non-empty text"
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES.get(schema.get("type", ""), "a section"), " and ".join(bounds)]).strip()
