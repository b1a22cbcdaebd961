"""The door to pipelines (``door.py``), with tiny models by their names."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import tiny
from engine import door
from tiny import Folder


@pytest.fixture(scope="session")
def pipeline(tiny_folder: Folder) -> door.Open:
    """``door.opened``, with the name of a tiny model or its folder."""

    def opened(model: Path | str, cuts: list[int], **options: Any) -> AbstractContextManager[door.Pipeline]:
        return door.opened(tiny_folder(model) if model in tiny.CONFIGS else model, cuts, **options)

    return opened
