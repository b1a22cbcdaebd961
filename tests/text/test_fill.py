"""Gaps as models were trained to be shown them; and what goes on with a prompt."""

from pathlib import Path

import pytest

from splitinfer.demo import TARGET
from splitinfer.text.detokenizer import Detokenizer
from splitinfer.text.fill import _MARKS, _SUFFIX_FIRST, Gap, marks_in
from splitinfer.text.tokenizer import Tokenizer
from tests.text.templates import folder_with
from tests.text.test_detokenizer import TRIMMING, decode_with, encode

GAP = Gap("a = ", "\nb", "1", (("x.py", "import y"),))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("names", [*_MARKS, *_SUFFIX_FIRST], ids=lambda names: names[0])
def test_each_family_has_its_marks_and_its_order(names: tuple[str, str, str]):
    vocabulary = {name: -1 - i for i, name in enumerate(names) if name}
    marks = marks_in({**vocabulary, "a": 0})
    files = letters("import y\n")
    prefix, suffix, middle = [-1, *letters("a = ")], [-2, *letters("\nb")], [-3] if names[2] else []
    around = [*suffix, *prefix] if names in _SUFFIX_FIRST else [*prefix, *suffix]
    assert [*marks.around(GAP, letters)] == [*files, *around, *middle, *letters("1")]
    assert {*marks.ids.values()} == {*vocabulary.values()}


def test_other_files_have_names_where_there_are_marks_for_them():
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    marks = marks_in({name: -1 - i for i, name in enumerate(names)})
    begin = [-4, *letters("project\n"), -5, *letters("x.py\nimport y\n"), -5, *letters("file\n")]
    assert [*marks.around(GAP, letters)][: len(begin) + 1] == [*begin, -1]
    assert marks_in({"<|fim_prefix|>": 1}) is None


@pytest.mark.parametrize("special", [False, True])
def test_the_names_of_marks_in_a_text_are_text(tmp_path: Path, special: bool):
    size = Tokenizer.from_folder(TARGET).vocab_size
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, None, names, special=special))
    ids = tokenizer.filling(Gap("x <|fim_middle|> <|user|>", "y"))
    assert [i for i in ids if i in tokenizer.special_ids or i >= size] == [size, size + 1, size + 2]
    assert tokenizer.codec.decode(ids) == "<|fim_prefix|>x <|fim_middle|> <|user|><|fim_suffix|>y<|fim_middle|>"


def test_what_goes_on_with_a_text_keeps_its_space():
    """A decoder of sentencepiece's drops it at a beginning."""
    ids, decode = encode("ab a ab"), decode_with(TRIMMING)
    for at in range(1, len(ids)):
        detokenizer = Detokenizer(decode, behind=ids[:at])
        said = "".join(map(detokenizer.add, ids[at:])) + detokenizer.flush()
        assert decode(ids[:at]) + said == "ab a ab"
