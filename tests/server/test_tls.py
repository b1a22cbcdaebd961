"""Certificates, made by the program openssl: what cannot be used is one sentence, before anything is loaded."""

import shutil
import ssl
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from stub_model import Model

from splitinfer.cli.serve import ServeOptions
from splitinfer.cli.serving import gate_of
from splitinfer.errors import ConfigError
from splitinfer.server import running
from splitinfer.server.gate import Gate
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.running import Listen, Server, check_tls
from splitinfer.server.service import Service

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")


def openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)


def make_key(folder: Path, name: str) -> Path:
    openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", name)
    return folder / name


def make_certificate(folder: Path, name: str, key: Path, *more: str) -> Path:
    openssl(folder, "req", "-x509", "-key", str(key), "-subj", "/CN=localhost", "-out", name, *(more or ("-days", "2")))
    return folder / name


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path, "key.pem")


@pytest.fixture
def certificate(tmp_path: Path, key: Path) -> Path:
    return make_certificate(tmp_path, "cert.pem", key)


def test_one_that_can_be_used_also_if_another_has_signed_it(tmp_path: Path, certificate: Path, key: Path):
    assert gate_of(ServeOptions(tls_cert=certificate, tls_key=key))
    own = make_key(tmp_path, "own.pem")
    openssl(tmp_path, "req", "-new", "-key", str(own), "-subj", "/CN=mini.local", "-out", "asked.pem")
    openssl(tmp_path, "x509", "-req", "-in", "asked.pem", "-CA", str(certificate), "-CAkey", str(key), "-days", "2",
            "-CAcreateserial", "-out", "signed.pem")  # fmt: skip
    check_tls(tmp_path / "signed.pem", own)


def test_the_key_of_another(tmp_path: Path, certificate: Path, key: Path):
    other = make_key(tmp_path, "other.pem")
    with pytest.raises(ConfigError, match="does not belong"):
        gate_of(ServeOptions(tls_cert=certificate, tls_key=other))


@pytest.mark.parametrize(("days", "reason"), [(3, r"cert\S+ has expired"), (-3, r"cert\S+ is not valid yet")])
def test_out_of_its_time(certificate: Path, key: Path, days: int, reason: str, monkeypatch: pytest.MonkeyPatch):
    now = time.time() + days * 86_400
    monkeypatch.setattr(running, "time", SimpleNamespace(time=lambda: now))
    with pytest.raises(ConfigError, match=reason):
        check_tls(certificate, key)


@pytest.mark.parametrize(
    ("certificate_is", "key_is", "reason"),
    [
        ("cert.pem", "cert.pem", "cannot be used"),
        ("key.pem", "key.pem", "cannot be used"),
        ("none.pem", "key.pem", "the certificate .*none.pem cannot be read: No such file or directory"),
        ("cert.pem", "none.pem", "the key .*none.pem cannot be read: No such file or directory"),
        ("binary.pem", "key.pem", "the certificate .*binary.pem is not in PEM"),
        ("text.pem", "key.pem", "cannot be used"),
        ("cert.pem", "locked.pem", "the key .*locked.pem has a password"),  # nobody is asked on the terminal
    ],
)
def test_files_that_are_something_else(
    tmp_path: Path, certificate: Path, key: Path, certificate_is: str, key_is: str, reason: str
):
    (tmp_path / "binary.pem").write_bytes(b"\x30\x82\xff")
    (tmp_path / "text.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    openssl(tmp_path, "pkey", "-in", str(key), "-aes256", "-passout", "pass:sesame", "-out", "locked.pem")
    with pytest.raises(ConfigError, match=reason):
        check_tls(tmp_path / certificate_is, tmp_path / key_is)


def test_over_tls_the_cookie_is_for_tls_only(tmp_path: Path, key: Path):
    certificate = make_certificate(tmp_path, "cert.pem", key, "-days", "2", "-addext", "subjectAltName=DNS:localhost")
    gate = Gate(keys=ApiKeys([ApiKey("laptop", digest("secret"))]))
    server = Server(Service(Model(), "demo", gate), Listen(port=0, certificate=certificate, key=key))
    try:
        trusts = ssl.create_default_context(cafile=str(certificate))
        url, shows = f"https://localhost:{server.port}/session", {"x-api-key": "secret"}
        bought = httpx.post(url, headers=shows, json={}, verify=trusts)
        assert (bought.status_code, bought.headers["set-cookie"].endswith("; Secure")) == (200, True)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{server.port}/health")
    finally:
        server.close()
