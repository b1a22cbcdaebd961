"""Targets with their drafters, and what the last stage drafts, noted."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import Folder
from trained import noted_proposals, of_kind


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Tokens so far, and the drafts behind them."""
    return noted_proposals(monkeypatch)


@pytest.fixture(scope="session")
def drafter(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, str]]:
    """A function that gives a target's folder and a drafter of a kind for it, in a layout's words; made once."""

    @cache
    def made(kind: str, name: str, only: int | None = None, **changes: Any) -> tuple[Path, str]:
        own, folder = tmp_path_factory.mktemp(kind), tiny_folder("deepseek_v3" if kind == "latent" else name, **changes)
        if kind in ("mtp", "latent"):  # whose heads lie among the target's weights
            folder = Path(shutil.copytree(folder, own / "target"))
        return folder, of_kind(kind, folder, own / "drafter", only)

    return made
