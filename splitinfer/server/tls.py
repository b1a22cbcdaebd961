"""Whether a certificate and its key can be used, looked at before minutes of loading: each fault in a sentence.

What a client would find is found by one handshake in memory, with the certificate itself as what is trusted
(OpenSSL, X509_V_FLAG_PARTIAL_CHAIN), and with the name not looked at: so all that can be wrong is the time.
"""

import ssl
from pathlib import Path

from splitinfer.errors import ConfigError

_EXPIRED, _NOT_YET = 10, 9  # OpenSSL, x509_vfy.h: X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_MOST_TURNS = 10  # a handshake takes two or three of each side
_NOT_IN_TIME = {_EXPIRED: "has expired", _NOT_YET: "is not valid yet"}


def check_tls(certificate: Path, key: Path) -> None:
    """Check that a server can use a certificate and its key, and that clients can trust it now.

    Raises:
        ConfigError: a file is not there or is something else, the key has a password or belongs to another certificate,
            or the certificate has expired, or is not valid yet.
    """
    for what, path in (("certificate", certificate), ("key", key)):
        text = _read(what, path)
        if "-----BEGIN" not in text:
            raise ConfigError(f"the {what} {path} is not in PEM; it would begin with -----BEGIN")
        if what == "key" and "ENCRYPTED" in text:  # OpenSSL would ask on the terminal, where nobody may be
            raise ConfigError(f"the key {path} has a password; `openssl pkey -in {path.name} -out FILE` takes it off")
    _handshake(certificate, _server_context(certificate, key))


def _read(what: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror or error}") from error


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {certificate}") from error
        reason = (error.reason or f"{error}").replace("_", " ").lower()
        raise ConfigError(f"the certificate {certificate} and the key {key} cannot be used: {reason}") from error
    return context


def _handshake(certificate: Path, server_context: ssl.SSLContext) -> None:
    client_context = ssl.create_default_context(cafile=str(certificate))
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up)
    server = server_context.wrap_bio(up, down, server_side=True)
    try:
        for _ in range(_MOST_TURNS):
            if all([_has_shaken_hands(side) for side in (client, server)]):  # noqa: C419 - both have their turn
                return
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_IN_TIME:
            raise ConfigError(f"the certificate {certificate} {_NOT_IN_TIME[error.verify_code]}") from error
    except ssl.SSLError:
        return  # of this client alone: others may take what it does not, such as a short key


def _has_shaken_hands(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
