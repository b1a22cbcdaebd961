"""Campaigns: ``python -m tests.campaigns NAME`` (``__main__.py`` lists them). They use what the tests share."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_SHARED = ("", "cluster", "wire", "transports", "store", "launch", "server", "server/page", "grammar")

sys.path[:0] = [str(_TESTS.parent), *(str(_TESTS / folder) for folder in _SHARED)]
