"""Two sets of weights are the same, or the first difference is named."""

from dataclasses import replace

import pytest

from splitinfer.common.fingerprint import FileFingerprint, Fingerprint

HERE = Fingerprint(
    "c0ffee",
    {"a.safetensors": FileFingerprint(100, "t1", "s1"), "b.safetensors": FileFingerprint(50, "t2", "s2")},
    "0123456789abcdef",
)


def with_file(**changes: object) -> Fingerprint:
    return replace(HERE, files={**HERE.files, "b.safetensors": replace(HERE.files["b.safetensors"], **changes)})


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (HERE, None),
        (replace(HERE, files=dict(reversed(HERE.files.items()))), None),
        (with_file(sample=None), None),  # which is not downloaded
        (replace(HERE, revision=None), None),
        (replace(HERE, config="other"), "config.json differs"),
        (replace(with_file(size=1), config="other"), "config.json differs"),
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
def test_the_first_difference_is_named(there: Fingerprint, words: str | None):
    assert HERE.difference(there) == words
    assert (there.difference(HERE) is None) == (words is None)


def test_many_files_are_named_in_short():
    many = replace(HERE, files={f"{i}.safetensors": FileFingerprint(1, "t") for i in range(5)})
    assert "0.safetensors, 1.safetensors and 3 more here" in str(many.difference(HERE))
