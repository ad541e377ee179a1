"""TLS: what a client that checks certificates accepts, and what is refused before a model is read."""

import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tessera_cli.cli.app import run
from tests.server.test_process import serving, wait_until_ready


def write_certificate(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    """A certificate for the loopback address, with the chain, and its key."""
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return certificate, key


def test_a_client_that_checks_certificates_is_served(tiny_model_dir: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key = write_certificate(authority, tmp_path)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    options = ("--device", "cpu", "--num-blocks", "40", "--ssl-certfile", str(certificate))
    with serving(tiny_model_dir, *options, "--ssl-keyfile", str(key)) as (process, url, _):
        assert url.startswith("https://")
        with httpx.Client(base_url=url, timeout=60, verify=trusting) as http:
            http.headers["authorization"] = "Bearer a"
            wait_until_ready(http)
            body = {"model": "tiny", "prompt": "The", "max_tokens": 3, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with httpx.Client(base_url=url) as stranger, pytest.raises(httpx.ConnectError, match="verify"):
            stranger.get("/health")
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("break_key", "said"),
    [
        (lambda key: key.unlink(), "key.pem cannot be read: No such file or directory"),
        (lambda key: key.write_text("no key"), "not PEM"),
        (lambda key: write_other_key(key), "key values mismatch"),
        (lambda key: encrypt(key), "with a password"),
    ],
    ids=["missing", "garbage", "another", "encrypted"],
)
def test_a_key_that_cannot_be_used_is_an_error_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_key: object, said: str
) -> None:
    certificate, key = write_certificate(trustme.CA(), tmp_path)
    break_key(key)  # type: ignore[operator]
    status = run(["serve", "no-such-model", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)])
    message = capsys.readouterr().err
    assert status == 2
    assert message.startswith("error: no TLS")
    assert said in message.splitlines()[0]


def write_other_key(key: Path) -> None:
    key.write_bytes(trustme.CA().issue_cert("127.0.0.1").private_key_pem.bytes())


def encrypt(key: Path) -> None:
    plain = load_pem_private_key(key.read_bytes(), None)
    secret = plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    key.write_bytes(secret)
