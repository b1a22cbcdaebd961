"""Announcements as TXT records: what is in them, what is not, and what strangers may put there."""

import random

import pytest
from announcing import KEY, MINI, announced

from splitinfer.discovery import txt
from splitinfer.discovery.announcement import (
    FINGERPRINT_DIGITS,
    MOST_LABEL,
    announced_name,
    fingerprint_of,
    from_strings,
    new_id,
    to_strings,
)


def record(strings: tuple[bytes, ...]) -> bytes:
    """The bytes of a TXT record, as RFC 6763, section 6.1, has them."""
    return b"".join(bytes([len(each)]) + each for each in strings)


def test_what_is_announced_is_read_back():
    assert from_strings(txt.strings_of(record(to_strings(MINI))), MINI.port) == MINI


def test_the_record_as_it_is():
    assert to_strings(MINI) == (
        b"txtvers=1",
        b"id=00112233445566ff",
        b"name=mini",
        b"key=" + fingerprint_of(KEY).encode(),
        b"proto=11",
        b"ver=0.1.0",
        b"mlx=0.32.2",
        b"mlxlm=0.32.2",
        b"dev=Apple M4 Pro",
        b"mem=48000",
        b"free=41000",
    )


def test_a_fingerprint_is_no_part_of_the_key_and_others_have_others():
    own = fingerprint_of(KEY)
    assert len(own) == FINGERPRINT_DIGITS
    assert own not in KEY
    assert own != fingerprint_of("ab" * 31 + "ac")


@pytest.mark.parametrize("name", ["x" * 300, "Zoë" * 60, "mini.local", "a\nb\x1b[31m", "日" * 60])
def test_a_name_of_any_kind_fits(name: str):
    made = announced(name=announced_name(name), device=name)
    strings = to_strings(made)
    assert len(record(strings)) <= txt.MOST_RECORD
    assert all(len(each) <= txt.MOST_STRING for each in strings)
    assert len(made.label.encode()) <= MOST_LABEL
    assert "." not in made.label
    read = from_strings(strings, 5577)
    assert read is not None
    assert read.name == made.name
    assert read.name.isprintable()


def test_two_runs_have_two_labels():
    assert announced(id=new_id()).label != announced(id=new_id()).label


def test_an_insecure_worker_has_no_fingerprint():
    strings = to_strings(announced(fingerprint=""))
    assert not any(each.startswith(b"key=") for each in strings)
    read = from_strings(strings, 5577)
    assert read is not None
    assert read.fingerprint == ""


@pytest.mark.parametrize(
    ("changed", "field", "value"),
    [
        (b"key=XYZ", "fingerprint", ""),
        (b"key=" + b"a" * 31, "fingerprint", ""),
        (b"mem=-1", "memory", 0),
        (b"mem=99999999999999999999", "memory", 0),
        (b"dev=a\x1b[2Jb", "device", "a [2Jb"),
        (b"dev=\xff\xfe", "device", "\ufffd\ufffd"),
        (b"txtvers=2", "form", "2"),
        (b"KEY=" + b"1" * 32, "fingerprint", "1" * 32),
    ],
)
def test_what_strangers_announce_is_made_harmless(changed: bytes, field: str, value: object):
    key = changed.partition(b"=")[0].lower()
    others = [each for each in to_strings(MINI) if not each.startswith(key + b"=")]
    read = from_strings([changed, *others], 5577)
    assert read is not None
    assert getattr(read, field) == value


@pytest.mark.parametrize(
    "strings",
    [
        (),
        (b"name=mini",),
        (b"id=00112233445566ff",),
        (b"name=", b"id=00112233445566ff"),
        (b"name=\n", b"id=00112233445566ff"),
        (b"name=mini", b"id=0"),
    ],
)
def test_what_is_no_worker_s_is_none(strings: tuple[bytes, ...]):
    assert from_strings(strings, 5577) is None


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none(port: int):
    assert from_strings(to_strings(MINI), port) is None


def test_of_equal_keys_the_first_counts_and_a_key_without_value_does_not():
    assert txt.decode((b"a=1", b"A=2", b"b", b"=3", b"c=")) == {"a": "1", "c": ""}


def test_a_string_has_at_most_255_bytes_and_ends_between_characters():
    (string,) = txt.encode({"dev": "ë" * 200})
    assert string.decode() == "dev=" + "ë" * 125  # 254 bytes: half a letter is left out


def test_a_string_that_reaches_beyond_the_record_is_left_out():
    assert list(txt.strings_of(b"\x03a=1\x00\x05b=2")) == [b"a=1"]


def test_a_record_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="longer than 400 bytes"):
        txt.encode({"a": "x" * 250, "b": "x" * 250})
    with pytest.raises(ValueError, match="no key"):
        txt.encode({"a=b": "1"})


def test_damaged_records_raise_nothing():
    sound, chance = record(to_strings(MINI)), random.Random(7)
    for _ in range(2000):
        damaged = bytearray(sound[: chance.randrange(len(sound) + 1)])
        for _ in range(chance.randrange(4)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        read = from_strings(txt.strings_of(bytes(damaged)), 5577)
        assert read is None or (read.name.isprintable() and read.device.isprintable())
