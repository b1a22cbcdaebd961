"""What the last stage drafts, noted."""

import pytest
from trained import noted_proposals


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Tokens so far, and the drafts behind them."""
    return noted_proposals(monkeypatch)
