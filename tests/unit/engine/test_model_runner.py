"""The runner: the right row of the model for each sequence, the same on every run, no state but the cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_cli.engine import model_runner
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.model_runner import ModelRunner
from tessera_cli.engine.sampler import uniform
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler_output import BlockCopy, ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import SampleError, Sequence
from tessera_cli.engine.step_result import StepResult
from tessera_cli.errors import UsageError
from tessera_cli.models.decoder import Decoder
from tests.engines import make_engine, random_prompts, run_requests, tiny_decoder

CONFIG = EngineConfig(num_blocks=60, max_model_len=64, block_size=4)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=8)
SAMPLED = SamplingParams(seed=3, max_tokens=8)


@pytest.fixture(scope="module")
def decoder(tiny_model_dir: Path) -> Decoder:
    return tiny_decoder(tiny_model_dir)


def make_runner(decoder: Decoder) -> ModelRunner:
    return ModelRunner(decoder, CONFIG, "reference")


def make_sequences(prompts: list[list[int]], *params: SamplingParams) -> list[Sequence]:
    """One per prompt, with blocks of its own for 24 tokens; the last of `params` serves the rest."""
    sequences = []
    for index, prompt in enumerate(prompts):
        sequence = Sequence(str(index), prompt, params[min(index, len(params) - 1)])
        sequence.block_table += range(1 + 6 * index, 7 + 6 * index)
        sequences.append(sequence)
    return sequences


def share(sequence: Sequence, count: int, *, num_samples: int = 1) -> ScheduledSequence:
    """The next `count` tokens of `sequence`, which are then computed."""
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens += count
    is_last = start + count == sequence.num_tokens
    return ScheduledSequence(sequence, count, start, num_samples if is_last else 0)


def whole(sequences: list[Sequence]) -> SchedulerOutput:
    """All tokens of all sequences in one step."""
    return step(
        [share(sequence, sequence.num_tokens, num_samples=sequence.params.n) for sequence in sequences]
    )


def step(items: list[ScheduledSequence], copies: tuple[BlockCopy, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(tuple(items), (), copies, sum(item.num_scheduled_tokens for item in items))


@torch.inference_mode()
def full_logits(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """Logits [num_tokens, vocab] of one whole text, attention by hand, nothing of the engine."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    hidden = decoder(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    return decoder.logits(hidden)


def test_each_sequence_gets_the_row_of_its_own_last_token(decoder: Decoder) -> None:
    runner, prompts = make_runner(decoder), random_prompts([5, 9, 4, 1])
    first, second, third, fourth = make_sequences(prompts, replace(GREEDY, logprobs=0))
    runner.run(step([share(first, 4), share(second, 3)]))
    # A decode, a chunk that does not end, a whole prompt, and a prompt of one token.
    result = runner.run(step([share(first, 1), share(second, 4), share(third, 4), share(fourth, 1)]))
    assert result.tokens.keys() == {("0", 0), ("2", 0), ("3", 0)}
    for index in (0, 2, 3):
        logprobs = full_logits(decoder, prompts[index])[-1].log_softmax(-1)
        (entry,) = result.logprobs[str(index), 0]
        assert result.tokens[str(index), 0] == [entry.token_id] == [int(logprobs.argmax())]
        assert entry.logprob == pytest.approx(float(logprobs.max()), abs=1e-4)


def test_running_a_step_again_gives_the_same_and_changes_no_sequence(decoder: Decoder) -> None:
    runner = make_runner(decoder)
    output = whole(make_sequences(random_prompts([5, 3]), replace(SAMPLED, logprobs=2, prompt_logprobs=1)))
    before = [(list(item.sequence.token_ids), item.sequence.num_computed_tokens) for item in output.scheduled]
    assert runner.run(output) == runner.run(output)
    assert before == [
        (item.sequence.token_ids, item.sequence.num_computed_tokens) for item in output.scheduled
    ]


def test_a_step_without_a_last_token_samples_nothing(decoder: Decoder) -> None:
    (sequence,) = make_sequences(random_prompts([20]), GREEDY)
    assert make_runner(decoder).run(step([share(sequence, 7)])) == StepResult()


def test_logits_that_are_not_finite_fail_their_sequence_only(
    decoder: Decoder, spoiled_rows: list[int]
) -> None:
    runner = make_runner(decoder)
    params = replace(GREEDY, logprobs=1, prompt_logprobs=0)
    clean = runner.run(whole(make_sequences(random_prompts([4, 5]), params)))
    spoiled_rows += [1, 3]
    result = runner.run(whole(make_sequences(random_prompts([4, 5]), params)))
    assert isinstance(result.tokens["0", 0][0], SampleError)
    assert ("0", 0) not in result.logprobs
    assert [row is None for row in result.prompt_logprobs["0", 0].rows] == [False, True, False]
    for told, expected in (
        (result.tokens, clean.tokens),
        (result.logprobs, clean.logprobs),
        (result.prompt_logprobs, clean.prompt_logprobs),
    ):
        assert told["1", 0] == expected["1", 0]


@pytest.fixture
def spoiled_rows(decoder: Decoder) -> Iterator[list[int]]:
    """Packed rows of the hidden states that become NaN."""
    rows: list[int] = []

    def spoil(module: object, args: object, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[rows] = torch.nan
        return hidden

    hook = decoder.register_forward_hook(spoil)
    yield rows
    hook.remove()


def test_n_samples_come_from_one_row_with_the_uniforms_of_the_children(decoder: Decoder) -> None:
    prompts = random_prompts([6, 3])
    forking, plain = make_sequences(prompts, replace(SAMPLED, n=12, temperature=2.0, logprobs=1), SAMPLED)
    result = make_runner(decoder).run(whole([forking, plain]))
    weights = (full_logits(decoder, prompts[0])[-1] / 2.0).softmax(-1).cumsum(-1)
    expected = [int(torch.searchsorted(weights, uniform(3, child, 6) * weights[-1])) for child in range(12)]
    assert result.tokens["0", 0] == expected
    assert [entry.token_id for entry in result.logprobs["0", 0]] == expected
    assert len(result.tokens["1", 0]) == 1


def test_a_child_goes_on_with_its_own_uniforms(decoder: Decoder) -> None:
    (prompt,) = random_prompts([6])
    tokens = set()
    for child in range(8):
        sequence = Sequence("r", prompt, replace(SAMPLED, temperature=3.0), child_index=child)
        sequence.block_table += [1, 2]
        tokens.update(make_runner(decoder).run(whole([sequence])).tokens["r", child])
    assert len(tokens) > 4


def test_blocks_are_copied_before_anything_is_written(decoder: Decoder) -> None:
    runner = make_runner(decoder)
    (prompt,) = random_prompts([6])
    (parent,) = make_sequences([prompt], GREEDY)
    runner.run(whole([parent]))
    parent.token_ids.append(9)
    child = Sequence("child", [*prompt, 11], GREEDY)
    child.block_table += [parent.block_table[0], 50]  # the second block holds positions 4 and 5
    child.num_computed_tokens = 6
    result = runner.run(step([share(parent, 1), share(child, 1)], (BlockCopy(parent.block_table[1], 50),)))
    for sequence in (parent, child):
        expected = int(full_logits(decoder, sequence.token_ids)[-1].argmax())
        assert result.tokens[sequence.key] == [expected]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("max_rows", [2, 256])
def test_prompt_logprobs_are_whole_whatever_the_chunks(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, chunk: int, max_rows: int
) -> None:
    monkeypatch.setattr(model_runner, "MAX_LOGITS_ROWS", max_rows)
    runner, prompts = make_runner(decoder), random_prompts([20, 5])
    sequence, neighbour = make_sequences(prompts, replace(GREEDY, prompt_logprobs=2), GREEDY)
    told = {}
    while sequence.num_computed_tokens < 20:
        items = [share(sequence, min(chunk, 20 - sequence.num_computed_tokens))]
        if neighbour.num_computed_tokens < 5:
            items.insert(0, share(neighbour, 1))
        result = runner.run(step(items))
        rows = result.prompt_logprobs["0", 0]
        assert result.prompt_logprobs.keys() == {("0", 0)}
        told.update(zip(range(rows.start, rows.start + len(rows.rows)), rows.rows, strict=True))
    assert list(told) == list(range(1, 20))
    logprobs = full_logits(decoder, prompts[0]).log_softmax(-1)
    for position, entry in told.items():
        assert entry is not None
        assert entry.token_id == prompts[0][position]
        assert entry.logprob == pytest.approx(float(logprobs[position - 1, entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == logprobs[position - 1].topk(2).indices.tolist()


def test_a_preempted_sequence_does_not_tell_its_prompt_again(decoder: Decoder) -> None:
    (sequence,) = make_sequences(random_prompts([5]), replace(GREEDY, prompt_logprobs=2))
    sequence.token_ids.append(7)  # the first output, told with the prompt
    assert make_runner(decoder).run(whole([sequence])).prompt_logprobs == {}


def test_many_sampling_rows_are_computed_in_pieces(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(decoder)

    def run() -> StepResult:
        return runner.run(whole(make_sequences(random_prompts([5, 3, 4]), replace(GREEDY, logprobs=0))))

    expected = run()
    monkeypatch.setattr(model_runner, "MAX_LOGITS_ROWS", 2)
    assert run().tokens == expected.tokens


def test_a_request_without_a_seed_is_a_bug(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="seed"):
        make_runner(decoder).run(whole(make_sequences(random_prompts([4]), SamplingParams())))


@pytest.mark.parametrize("eos_token_id", [0, 2])
def test_every_end_token_of_the_model_ends_and_min_tokens_forbids_every_one(
    decoder: Decoder, eos_token_id: int
) -> None:
    (prompt,) = random_prompts([5])
    wants_to_end = replace(GREEDY, logit_bias={eos_token_id: 100.0})
    requests = {
        "at once": (prompt, wants_to_end),
        "later": (prompt, replace(wants_to_end, min_tokens=3)),
        "ignored": (prompt, replace(wants_to_end, ignore_eos=True)),
    }
    finished = run_requests(make_engine(decoder), requests)
    assert finished["at once"].token_ids == [eos_token_id]
    assert finished["later"].token_ids[3:] == [eos_token_id]
    assert not {0, 2} & set(finished["later"].token_ids[:3])
    assert finished["ignored"].token_ids == [eos_token_id] * 8


def test_a_refused_request_leaves_the_engine_alive(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    (prompt,) = random_prompts([5])
    expected = run_requests(engine, {"before": (prompt, GREEDY)})["before"].token_ids
    for bad in ({"logit_bias": {384: 1.0}}, {"stop_token_ids": (10**9,)}):
        with pytest.raises(UsageError, match="token id"):
            engine.add_request("bad", prompt, SamplingParams(**bad))
    assert run_requests(engine, {"after": (prompt, GREEDY)})["after"].token_ids == expected
