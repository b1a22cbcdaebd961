"""macOS's counts of pages become a number of bytes: from outputs that others recorded on Macs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.system.free_memory import MemoryPages, parse_vm_stat

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> MemoryPages:
    return parse_vm_stat((RECORDED / name).read_text())


def test_a_mac_that_has_read_files_has_more_than_psutil_says():
    pages = recorded("vm_stat_m3_pro_18.txt")
    assert pages.page_size == 16384
    assert pages.idle_anonymous == 0, "647,959 - 172,602 file-backed pages may be all of the 401,894 inactive ones"
    assert pages.available_bytes == (33_762 + 647_959 + 5_850) * 16384
    psutil_says = (401_894 + 33_762 + 172_602) * 16384  # inactive + the kernel's free, speculative ones included
    assert pages.available_bytes > psutil_says


def test_idle_memory_of_programs_counts_as_half():
    pages = recorded("vm_stat_intel_16.txt")
    assert pages.page_size == 4096
    assert pages.idle_anonymous == 1_499_041 - (1_183_495 - 12_001) - 55_091 == 272_456
    assert pages.available_bytes == (29_997 + 1_183_495 + 55_091 + 136_228) * 4096


def test_what_is_available_is_no_more_than_what_is_not_used():
    """All of memory is 18 GiB there, of which Activity Monitor calls the rest used; speculative pages counted once."""
    pages = recorded("vm_stat_m3_pro_18.txt")
    used = (pages.anonymous - pages.purgeable + pages.wired + pages.compressor) * pages.page_size
    assert pages.available_bytes + used < 18 * 2**30


counts = st.integers(0, 2**24)


@given(st.builds(MemoryPages, st.just(1), *[counts] * 8))
def test_pages_are_never_counted_twice(pages: MemoryPages):
    assert 0 <= pages.idle_anonymous <= pages.inactive
    assert pages.free + pages.file_backed + pages.purgeable <= pages.available_bytes
    assert pages.available_bytes <= pages.free + pages.file_backed + pages.purgeable + pages.inactive / 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not the output of vm_stat"),
        ("Mach Virtual Memory Statistics:\nPages free: 12.\n", "not the output of vm_stat"),
        ("Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 12.\n", "Pages inactive"),
    ],
)
def test_another_output_is_refused(text: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        parse_vm_stat(text)
