"""Fingerprints of weights; stages compare them to check that they hold the same model."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """One weights file. ``size``: bytes of data; ``table``: a digest of its table of tensors; ``sample``: a digest of
    samples of its bytes, or ``None`` if the file has not been downloaded."""

    size: int
    table: str
    sample: str | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A model: a digest of its configuration, its files, and its revision if it came from the hub."""

    config: str
    files: Mapping[str, FileFingerprint] = field(default_factory=dict)
    revision: str | None = None

    def difference(self, other: "Fingerprint") -> str | None:
        """Return a phrase that names the first difference between two models. Return None if they are equal. Samples
        are compared only if both sides have the file."""
        if self.config != other.config:
            return "config.json differs"
        if set(self.files) != set(other.files):
            return f"the weight files differ ({_names(self)} here, {_names(other)} there)"
        for name, mine in self.files.items():
            theirs = other.files[name]
            if (mine.size, mine.table) != (theirs.size, theirs.table):
                return f"{name} has different tensors"
            if mine.sample is not None and theirs.sample is not None and mine.sample != theirs.sample:
                return f"{name} has different weights"
        if self.revision is not None and other.revision is not None and self.revision != other.revision:
            return f"revision {self.revision:.12} here, {other.revision:.12} there"
        return None

    def digest(self) -> str:
        """Return a digest that is equal for equal weights; with a revision it is independent of which files are
        downloaded."""
        samples = self.revision is None
        files = [
            (name, one.size, one.table, one.sample if samples else None) for name, one in sorted(self.files.items())
        ]
        return hashlib.blake2b(repr((self.config, self.revision, files)).encode(), digest_size=16).hexdigest()


def _names(fingerprint: Fingerprint) -> str:
    names = sorted(fingerprint.files)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
