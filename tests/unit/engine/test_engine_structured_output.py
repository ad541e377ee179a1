"""The samples of a request with a structured output: each follows the form on its own, whatever fails."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.structured_output import GrammarVocabulary
from tessera_cli.errors import UsageError
from tests.engines import VOCAB_SIZE, make_engine, run_samples, tiny_decoder


class TestStructuredOutput:
    FORM = StructuredOutput(regex="[a-e]{6}")

    def make(self, path: Path, **sizes: Any) -> Engine:
        decoder = tiny_decoder(path)
        vocabulary = GrammarVocabulary(
            path / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=decoder.config.eos_token_ids
        )
        return make_engine(decoder, options={"grammar_vocabulary": vocabulary}, **sizes)

    def texts(self, path: Path, engine: Engine) -> list[str]:
        from tessera_cli.models.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_dir(path)
        samples = [one for many in run_samples(engine).values() for one in many]
        assert all(one.finish_reason is FinishReason.STOP for one in samples)
        return [tokenizer.decode([t for t in one.token_ids if t > 2]) for one in samples]

    @pytest.mark.parametrize("num_blocks", [200, 12])
    def test_each_sample_follows_its_own(self, tiny_model_dir: Path, num_blocks: int) -> None:
        engine = self.make(tiny_model_dir, num_blocks=num_blocks, max_model_len=44)
        params = SamplingParams(n=4, max_tokens=30, seed=1, temperature=2.0, structured_output=self.FORM)
        for request_id in "ab":
            engine.add_request(request_id, [5] * 6, params)
        texts = self.texts(tiny_model_dir, engine)
        assert all(re.fullmatch("[a-e]{6}", text) for text in texts)
        assert len(texts) == 8
        assert len(set(texts)) > 1

    def test_what_is_over_is_forgotten_while_others_go_on(self, tiny_model_dir: Path) -> None:
        engine = self.make(tiny_model_dir)
        form = StructuredOutput(regex="[a-e]{1,20}")
        params = SamplingParams(n=6, max_tokens=40, seed=1, temperature=2.0, structured_output=form)
        engine.add_request("a", [5] * 6, params)
        counts = set()
        while engine.has_unfinished():
            engine.step()
            counts.add(len(engine._records.matchers()))
            assert len(engine._records.matchers()) == engine.stats().num_running
        assert len(counts) > 2

    def test_a_failed_step_leaves_every_sample_where_it_was(
        self, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = self.make(tiny_model_dir)
        params = SamplingParams(n=3, max_tokens=30, seed=1, temperature=2.0, structured_output=self.FORM)
        engine.add_request("a", [5] * 6, params)
        run = engine._runner.run
        count = 0

        def fail_at_times(output: SchedulerOutput, matchers: Any) -> Any:
            nonlocal count
            count += 1
            if count % 2:
                raise RuntimeError("out of memory")
            return run(output, matchers)

        monkeypatch.setattr(engine._runner, "run", fail_at_times)
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: _retry(step))
        texts = self.texts(tiny_model_dir, engine)
        assert len(texts) == 3
        assert all(re.fullmatch("[a-e]{6}", text) for text in texts)

    def test_a_model_without_an_end_stops_where_the_form_is_complete(self, tiny_model_dir: Path) -> None:
        decoder = tiny_decoder(tiny_model_dir)
        decoder.config = replace(decoder.config, eos_token_ids=())
        vocabulary = GrammarVocabulary(
            tiny_model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=()
        )
        engine = make_engine(decoder, options={"grammar_vocabulary": vocabulary})
        engine.add_request("a", [5], SamplingParams(n=2, max_tokens=30, structured_output=self.FORM))
        assert all(re.fullmatch("[a-e]{6}", text) for text in self.texts(tiny_model_dir, engine))
        assert engine.stats().num_finished == 2

    def test_without_a_tokenizer_it_is_refused(self, tiny_model_dir: Path) -> None:
        engine = make_engine(tiny_decoder(tiny_model_dir))
        with pytest.raises(UsageError, match="no tokenizer"):
            engine.add_request("a", [5], SamplingParams(structured_output=self.FORM))
        assert not engine.has_unfinished()


def _retry(step: Any) -> Any:
    with pytest.raises(RuntimeError):
        step()
    return step()
