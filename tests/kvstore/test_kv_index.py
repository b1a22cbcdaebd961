"""What files' names say, and which go first when space is short."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitinfer.core.kv.block_tree import KEY_BYTES, Key
from splitinfer.kvstore.index import FileName, StoredFile, lineage, parse, surplus

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)

NAME = FileName(b"k" * 16, b"p" * 16, 256, 300, 0, 8)


@given(keys, keys, st.integers(0, 10**8), st.integers(1, 10**8), st.integers(0, 10**5), st.integers(1, 10**5))
def test_a_name_comes_back_as_it_was(key: Key, parent: Key, start: int, length: int, first: int, num_layers: int):
    name = FileName(key, parent, start, start + length, first, first + num_layers)
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".kv",
        "about.json",
        ".DS_Store",
        f"{NAME}.tmp",
        f".{NAME}.0123456789abcdef.tmp",
        f"{NAME}\n",
        f" {NAME}",
        f"x{NAME}",
        str(NAME).upper(),
        str(NAME).replace(".kv", ".KV"),
        str(NAME).replace("-256-", "-0256-"),  # another file has the name that this says
        str(NAME).replace("-256-", "-٢٥٦-"),
        str(NAME).replace("-256-", "--1-"),
        str(NAME).replace("-256-", "-300-"),  # no positions
        str(NAME).replace("-0-8", "-8-8"),  # no layers
        str(NAME).replace("-300-", f"-{10**30}-"),
        str(NAME).replace("6b", "6", 1),
        str(NAME).replace("6b", "6g", 1),
        str(NAME).replace("-", "_"),
        str(NAME)[:-5],
    ],
)
def test_the_names_of_others_say_nothing(name: str):
    assert parse(name) is None


@st.composite
def shelves(draw: st.DrawFn) -> list[StoredFile]:
    """Trees of blocks in two groups, of one or two ranges of layers each; some have lost what they come after."""
    files: list[StoredFile] = []
    for group in ("one", "two"):
        tree: list[tuple[Key, int]] = [(b"root" * 4, 0)]
        for i in range(draw(st.integers(0, 7))):
            parent, start = draw(st.sampled_from(tree))
            key = bytes([i + 1]) * KEY_BYTES
            tree.append((key, start + 4))
            for layers in draw(st.sampled_from([[(0, 4)], [(0, 4), (4, 8)], [(4, 8)], []])):
                name = FileName(key, parent, start, start + 4, *layers)
                used = float(draw(st.integers(0, 5)))
                files.append(StoredFile(group, name, draw(st.integers(1, 9)), used))
    return draw(st.permutations(files))


def after(files: Sequence[StoredFile], one: StoredFile) -> list[StoredFile]:
    """The files of the blocks that come after one's, and its own."""
    keys, found = {one.name.key}, list[StoredFile]()
    for file in sorted(files, key=lambda file: file.name.start):
        if file.group == one.group and (file.name.key in keys or file.name.parent in keys):
            keys.add(file.name.key)
            found.append(file)
    return found


def last_use(files: Sequence[StoredFile], one: StoredFile) -> float:
    return max(file.used for file in after(files, one))


@given(shelves(), st.integers(0, 60))
@example([], 0)
def test_the_rest_is_within_the_cap_and_no_more_goes_than_must(files: list[StoredFile], cap: int):
    going = surplus(files, cap)
    rest = sum(file.nbytes for file in files) - sum(file.nbytes for file in going)
    assert len(set(going)) == len(going)
    assert set(going) <= set(files)
    assert rest <= cap
    assert not going or rest + going[-1].nbytes > cap


@given(shelves())
def test_a_block_goes_after_all_that_come_after_it(files: list[StoredFile]):
    order = surplus(files, 0)
    assert len(order) == len(files)
    for i, file in enumerate(order):
        left = {one.name.key for one in after(order[i:], file)}
        assert left == {file.name.key}, "one goes before another that is of no use without it"


@given(shelves(), st.integers(0, 60))
def test_none_goes_while_one_that_was_used_longer_ago_stays(files: list[StoredFile], cap: int):
    going = surplus(files, cap)
    staying = [file for file in files if file not in going]
    assert max((last_use(files, file) for file in going), default=0) <= min(
        (last_use(files, file) for file in staying), default=9
    )


@given(shelves(), st.sampled_from(["one", "two"]), st.integers(1, 7))
def test_a_lineage_is_a_block_and_what_it_comes_after(files: list[StoredFile], group: str, number: int):
    key = bytes([number]) * KEY_BYTES
    assert lineage(files, group, key) == {
        file for file in files if file.group == group and any(one.name.key == key for one in after(files, file))
    }


def test_names_that_lead_in_a_circle_have_an_end():
    names = [FileName(bytes([i]) * 16, bytes([(i + 1) % 3]) * 16, 0, 4, 0, 4) for i in range(3)]
    files = [StoredFile("group", name, 1, 0.0) for name in names]
    assert lineage(files, "group", names[0].key) == set(files)
    assert len(surplus(files, 1)) == 2


def test_a_very_long_conversation_goes_from_its_end():
    pick = Random(1)
    files, previous = list[StoredFile](), b"r" * 16
    for i in range(20_000):
        key = pick.randbytes(16)
        files.append(StoredFile("group", FileName(key, previous, i * 4, i * 4 + 4, 0, 4), 1, pick.random()))
        previous = key
    assert [file.name.start for file in surplus(files, 0)] == [i * 4 for i in reversed(range(20_000))]
