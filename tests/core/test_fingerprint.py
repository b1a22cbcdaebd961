"""Two sets of weights are the same, or the first difference is named."""

from dataclasses import replace

import pytest

from splitinfer.core.fingerprint import FileFingerprint, Fingerprint

HERE = Fingerprint(
    "c0ffee",
    {"a.safetensors": FileFingerprint(100, "t1", "s1"), "b.safetensors": FileFingerprint(50, "t2", "s2")},
    "0123456789abcdef",
)


def with_file(**changes: object) -> Fingerprint:
    return replace(HERE, files={**HERE.files, "b.safetensors": replace(HERE.files["b.safetensors"], **changes)})


def test_the_same_is_no_difference():
    assert HERE.difference(HERE) is None
    assert HERE.difference(replace(HERE, files=dict(reversed(HERE.files.items())))) is None


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (replace(HERE, config="other"), "config.json differs"),
        (with_file(size=51), "b.safetensors has different tensors"),
        (with_file(table="t3"), "b.safetensors has different tensors"),
        (with_file(sample="s3"), "b.safetensors has different weights"),
        (replace(HERE, revision="fedcba9876543210"), "revision 0123456789ab here, fedcba987654 there"),
        (
            replace(HERE, files={"model.safetensors": FileFingerprint(150, "t")}),
            "the weight files differ (a.safetensors, b.safetensors here, model.safetensors there)",
        ),
    ],
)
def test_the_first_difference_is_named(there: Fingerprint, words: str):
    assert HERE.difference(there) == words
    assert there.difference(HERE) is not None


def test_what_is_not_downloaded_cannot_differ():
    assert HERE.difference(with_file(sample=None)) is None
    assert with_file(sample=None).difference(HERE) is None


def test_a_folder_without_a_revision_may_be_the_same_as_the_hub():
    assert HERE.difference(replace(HERE, revision=None)) is None
    assert replace(HERE, revision=None).difference(HERE) is None


def test_the_configuration_is_compared_first():
    assert replace(with_file(size=1), config="other").difference(HERE) == "config.json differs"


def test_many_files_are_named_in_short():
    many = replace(HERE, files={f"{i}.safetensors": FileFingerprint(1, "t") for i in range(5)})
    assert "0.safetensors, 1.safetensors and 3 more here" in str(many.difference(HERE))
