import json
import shutil
from pathlib import Path

import pytest

from tessera_cli.errors import DataError, ModelError
from tessera_cli.models.tokenizer import Tokenizer

TEXTS = ["Hello, world", "  two  spaces\n\n", "naïve 日本語 👩‍👩‍👧 🏳️‍🌈", "<|im_start|>user\nHi<|im_end|>", ""]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <b>hi</b> & 'bye'"},
    {"role": "assistant", "content": "hi\n"},
    {"role": "user", "content": "Again"},
]


def with_template(source: Path, target: Path, template: object) -> Path:
    path = shutil.copytree(source, target / "model")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(tiny_model_dir: Path, text: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_model_dir)
    ours = Tokenizer.from_dir(tiny_model_dir)
    token_ids = ours.encode(text)
    assert token_ids == theirs(text)["input_ids"]
    assert ours.decode(token_ids) == theirs.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert ours.encode_batch([text, text]) == [token_ids, token_ids]


@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_rendered_as_transformers_does(tiny_model_dir: Path, prompt: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_model_dir)
    ours = Tokenizer.from_dir(tiny_model_dir)
    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert ours.render_chat(CHAT, add_generation_prompt=prompt) == text
    assert ours.encode_chat(CHAT, add_generation_prompt=prompt) == ours.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_make_the_whole_text(tiny_model_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    token_ids = tokenizer.encode(text)
    for end in range(len(token_ids) + 1):
        stream = tokenizer.stream()
        pieces = [stream.step(token_id) for token_id in token_ids[:end]]
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == tokenizer.decode(token_ids[:end])


def test_the_special_ids_are_read(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)


def test_a_template_may_refuse_and_may_be_broken(tiny_model_dir: Path, tmp_path: Path) -> None:
    refusing = with_template(tiny_model_dir, tmp_path / "a", "{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match="no system role"):
        Tokenizer.from_dir(refusing).render_chat(CHAT, add_generation_prompt=True)
    broken = with_template(tiny_model_dir, tmp_path / "b", "{% for %}")
    with pytest.raises(ModelError, match="broken"):
        Tokenizer.from_dir(broken).render_chat(CHAT, add_generation_prompt=True)
    none = with_template(tiny_model_dir, tmp_path / "c", None)
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer.from_dir(none).render_chat(CHAT, add_generation_prompt=True)


def test_a_template_cannot_reach_the_machine(tiny_model_dir: Path, tmp_path: Path) -> None:
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    path = with_template(tiny_model_dir, tmp_path, hostile)
    with pytest.raises(ModelError):
        Tokenizer.from_dir(path).render_chat(CHAT, add_generation_prompt=True)


def test_the_default_of_several_templates_is_taken(tiny_model_dir: Path, tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ messages | tojson }}"},
    ]
    rendered = Tokenizer.from_dir(with_template(tiny_model_dir, tmp_path, named)).render_chat(
        CHAT, add_generation_prompt=True
    )
    assert json.loads(rendered) == CHAT
    assert "<b>" in rendered  # not escaped for HTML


def test_fingerprints_tell_vocabularies_apart(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    same = Tokenizer.from_dir(path).fingerprint()
    state = json.loads((path / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (10, 11))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(state))
    assert Tokenizer.from_dir(tiny_model_dir).fingerprint() == same
    assert Tokenizer.from_dir(path).fingerprint() != same


def test_a_saved_tokenizer_is_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    tokenizer.save(tmp_path)
    saved = Tokenizer.from_dir(tmp_path)
    assert saved.fingerprint() == tokenizer.fingerprint()
    assert saved.chat_template == tokenizer.chat_template
    assert saved.eos_token_ids == tokenizer.eos_token_ids


def test_missing_and_damaged_files_are_model_errors(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_dir(tmp_path)
    shutil.copy(tiny_model_dir / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'{"bos_token": {"x": 1}}'),
        ("tokenizer_config.json", b'{"eos_token": 7}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [5]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_file_of_another_shape_is_named(
    tiny_model_dir: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        Tokenizer.from_dir(path)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ messages[9].x.y }}"]
)
def test_a_template_may_fail_in_any_way(tiny_model_dir: Path, tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_dir(with_template(tiny_model_dir, tmp_path, template))
    with pytest.raises(ModelError, match="fails"):
        tokenizer.render_chat(CHAT, add_generation_prompt=True)
