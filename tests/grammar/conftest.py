"""The built-in model's forms, for each file."""

from collections.abc import Iterator

import pytest
from constrained import open_forms

from splitinfer.llm.forms import AnswerForms


@pytest.fixture(scope="module")
def made() -> Iterator[AnswerForms]:
    with open_forms() as found:
        yield found
