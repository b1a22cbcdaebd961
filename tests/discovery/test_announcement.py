"""Announcements as TXT records: what is in them, and what strangers may put there."""

import pytest
from announcing import MINI, announced
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import ServiceInfo

from splitinfer.discovery.announcement import MOST_LABEL, announced_name, from_properties, to_properties
from splitinfer.discovery.announcer import service_info


def properties(**changes: bytes) -> dict[bytes, bytes | None]:
    sound = {key.encode(): value.encode() for key, value in to_properties(MINI).items()}
    return {**sound, **{key.encode(): value for key, value in changes.items()}}


def test_what_zeroconf_sends_is_read_back():
    info = service_info(MINI, ("10.77.0.2", "fe80::2"))
    assert info.name == "mini 001122._splitinfer._tcp.local."
    assert info.server == "splitinfer-00112233445566ff.local."
    assert info.parsed_addresses() == ["10.77.0.2", "fe80::2"]
    read = ServiceInfo(info.type, info.name, port=info.port, properties=info.text)
    assert from_properties(read.properties, 5577) == MINI


@pytest.mark.parametrize("name", ["x" * 300, "Zoë" * 60, "mini.local", "a\nb\x1b[31m", "日" * 60])
def test_a_name_of_any_kind_fits(name: str):
    made = announced(name=announced_name(name), device=name)
    assert len(service_info(made, ()).text) <= 400
    assert len(made.label.encode()) <= MOST_LABEL
    assert "." not in made.label
    read = from_properties({key.encode(): value.encode() for key, value in to_properties(made).items()}, 5577)
    assert read.name == made.name
    assert read.name.isprintable()


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        ({"key": b"XYZ"}, "fingerprint", ""),
        ({"key": b"a" * 31}, "fingerprint", ""),
        ({"key": b""}, "fingerprint", ""),  # a worker with --insecure
        ({"mem": b"-1"}, "memory", 0),
        ({"mem": b"9" * 20}, "memory", 0),
        ({"dev": b"a\x1b[2Jb"}, "device", "a [2Jb"),
        ({"dev": b"\xff\xfe"}, "device", "\ufffd\ufffd"),
        ({"txtvers": b"2"}, "form", "2"),
        ({"KEY": b"1" * 32}, "fingerprint", MINI.fingerprint),  # of equal keys the first counts
    ],
)
def test_what_strangers_announce_is_made_harmless(changed: dict[str, bytes], field: str, value: object):
    read = from_properties(properties(**changed), 5577)
    assert getattr(read, field) == value


@pytest.mark.parametrize(
    ("changed", "port"),
    [({"name": b""}, 5577), ({"name": b"\n"}, 5577), ({"id": b"0"}, 5577), ({}, 0), ({}, -1), ({}, 65536)],
)
def test_a_record_that_is_not_a_workers_is_left_out(changed: dict[str, bytes], port: int):
    assert from_properties(properties(**changed), port) is None


@given(st.dictionaries(st.sampled_from([*properties(), b"x"]), st.none() | st.binary(max_size=255)))
def test_damaged_records_raise_nothing(damaged: dict[bytes, bytes | None]):
    read = from_properties({**properties(), **damaged}, 5577)
    assert read is None or (read.name.isprintable() and read.device.isprintable())
