import json

import pytest

from tessera_cli.cli.app import run


def test_the_report_masks_secrets_and_is_the_same_in_both_forms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("TESSERA_API_KEY", "verysecret")
    monkeypatch.setenv("TESSERA_HOME", "/some/where")
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert run(["env", "--json"]) == 0
    written = capsys.readouterr().out
    facts = json.loads(written)
    assert run(["env"]) == 0
    page = capsys.readouterr().out
    assert "verysecret" not in written + page
    assert facts["variables"]["HF_TOKEN"] == facts["variables"]["TESSERA_API_KEY"] == "***"
    assert facts["variables"]["GOMP_SPINCOUNT"] == "77"
    assert facts["files"]["cache"] == "/some/where"
    for section, values in facts.items():
        assert f"{section}:\n" in page
        for name in values:
            assert name in page


def test_the_check_generates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["generation"].startswith("ok, 64 tokens")
