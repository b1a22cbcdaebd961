"""A few of the kills, freezes, cuts and dead coordinators of ``campaigns/deaths.py``, which runs any number of them."""

import pytest
import rig
from campaigns.deaths import Outcome, Trial, run, table
from effort import long, thorough
from processes import figure

# The first four of a kind are on 2 remote, 3 remote, 2 local and 3 mixed stages with one stream, the next four with
# four, the next four with eight. Cuts have no local stages alone.
ANOTHER_MACHINE = [Trial("kill", 4), Trial("cut", 0), Trial("coordinator", 4)]
ITS_OWN_BESIDES = [Trial("kill", 7), Trial("freeze", 11)]
DRAFTS_FOR_FOUR = [Trial("kill", number, 4) for number in range(16)]
MORE = [Trial("cut", 9), Trial("freeze", 0), Trial("coordinator", 7), *(Trial("twice", number) for number in range(4))]
NOTICED = 5.0  # seconds: the transport's limit is 3 of silence; the rest is for a machine that is busy with other tests


@pytest.mark.timeout(600)  # half a minute each; a minute while the machine is busy
@pytest.mark.parametrize(
    "trials",
    [ANOTHER_MACHINE, ITS_OWN_BESIDES, long(MORE), long(DRAFTS_FOR_FOUR)],
    ids=["machine", "own", "more", "four"],
)
def test_whatever_is_lost_no_token_changes_and_nothing_stays(
    trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "NUM_REQUESTS", thorough(12, rig.NUM_REQUESTS))  # each is answered undisturbed first
    outcomes: list[Outcome] = run(trials, seed=1)
    figure(table(outcomes))
    assert len(outcomes) == len(trials)
    assert all(outcome.is_good for outcome in outcomes), outcomes
    assert all(outcome.to_notice < NOTICED for outcome in outcomes), outcomes
    asked_again = [outcome for outcome in outcomes if outcome.how == "coordinator" and outcome.num_streams > 1]
    assert all(outcome.found > 0.5 for outcome in asked_again), "KV is there after a coordinator's death"
