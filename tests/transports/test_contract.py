"""Every scheme keeps the same contract."""

from __future__ import annotations

import curve  # noqa: F401 - one more scheme
import pytest
from contract import CHECKS

import transports

ADDRESSES = {
    "inproc": "inproc://contract",
    "tcp": "tcp://127.0.0.1:0",
    "curve": "curve+tcp://127.0.0.1:0",
    "rdma": "rdma://127.0.0.1:0?backend=ring",
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("scheme", ADDRESSES)
def test_contract(scheme: str, check: str) -> None:
    CHECKS[check](ADDRESSES[scheme])


def test_all_schemes_are_checked() -> None:
    assert transports.known() == tuple(sorted(set(ADDRESSES) - {"curve"}))


def test_unknown_scheme_lists_the_known() -> None:
    known = ", ".join(f"{scheme}://" for scheme in transports.known())
    with pytest.raises(transports.AddressError, match=f"carrier-pigeon://.*{known}"):
        transports.connect("carrier-pigeon://roof:1", timeout=1)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp",
        "tcp://",
        "tcp://host",
        "tcp://:1",
        "tcp://h:x",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://::1:5",
        "tcp://[::1]",
    ],
)
def test_bad_address(address: str) -> None:
    with pytest.raises(transports.AddressError):
        transports.listen(address)


def test_bad_options() -> None:
    for bad in ({"max_parts": 0}, {"max_header_bytes": 1 << 32}, {"beat_every": 2.0}, {"beat_every": 0.0}):
        with pytest.raises(ValueError):  # noqa: PT011 - the four messages differ
            transports.LinkOptions(**bad)  # type: ignore[arg-type]
