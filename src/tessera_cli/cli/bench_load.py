"""What `tessera bench` asks: the requests of one load, from a seed or from a file."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import typer

from tessera_cli.cli import options
from tessera_cli.cli.bench_dataset import (
    GENERATED,
    RANDOM_ONLY,
    check_fields,
    check_places,
    choose_dataset,
)
from tessera_cli.cli.bench_options import Dataset
from tessera_cli.cli.output import Output
from tessera_cli.cli.prompt_line import Prompt
from tessera_cli.cli.prompts import read_prompts
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import DataError, UsageError
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.sharegpt import Exchange, read_exchanges
from tessera_cli.serving.workload import (
    DEFAULT_CONCURRENCY,
    check_burstiness,
    check_range_ratio,
    check_rate,
    greedy,
    nano_requests,
    random_requests,
)

DEFAULT_LEN = 128
# Keeps the prompts of the warm-up apart from the measured ones, whatever their number.
WARMUP_SEED_OFFSET = 1 << 32
_NO_PARAMS = SamplingParams()


class Target(Protocol):
    """What a load has to know of who answers it; `max_model_len` is None where nobody can say."""

    vocab_size: int
    max_model_len: int | None
    takes_messages: bool

    def count_tokens(self, text: str) -> int: ...


@dataclass(frozen=True)
class Load:
    """What to ask; lengths count tokens, `request_rate` is per second. The names are those of the options."""

    preset: str | None
    dataset: Dataset
    num_prompts: int | None
    input_len: int | None
    prefix_len: int
    num_prefixes: int
    vocab_size: int | None
    long_input_len: int | None
    output_len: int | None
    range_ratio: float | None
    n: int
    temperature: float
    request_rate: float | None
    burstiness: float
    num_warmups: int | None
    repeat: int
    seed: int
    prompts: list[Prompt]
    exchanges: list[Exchange]

    @classmethod
    def from_options(cls, context: typer.Context, output: Output) -> "Load":
        """The load of a command line; its files are read here.

        Raises:
            UsageError: an option has no place in the data set, or a value means nothing.
            DataError: a file cannot be read as what it claims to be.
        """
        given = context.params
        prompt_file, path = given["prompt_file"], given["dataset_path"]
        dataset = choose_dataset(given["dataset"], prompt_file, path)
        check_places(context, dataset)
        if given["request_rate"] is not None:
            check_rate(given["request_rate"])
        elif not options.is_default(context, "burstiness"):
            raise UsageError("--burstiness is of arrivals", hint="give --request-rate")
        check_burstiness(given["burstiness"])
        check_range_ratio(given["range_ratio"] or 0.0)
        exchanges: list[Exchange] = []
        if dataset is Dataset.SHAREGPT:
            exchanges, num_others = read_exchanges(Path(path), seed=given["seed"])
            if num_others:
                output.note(f"note: {num_others:,} conversations begin without a question and its answer")
        return cls(
            **{one.name: given[one.name] for one in fields(cls) if one.name in given}
            | {"dataset": dataset, "preset": given["preset"] and str(given["preset"])},
            prompts=read_prompts([], prompt_file) if dataset is Dataset.PROMPTS else [],
            exchanges=exchanges,
        )

    def requests(self, target: Target, concurrency: int | None, output: Output) -> list[ServerRequest]:
        """The measured requests, as they are asked.

        Raises:
            UsageError: more are wanted than the file has, or `target` cannot tell how long answers are.
            DataError: a prompt cannot be put to `target`.
        """
        match self.dataset:
            case Dataset.PROMPTS:
                wanted = self.num_prompts or len(self.prompts)
                self._check_enough(wanted, len(self.prompts), "prompt file")
                return [self._of_prompt(target, one, i) for i, one in enumerate(self.prompts[:wanted])]
            case Dataset.SHAREGPT:
                return self._of_exchanges(target, self._count(concurrency), output)
            case _:
                return self._generated(target, self._count(concurrency), self.seed)

    def warmups(
        self, target: Target, requests: Sequence[ServerRequest], concurrency: int | None
    ) -> list[ServerRequest]:
        """As many as can be in flight at once, unless a number is given; they are of the same kind."""
        most = len(requests) if concurrency is None else min(concurrency, len(requests))
        wanted = most if self.num_warmups is None else self.num_warmups
        if self.dataset in GENERATED:
            return self._generated(target, wanted, self.seed + WARMUP_SEED_OFFSET)
        return [requests[index % len(requests)] for index in range(wanted)]

    def as_dict(self) -> dict[str, Any]:
        """The load under the names of the options; a length that means nothing to the data set is None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        del values["prompts"], values["exchanges"]
        if self.dataset is not Dataset.RANDOM:
            values |= dict.fromkeys(RANDOM_ONLY)
        else:
            values["range_ratio"] = self.range_ratio or 0.0
        if self.dataset in GENERATED:
            values["input_len"] = self.input_len or DEFAULT_LEN
        if self.dataset is not Dataset.SHAREGPT:
            values["output_len"] = self.output_len or DEFAULT_LEN
        return values

    def _count(self, concurrency: int | None) -> int:
        return self.num_prompts or 4 * (concurrency or DEFAULT_CONCURRENCY)

    def _check_enough(self, wanted: int, available: int, file: str) -> None:
        if wanted > available:
            raise UsageError(
                f"--num-prompts {wanted} is more than the {available} of the {file}",
                hint="give fewer: each prompt is used once",
            )

    def _generated(self, target: Target, num_requests: int, seed: int) -> list[ServerRequest]:
        input_len, output_len = self.input_len or DEFAULT_LEN, self.output_len or DEFAULT_LEN
        if self.dataset is Dataset.NANO:
            made = nano_requests(
                num_requests,
                input_len=input_len,
                output_len=output_len,
                vocab_size=target.vocab_size,
                seed=seed,
            )
        else:
            made = random_requests(
                num_requests,
                input_len=input_len,
                prefix_len=self.prefix_len,
                num_prefixes=self.num_prefixes,
                long_input_len=self.long_input_len,
                output_len=output_len,
                range_ratio=self.range_ratio or 0.0,
                vocab_size=self.vocab_size or target.vocab_size,
                seed=seed,
            )
        return [
            ServerRequest(one.prompt_token_ids, self._params(one.params.max_tokens, index))
            for index, one in enumerate(made)
        ]

    def _of_prompt(self, target: Target, prompt: Prompt, index: int) -> ServerRequest:
        if prompt.messages is not None and not target.takes_messages:
            raise DataError(f"{prompt.source}: `messages`, but the model has no chat template")
        check_fields(prompt)
        asked = prompt.text if prompt.messages is None else prompt.messages
        base = self._params(self.output_len or DEFAULT_LEN, index)
        return ServerRequest(asked or "", prompt.params(base))

    def _of_exchanges(self, target: Target, wanted: int, output: Output) -> list[ServerRequest]:
        self._check_enough(wanted, len(self.exchanges), "usable conversations")
        requests: list[ServerRequest] = []
        num_long = 0
        for one in self.exchanges:
            output_len = self.output_len or target.count_tokens(one.answer)
            if target.max_model_len is not None:
                num_tokens = target.count_tokens(one.question) + output_len
                if num_tokens > target.max_model_len:
                    num_long += 1
                    continue
            requests.append(ServerRequest(one.question, self._params(output_len, len(requests))))
            if len(requests) == wanted:
                break
        if num_long:
            output.note(f"note: {num_long:,} conversations are longer than {target.max_model_len:,} tokens")
        self._check_enough(wanted, len(requests), "conversations that fit --max-model-len")
        return requests

    def _params(self, output_len: int, index: int) -> SamplingParams:
        params = replace(greedy(output_len), n=self.n)
        if self.temperature > 0:
            params = replace(params, temperature=self.temperature, seed=self.seed + index)
        return params


def prompts_sha256(requests: Sequence[ServerRequest]) -> str:
    """What is asked as one number, by which two results are known to be of the same work."""
    digest = hashlib.sha256()
    for one in requests:
        changed = {k: v for k, v in vars(one.params).items() if v != getattr(_NO_PARAMS, k)}
        digest.update(json.dumps([one.prompt, changed], default=str, sort_keys=True).encode())
    return digest.hexdigest()
