"""Where a machine stores KV by default, and how much of it."""

from pathlib import Path

from splitinfer.places import caches

DEFAULT_CAP = 20 * 10**9  # bytes


def default_folder() -> Path:
    """Return the folder for KV among the user's caches."""
    return caches() / "kv"
