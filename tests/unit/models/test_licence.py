"""A licence is what a model's own files say."""

from pathlib import Path

import pytest

from tessera_cli.models.licence import licence_of


def test_a_gguf_file_says_its_own(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for name, licence in (("with", "apache-2.0"), ("without", None)):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        if licence is not None:
            writer.add_license(licence)
        writer.add_block_count(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert licence_of(str(tmp_path / f"{name}.gguf"), tmp_path) == licence


def test_a_directory_says_it_in_its_card(tmp_path: Path) -> None:
    assert licence_of(str(tmp_path), tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: llama3.2\n---\n")
    assert licence_of(str(tmp_path), tmp_path) == "llama3.2"
    (tmp_path / "README.md").write_text("---\nlicense: [a, b]\n---\n")
    assert licence_of(str(tmp_path), tmp_path) is None
