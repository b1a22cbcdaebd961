"""One set of dials, in three places: who says something goes before who says nothing."""

import pytest

from splitinfer.config import Layout
from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from splitinfer.core.serving_options import ServingOptions
from splitinfer.errors import LayoutError

STAGES = {"stages": [{"name": "a", "layers": 4}]}


def test_what_is_not_said_is_left_to_others():
    mine = ServingOptions(policy="watermark", itl_slo_ms=50)
    layout = ServingOptions(policy="prefill_first", token_budget=64)
    assert mine.over(layout).as_dict() == {"policy": "watermark", "itl_slo_ms": 50, "token_budget": 64}


def test_units_become_seconds():
    policy_config = ServingOptions(policy="decode_first", itl_slo_ms=50, max_decode_gap_ms=2000).policy_config
    assert (policy_config.policy, policy_config.itl_slo, policy_config.max_decode_gap) == (
        PolicyName.DECODE_FIRST,
        0.05,
        2.0,
    )
    assert ServingOptions().policy_config == PolicyConfig()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"itl_slo_ms": 0}, "itl_slo_ms must be a number of milliseconds from 0.001 to 3,600,000, not 0"),
        ({"token_budget": 0}, "token_budget must be a whole number from 1 to 1,000,000, not 0"),
        ({"policy": "fair"}, f"policy must be one of {', '.join(PolicyName)}, not 'fair'"),
        ({"prefill_share": 2}, "prefill_share must be a number from 0.01 to 1, not 2"),
    ],
)
def test_wrong_dials_are_refused(wrong: dict[str, object], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        ServingOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=f"'serving' of layout x: {sentence}"):
        Layout.from_dict({**STAGES, "serving": wrong}, "x")


@pytest.mark.parametrize(
    ("serving", "sentence"),
    [
        ({"polcy": "watermark"}, "unknown key 'polcy' in 'serving' of layout x; did you mean 'policy'"),
        ({"token_budget": 1.5}, "'token_budget' in 'serving' of layout x must be a whole number"),
        ({"kv_high": "much"}, "'kv_high' in 'serving' of layout x must be a number"),
        (3, "'serving' in layout x must be a mapping"),
    ],
)
def test_misspelt_keys_are_named(serving: object, sentence: str):
    with pytest.raises(LayoutError, match=sentence):
        Layout.from_dict({**STAGES, "serving": serving}, "x")
