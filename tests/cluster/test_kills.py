"""A few of the kills and freezes of ``kills.py``, which runs any number of them."""

import pytest
from kills import disturb


@pytest.mark.parametrize(
    ("num_stages", "kinds", "num_streams", "drafts"),
    [(2, ["kill", "freeze"], 1, False), (3, ["kill"], 8, False), (2, ["kill"], 1, True), (3, ["kill"] * 2, 1, True)],
)
def test_a_lost_worker_changes_no_token(num_stages: int, kinds: list[str], num_streams: int, drafts: bool) -> None:
    trials = disturb(num_stages, kinds, first_seed=num_stages, num_streams=num_streams, drafts=drafts)
    assert all(trial.same for trial in trials), trials
    # The transport's limit is 3 s of silence; the rest is for a machine that is busy with other tests.
    assert all(trial.to_notice < 5 for trial in trials), trials
