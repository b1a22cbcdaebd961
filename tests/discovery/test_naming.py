"""Which worker a stage without an address means: by its key, and by the name only where several share one."""

import pytest
from announcing import KEY, OTHER_KEY, worker

from splitinfer.core.layout import StageSpec
from splitinfer.discovery.announcement import fingerprint_of, short
from splitinfer.discovery.naming import choose, key_of
from splitinfer.errors import LayoutError, WorkerUnreachable

STAGE = StageSpec("mini", 6, 12)
OTHER = fingerprint_of(OTHER_KEY)


def refusal(stage: str, *workers) -> str:
    with pytest.raises(WorkerUnreachable) as error:
        choose(stage, KEY, workers)
    return str(error.value)


def test_the_owner_of_the_key_whatever_its_name():
    own = worker("10.0.0.2", name="second")
    assert choose("mini", KEY, [worker("10.0.0.3", id="f" * 16, fingerprint=OTHER), own]) is own


def test_of_two_with_one_name_the_key_decides():
    own, other = worker("10.0.0.2"), worker("10.0.0.3", id="f" * 16, fingerprint=OTHER)
    assert choose("mini", KEY, [other, own]) is own
    assert choose("mini", OTHER_KEY, [other, own]) is other


def test_of_two_with_one_key_the_name_decides():
    one, two = worker("10.0.0.2", name="one"), worker("10.0.0.2", name="Two", id="f" * 16, port=5578)
    assert choose("two.local", KEY, [one, two]) is two
    said = refusal("three", one, two)
    assert "2 workers with the key of stage three were found: one at 10.0.0.2:5577, Two at 10.0.0.2:5578" in said
    assert "2 workers" in refusal("one", one, worker("10.0.0.2", name="one", id="f" * 16, port=5578))


def test_another_key_under_the_name_is_told():
    said = refusal("mini", worker("10.0.0.3", fingerprint=OTHER))
    assert f"(mini at 10.0.0.3:5577) has another key ({short(OTHER)})" in said
    assert short(fingerprint_of(KEY)) in said
    assert "splitinfer pair" in said


def test_a_worker_without_a_key_is_not_taken_for_one_that_has():
    said = refusal("mini", worker("10.0.0.3", fingerprint=""))
    assert "has no key (it runs with --insecure)" in said


def test_nobody_and_others():
    assert refusal("mini") == f"no worker with the key of stage mini ({short(fingerprint_of(KEY))}) was found"
    others = [worker(f"fd00::{n}", name=f"w{n}", id=f"{n:016x}", fingerprint=OTHER) for n in range(1, 7)]
    assert refusal("mini", *others).endswith("others were found: w1 at [fd00::1]:5577, w2 at [fd00::2]:5577, "
                                             "w3 at [fd00::3]:5577, w4 at [fd00::4]:5577 and 2 more")  # fmt: skip


def test_the_layout_s_key_before_the_keyring_s():
    assert key_of(StageSpec("mini", 6, 12, key=KEY), "x.yaml", [(OTHER_KEY, "mini")]) == KEY
    assert key_of(STAGE, "x.yaml", [(OTHER_KEY, "Mini.local"), (KEY, "air")]) == OTHER_KEY


def test_no_key_and_several():
    with pytest.raises(LayoutError, match=r"stage 'mini' of layout x.yaml has no address and no key.*tcp://host:port"):
        key_of(STAGE, "x.yaml", [(KEY, "air")])
    with pytest.raises(LayoutError, match=r"2 keys are known here under the name 'mini'"):
        key_of(STAGE, "x.yaml", [(KEY, "mini"), (OTHER_KEY, "mini")])
