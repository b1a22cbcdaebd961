"""Certificates for tests, by the program openssl."""

import subprocess
from pathlib import Path


def openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)


def make_key(folder: Path, name: str) -> Path:
    openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", name)
    return folder / name


def make_certificate(folder: Path, name: str, key: Path, *more: str) -> Path:
    openssl(folder, "req", "-x509", "-key", str(key), "-subj", "/CN=localhost", "-out", name, *(more or ("-days", "2")))
    return folder / name
