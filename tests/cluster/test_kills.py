"""Some of the kills, freezes, cuts and dead coordinators of ``campaigns/deaths.py``, which runs any number of them.

One of each kind runs by default in ``test_recovery.py``.
"""

import pytest
from campaigns.deaths import Outcome, Trial, run, table
from processes import figure

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # half a minute each; a minute while the machine is busy

# The first four of a kind are on 2 remote, 3 remote, 2 local and 3 mixed stages with one stream, the next four with
# four, the next four with eight. Cuts have no local stages alone.
ONE = [Trial("kill", 7), Trial("cut", 0), Trial("cut", 9), Trial("freeze", 0), Trial("freeze", 11)]
COORDINATOR = [Trial("coordinator", 4), Trial("coordinator", 7)]
TWICE = [Trial("twice", number) for number in range(4)]
DRAFTS_FOR_FOUR = [Trial("kill", number, 4) for number in range(16)]
NOTICED = 5.0  # seconds: the transport's limit is 3 of silence; the rest is for a machine that is busy with other tests


@pytest.mark.parametrize("trials", [ONE, COORDINATOR, TWICE, DRAFTS_FOR_FOUR], ids=["one", "coordinator", "2", "four"])
def test_whatever_is_lost_no_token_changes_and_nothing_stays(trials: list[Trial]) -> None:
    outcomes: list[Outcome] = run(trials, seed=1)
    figure(table(outcomes))
    assert len(outcomes) == len(trials)
    assert all(outcome.is_good and outcome.to_notice < NOTICED for outcome in outcomes), outcomes
    asked_again = [outcome for outcome in outcomes if outcome.how == "coordinator" and outcome.num_streams > 1]
    assert all(outcome.found > 0.5 for outcome in asked_again), "KV is there after a coordinator's death"
