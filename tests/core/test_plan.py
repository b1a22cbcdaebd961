"""What a plan may say."""

import pytest

from splitinfer.core.plan import Slice, StepPlan


@pytest.mark.parametrize(
    ("start", "size", "logits", "drafts"),
    [
        *((0, 0, 0, 0), (-1, 1, 0, 0), (0, 1, 2, 0), (0, 1, -1, 0)),
        *((0, 2, 1, 5), (0, 2, 1, 2), (0, 3, 1, 1), (0, 2, 1, 3), (0, 1, 0, -1)),
    ],
)
def test_a_slice_has_rows_and_wants_logits_of_those_and_of_its_drafts(start: int, size: int, logits: int, drafts: int):
    assert Slice(1, 4, (7, 8, 9), 1).end == 7
    assert Slice(1, 0, (7, 8), 2, 1).num_drafts == 1
    with pytest.raises(ValueError, match=r"slice of .* wants"):
        Slice(1, start, (7,) * size, logits, drafts)


def test_a_step_has_one_slice_of_a_sequence():
    """Two would share caches, and neither would know what the other stores."""
    assert StepPlan(3, slices=(Slice(1, 0, (5, 6), 0), Slice(2, 9, (5,), 1))).num_tokens == 3
    with pytest.raises(ValueError, match="step 3 has two slices of one sequence"):
        StepPlan(3, slices=(Slice(1, 0, (5, 6), 0), Slice(1, 2, (5,), 1)))
