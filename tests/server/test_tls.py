"""Certificates that cannot be used: one sentence each, before anything is loaded."""

import shutil
from pathlib import Path

import pytest
from certificates import make_certificate, make_key, openssl

from splitinfer.cli.serve import ServeOptions
from splitinfer.cli.serving import gate_of
from splitinfer.errors import ConfigError
from splitinfer.server.running import check_tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")


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


@pytest.mark.parametrize(
    ("begin", "end", "reason"),
    [("2020", "2021", r"cert\S+ has expired"), ("2090", "2091", r"cert\S+ is not valid yet")],
)
def test_out_of_its_time(tmp_path: Path, key: Path, begin: str, end: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        check_tls(self_signed(tmp_path, key, f"{begin}0101000000Z", f"{end}0101000000Z"), key)


def self_signed(folder: Path, key: Path, begin: str, end: str) -> Path:
    """A certificate for another time; ``openssl ca`` is what can make it in all versions."""
    (folder / "index.txt").write_text("")
    (folder / "serial").write_text("01\n")
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=a\n[a]\ndatabase=index.txt\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\n"
        "unique_subject=no\n[p]\ncommonName=supplied\n"
    )
    openssl(folder, "req", "-new", "-key", str(key), "-subj", "/CN=localhost", "-out", "asked.pem")
    openssl(folder, "ca", "-batch", "-config", "ca.cnf", "-selfsign", "-keyfile", str(key), "-in", "asked.pem",
            "-startdate", begin, "-enddate", end, "-notext", "-out", "cert-then.pem")  # fmt: skip
    return folder / "cert-then.pem"


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
