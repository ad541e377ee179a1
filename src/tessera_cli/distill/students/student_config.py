"""What the recipe's student is, known from configurations alone; no torch."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from tessera_cli.distill.students.layer_choice import check_depth, even_layers, listed_layers
from tessera_cli.errors import ModelError, UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.source import Notify, resolve_model
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.student_section import StudentSection


@dataclass(frozen=True, eq=False)
class StudentShape:
    """A student without its weights.

    Attributes:
        config: its sizes; where importance decides the layers, with the windows and rotations of even ones.
        layers: the teacher's layers that it starts with, () for none, None where importance decides.
        path: the model whose weights it starts with, None for the teacher's or random ones.
        num_stored_rows: vocabulary rows of that model where both it and the teacher are cut to those of
            `config`, which are the tokenizer's; None where nothing is cut.
    """

    config: ModelConfig
    layers: tuple[int, ...] | None
    path: Path | None = None
    num_stored_rows: int | None = None

    def fingerprints(self) -> dict[str, str]:
        """The hash of what it starts with, where that is none of the teacher's."""
        if self.path is not None:
            return {"student": fingerprint_model(self.path)}
        return (
            {} if self.layers != () else {"student": hashlib.sha256(repr(self.config).encode()).hexdigest()}
        )


def fingerprint_model(path: Path) -> str:
    """SHA-256 over the configuration and the weight files of a model directory."""
    digest = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def student_shape(
    section: StudentSection,
    teacher: ModelConfig,
    tokenizer: Tokenizer,
    *,
    home: Path,
    offline: bool,
    notify: Notify | None = None,
) -> StudentShape:
    """The student that `section` asks for.

    Raises:
        ModelError: a student's model that is not there, not native, or of another tokenizer.
        UsageError: sizes or layers that this teacher does not have.
    """
    if section.init == "config":
        base = teacher
        if section.model is not None:
            base = ModelConfig.unquantised(resolve_model(section.model, home=home, offline=offline))
        return StudentShape(_resized(base, teacher, section), ())
    if section.init == "checkpoint" and section.model is not None:
        path = resolve_model(section.model, home=home, offline=offline, notify=notify)
        config = ModelConfig.unquantised(path)
        num_rows = common_rows(path, config, teacher, tokenizer)
        num_stored = None if num_rows == config.vocab_size == teacher.vocab_size else config.vocab_size
        return StudentShape(replace(config, vocab_size=num_rows), (), path, num_stored)
    layers = _layers(section, teacher.num_hidden_layers)
    shown = (
        even_layers(teacher.num_hidden_layers, student_depth(section, teacher)) if layers is None else layers
    )
    config = teacher.with_layers(shown)
    return StudentShape(_narrowed(config, section) if section.init == "width" else config, layers)


def student_depth(section: StudentSection, teacher: ModelConfig) -> int:
    """How many of the teacher's layers a student that is cut from it has."""
    if isinstance(section.layers, list):
        return len(section.layers)
    return teacher.num_hidden_layers if section.num_hidden_layers is None else section.num_hidden_layers


def _layers(section: StudentSection, num_teacher_layers: int) -> tuple[int, ...] | None:
    if isinstance(section.layers, list):
        return tuple(listed_layers(num_teacher_layers, section.layers))
    if section.num_hidden_layers is None:
        return tuple(range(num_teacher_layers))
    if section.layers == "even":
        return tuple(even_layers(num_teacher_layers, section.num_hidden_layers))
    check_depth(num_teacher_layers, section.num_hidden_layers)
    return None


def _narrowed(config: ModelConfig, section: StudentSection) -> ModelConfig:
    """`config` with the widths of `section`; whole groups of query heads where only one count is given."""
    group = config.num_attention_heads // config.num_key_value_heads
    heads, kv_heads = section.num_attention_heads, section.num_key_value_heads
    if heads is not None and kv_heads is None:
        if heads % group:
            raise UsageError(
                f"student.num_attention_heads is {heads}, but {group} query heads of the teacher share a"
                " key-value head",
                hint=f"choose a multiple of {group}, or give student.num_key_value_heads as well",
            )
        kv_heads = heads // group
    kv_heads = config.num_key_value_heads if kv_heads is None else kv_heads
    narrowed = replace(
        config,
        hidden_size=section.hidden_size or config.hidden_size,
        intermediate_size=section.intermediate_size or config.intermediate_size,
        num_attention_heads=kv_heads * group if heads is None else heads,
        num_key_value_heads=kv_heads,
    )
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "num_attention_heads"):
        wanted, there = getattr(narrowed, name), getattr(config, name)
        if wanted > there:
            raise UsageError(
                f"student.{name} is {wanted}, but the teacher has {there}", hint=f"choose at most {there}"
            )
    heads = narrowed.num_attention_heads
    if heads % kv_heads or heads // kv_heads > group:
        raise UsageError(
            f"{heads} query heads cannot be cut from {kv_heads} key-value heads of {group} query heads each",
            hint=f"choose a multiple of {kv_heads} up to {kv_heads * group}",
        )
    return narrowed


def _resized(base: ModelConfig, teacher: ModelConfig, section: StudentSection) -> ModelConfig:
    """`base` with the sizes of `section`, and the teacher's tokens.

    A head keeps its size; the query heads of one key-value head stay as many where only one count is given.
    """
    group = base.num_attention_heads // base.num_key_value_heads
    heads, kv_heads = section.num_attention_heads, section.num_key_value_heads
    if heads is None:
        heads = base.num_attention_heads if kv_heads is None else kv_heads * group
    if kv_heads is None and heads % group == 0:
        kv_heads = heads // group
    if kv_heads is None or heads % kv_heads:
        raise UsageError(
            f"{heads} query heads do not divide into key-value heads of {group} query heads each",
            hint="give both student.num_attention_heads and student.num_key_value_heads",
        )
    return replace(
        _of_depth(base, section.num_hidden_layers or base.num_hidden_layers),
        hidden_size=section.hidden_size or base.hidden_size,
        intermediate_size=section.intermediate_size or base.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=teacher.vocab_size,
        bos_token_id=teacher.bos_token_id,
        eos_token_ids=teacher.eos_token_ids,
        pad_token_id=teacher.pad_token_id,
        dtype=teacher.dtype,
    )


def _of_depth(base: ModelConfig, depth: int) -> ModelConfig:
    if depth <= base.num_hidden_layers:
        return base.with_layers(even_layers(base.num_hidden_layers, depth))
    if base.layer_windows or base.layer_rotates:
        raise UsageError(
            f"student.num_hidden_layers is {depth}, but the {base.num_hidden_layers} layers of its config are"
            " not all alike",
            hint="write a config.json with that many layers and name its directory in `student.model`",
        )
    return replace(base, num_hidden_layers=depth)


def common_rows(path: Path, student: ModelConfig, teacher: ModelConfig, tokenizer: Tokenizer) -> int:
    """The vocabulary rows that the teacher and the student in `path` are compared in.

    All, where they have as many; else those of the ids of their one `tokenizer`: what is beyond is padding.

    Raises:
        ModelError: the tokenizers differ, or one of the two models has too few rows for them.
    """
    if Tokenizer.from_dir(path).fingerprint() != tokenizer.fingerprint():
        raise ModelError(
            f"the student {path} and the teacher {tokenizer.path} have different tokenizers",
            hint="the same ids would mean different text: distil between models of one tokenizer",
        )
    if min(student.vocab_size, teacher.vocab_size) < tokenizer.num_ids:
        raise ModelError(
            f"the student {path} has {student.vocab_size} vocabulary rows, its tokenizer {tokenizer.num_ids}"
            f" ids, and the teacher {tokenizer.path} has {teacher.vocab_size} rows",
            hint="add the missing rows with transformers' `resize_token_embeddings`",
        )
    return teacher.vocab_size if student.vocab_size == teacher.vocab_size else tokenizer.num_ids
