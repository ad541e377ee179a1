"""What a recipe says of the documents."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from tessera_cli.recipe.sampling_section import OnPolicySection, SamplingSection
from tessera_cli.recipe.section import Number, PositiveInt, Section, Text, problem

DataFormat = Literal["text", "messages", "prompt_completion", "prompts"]

# The columns of each format; `tools` is read where a file has it.
COLUMNS: dict[DataFormat, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "prompts": ("prompt",),
}
TOOLS = "tools"

DEFAULT_SHUFFLE_BUFFER = 1000


class DataSource(Section):
    """One file of documents, or one split of a dataset."""

    path: Text | None = None
    """A .jsonl, .parquet or .txt file; relative to the recipe, or to the working directory when given on the
    command line. Exactly one of path and dataset is set."""
    dataset: Text | None = None
    """A dataset on the Hugging Face hub, OWNER/NAME, or a directory that `datasets` can load."""
    name: Text | None = None
    """The dataset's configuration, where it has several."""
    split: Text | None = None
    """The dataset's split (train); unless it is streamed, also a part of one, such as train[:1000]."""
    revision: Text | None = None
    """The dataset's branch, tag or commit; null is the newest."""
    format: DataFormat
    """What a document looks like; prompts are answered by the teacher, or by the student as it trains."""
    columns: dict[Text, Text] = Field(default_factory=dict)
    """What the file calls a column of the format, where it has another name: {prompt: instruction}."""
    sample_by: Literal["line", "paragraph", "document"] | None = None
    """What of a .txt file is a document: a line (the default), what stands between blank lines, or all."""
    written_by: Literal["teacher"] | None = None
    """Who answers the prompts of `format: prompts`, once, before training."""
    sampling: SamplingSection | None = None
    """How the answers are drawn."""

    @field_validator("name", "split", "revision")
    @classmethod
    def _of_a_dataset(cls, value: str | None, info: ValidationInfo) -> str | None:
        is_dataset = info.data.get("dataset") is not None
        if value is not None and not is_dataset:
            raise problem("only `dataset` has it; a file is read whole")
        return "train" if value is None and is_dataset and info.field_name == "split" else value

    @field_validator("columns")
    @classmethod
    def _columns(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        data_format = info.data.get("format")
        if data_format is None:
            return value
        known = (*COLUMNS[data_format], *(() if data_format == "text" else (TOOLS,)))
        for column in value:
            if column not in known:
                raise problem(
                    f"format {data_format} has no column {column!r}, only {', '.join(known)}; "
                    "write OURS: THE_FILE'S"
                )
        return value

    @field_validator("sample_by")
    @classmethod
    def _sample_by(cls, value: str | None, info: ValidationInfo) -> str | None:
        is_text = str(info.data.get("path") or "").endswith(".txt")
        if value is not None and not is_text:
            raise problem("only a .txt file can be cut")
        return "line" if value is None and is_text else value

    @field_validator("written_by")
    @classmethod
    def _written_by(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("format") not in (None, "prompts"):
            raise problem("only `format: prompts` leaves something to write")
        return value

    @field_validator("sampling")
    @classmethod
    def _sampling(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("written_by") is not None:
            return SamplingSection() if value is None else value
        if value is not None and "written_by" in info.data:
            raise problem("only `written_by: teacher` draws anything")
        return None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise problem("expected exactly one of path, dataset")
        return self

    @property
    def place(self) -> str:
        """Where the documents come from, as errors name it."""
        if self.dataset is None:
            return str(self.path)
        return f"{self.dataset}{f' {self.name}' if self.name else ''} ({self.split})"


class DataSection(Section):
    """The documents to train on and the held-out ones to measure on."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Files and datasets to train on."""
    eval: Annotated[list[DataSource], Field(min_length=1)]
    """Held-out files and datasets."""
    max_seq_len: Annotated[int, Field(ge=2), Number] = 1024
    """Tokens in a row; a longer document is skipped and counted."""
    packing: StrictBool = True
    """Whether a row holds as many whole documents as fit, or one."""
    train_on: Literal["completion", "all"] = "completion"
    """Which tokens carry the loss: those of the answers, or all."""
    streaming: StrictBool = False
    """Whether documents to train on are read as they are needed, and never all in memory or on disk."""
    shuffle_buffer: PositiveInt | None = None
    """Documents among which a streamed run draws the next one (1000)."""
    on_policy: OnPolicySection | None = None
    """What the student answers itself while it trains."""

    @field_validator("eval")
    @classmethod
    def _answered(cls, value: list[DataSource]) -> list[DataSource]:
        if any(source.format == "prompts" and source.written_by is None for source in value):
            raise problem("`format: prompts` needs `written_by: teacher`: there is nothing to measure on")
        return value

    @field_validator("streaming")
    @classmethod
    def _streaming(cls, value: bool, info: ValidationInfo) -> bool:
        if value and any(source.written_by is not None for source in info.data.get("train", ())):
            raise problem("what the teacher writes is written before training, all of it")
        return value

    @field_validator("shuffle_buffer")
    @classmethod
    def _shuffle_buffer(cls, value: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("streaming"):
            return DEFAULT_SHUFFLE_BUFFER if value is None else value
        if value is not None:
            raise problem("only `streaming: true` has one; all documents are shuffled otherwise")
        return None

    @field_validator("on_policy")
    @classmethod
    def _on_policy(cls, value: OnPolicySection | None, info: ValidationInfo) -> OnPolicySection | None:
        unanswered = [s for s in info.data.get("train", ()) if s.format == "prompts" and s.written_by is None]
        if unanswered and (value is None or value.fraction < 1):
            raise problem(
                f"nobody answers the prompts of {unanswered[0].place}: give them `written_by: teacher`, "
                "or set `on_policy.fraction` to 1"
            )
        if value is not None and info.data.get("train_on") == "all":
            raise problem("the student answers prompts, and with `train_on: all` there are none")
        max_seq_len = info.data.get("max_seq_len")
        if value is not None and max_seq_len is not None and value.max_tokens >= max_seq_len:
            raise problem(
                f"max_tokens {value.max_tokens} of an answer leave no room for its prompt in max_seq_len "
                f"{max_seq_len}"
            )
        return value
