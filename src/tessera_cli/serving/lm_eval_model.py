"""EleutherAI's lm-evaluation-harness on Tessera's engine (the extra `lm-eval`).

python -m tessera_cli.serving.lm_eval_model run --model tessera --model_args pretrained=MODEL --tasks TASK

is the harness's own command with this model known to it: it has no plug-ins to be found by.
"""

import logging
from collections.abc import Sequence
from typing import Any, get_type_hints

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from tessera_cli.engine.loading import EngineOptions
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import CapacityError, RunError, UsageError
from tessera_cli.serving.llm import LLM
from tessera_cli.serving.outputs import RequestOutput

logger = logging.getLogger(__name__)

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""What the harness is told the result under, the context's ids, and those whose likelihood is asked for."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@register_model("tessera")
class TesseraLM(TemplateLM):
    """A model of Tessera as the harness sees it; text becomes ids as in the harness's own `hf`.

    What is too long loses its beginning, as there, and a warning says how much.

    Args:
        pretrained: a directory, a hub id, a `.gguf` file or `package:IMPORT_NAME/FILE.gguf`.
        batch_size: of no effect, nor `max_batch_size`: the engine batches by itself, up to `max_num_seqs`.
        seed: of tasks that sample; request i of a call has seed + i.
        engine_options: as `load_engine` takes them.

    Raises:
        UsageError: an option that does not exist, or as `LLM`.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        seed: int = 0,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        known = get_type_hints(EngineOptions)
        if unknown := sorted(engine_options.keys() - known.keys()):
            raise UsageError(
                f"the model tessera has no option {unknown[0]}", hint=f"it has {', '.join(sorted(known))}"
            )
        # 1 is what the harness passes where nobody said anything.
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            logger.warning("batch_size has no effect: the engine batches by itself, up to max_num_seqs")
        self._llm = LLM(pretrained, **engine_options)
        self._seed = seed
        self._config = self._llm.engine.config
        self.tokenizer = self._llm.tokenizer
        self._name = pretrained

    @property
    def tokenizer_name(self) -> str:
        """What the harness keeps tokenised requests under."""
        return self._name

    @property
    def max_length(self) -> int:
        """Ids before the last one that is scored: a place is the last one's own, and one the engine's."""
        return self._config.max_model_len - 2

    @property
    def max_gen_toks(self) -> int:
        """Of tasks that say nothing, as in `hf`."""
        return 256

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of sequence, else the model's."""
        ids = (*self.tokenizer.eos_token_ids, *self._llm.engine.model_config.eos_token_ids)
        if not ids:
            raise UsageError("the model has no end-of-sequence token, which the harness needs")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Ids of `string`, with the tokenizer's special tokens unless it begins with the first of them."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """What the model's chat template makes; without a generation prompt the last turn stays open."""
        text = self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of as much context as fits."""
        scored: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                scored.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(
            owners, self._loglikelihood_tokens(scored, disable_tqdm=disable_tqdm), strict=True
        ):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to a stop text or the model's end of sequence."""
        prompts, params = [], []
        for number, request in enumerate(requests):
            context, kwargs = request.args
            one = self._sampling_params(kwargs, self._seed + number)
            prompts.append(self._fit(self.tok_encode(context), self._config.max_model_len - one.max_tokens))
            params.append(one)
        outputs = self._run(prompts, params, "generate_until", disable_tqdm)
        answers = [output.outputs[0].text for output in outputs]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **ignored: object
    ) -> list[tuple[float, bool]]:
        prompts, params = [], []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise CapacityError(
                    f"a continuation of {len(continuation)} tokens, and max_length is {self.max_length}",
                    hint="raise max_model_len, as far as the model goes",
                )
            prompt = self._fit(context + continuation, self.max_length + 1)
            start = len(prompt) - len(continuation)
            prompts.append(prompt)
            params.append(
                SamplingParams(
                    temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=max(start, 1)
                )
            )
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for indices in self._in_waves([param.prompt_logprobs_start for param in params], prompts):
            outputs = self._run(
                [prompts[i] for i in indices], [params[i] for i in indices], "loglikelihood", disable_tqdm
            )
            for index, output in zip(indices, outputs, strict=True):
                results[index] = _score(output, params[index].prompt_logprobs_start)
                key = requests[index][0]
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, results[index])
        return results

    def _in_waves(self, starts: list[int], prompts: list[list[int]]) -> list[list[int]]:
        """The requests in groups to run one after the other, so that a context is computed once.

        Of those that share their context one runs first; the others then find it in the prefix cache, which
        is never asked to hold more contexts than it has room for beside what runs.
        """
        of_context: dict[tuple[int, ...], list[int]] = {}
        for index, (start, prompt) in enumerate(zip(starts, prompts, strict=True)):
            of_context.setdefault(tuple(prompt[:start]), []).append(index)
        longest = max((len(prompt) for prompt in prompts), default=1)
        room = (self._config.num_blocks - 1) * self._config.block_size // 2
        waves: list[list[int]] = []
        groups, size = list(of_context.values()), max(1, room // longest)
        for begin in range(0, len(groups), size):
            group = groups[begin : begin + size]
            waves.append([indices[0] for indices in group])
            waves.append([index for indices in group for index in indices[1:]])
        return [wave for wave in waves if wave]

    def _fit(self, token_ids: list[int], limit: int) -> list[int]:
        """The last `limit` of `token_ids`, which is said where it is not all of them."""
        if limit < 1:
            raise CapacityError(
                f"no room for a prompt: max_model_len is {self._config.max_model_len}",
                hint="lower the task's max_gen_toks, or raise max_model_len as far as the model goes",
            )
        if len(token_ids) > limit:
            logger.warning("a prompt of %d tokens loses its first %d", len(token_ids), len(token_ids) - limit)
        return token_ids[-limit:]

    def _sampling_params(self, kwargs: dict[str, Any], seed: int) -> SamplingParams:
        given: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, self.max_gen_toks))
        until, max_tokens = given.pop("until"), given.pop("max_gen_toks")
        if not given.pop("do_sample", False):
            given["temperature"] = 0.0
        if unknown := given.keys() - set(_SAMPLING):
            raise UsageError(
                f"generation asks for {min(unknown)}", hint=f"until, max_gen_toks, {', '.join(_SAMPLING)}"
            )
        return SamplingParams(
            **given, max_tokens=max_tokens, stop=tuple(text for text in until if text), seed=seed
        )

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], name: str, disable_tqdm: bool
    ) -> list[RequestOutput]:
        with tqdm(total=len(prompts), desc=name, disable=disable_tqdm) as bar:
            outputs = self._llm.generate(prompts, params, on_finished=lambda _: bar.update())
        if error := next((output.error for output in outputs if output.error is not None), None):
            raise RunError(f"{name}: {error}")
        return outputs


def _score(output: RequestOutput, start: int) -> tuple[float, bool]:
    """The log-likelihood of the ids from `start` on, and whether each of them is the likeliest."""
    told = (output.prompt_logprobs or [])[start:]
    entries = [entry for entry in told if entry is not None]
    if len(entries) != len(told):
        raise RunError("the model's log-probabilities are not finite")
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
