"""Whether an answer is right. Pure.

Plain mlx-lm reads each answer and says at every position how far, in logits, the token is below the one that it would
choose there itself, after the same tokens. 0 is its own choice. Where arithmetic depends on how many rows are computed
at once, as on Metal, another token may win by rounding; how far rounding moves logits is measured with mlx-lm itself.

If no machine here holds the whole model, there is nobody to ask. Then the pipeline answers again, in other chunks and
another cut, and says at the first token that differs how far apart its own two likeliest ones were (``unreferenced``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.probes.tokens import TIMES_MOVED, parting

RIGHT, ROUNDING, WRONG = "right", "right but for rounding", "wrong"


def verdict(gaps: Sequence[float], allowed: float) -> dict[str, Any]:
    """What the distances of an answer's tokens from mlx-lm's choices mean, in one word and a sentence."""
    other = [at for at, gap in enumerate(gaps) if gap != 0]
    wrong = [at for at in other if not gaps[at] <= allowed]  # a NaN is wrong, too
    if wrong:
        at = wrong[0]
        said = (
            f"token {at + 1} of {len(gaps)} is {gaps[at]:.2g} logits below mlx-lm's choice; rounding is {allowed:.2g}"
        )
        return {"verdict": WRONG, "said": said, "at": at + 1, "gap": gaps[at]}
    if other:
        said = f"{len(other)} of {len(gaps)} tokens are others than mlx-lm's, within {max(gaps):.2g} logits"
        return {"verdict": ROUNDING, "said": said, "at": other[0] + 1, "gap": max(gaps)}
    return {"verdict": RIGHT, "said": f"all {len(gaps)} tokens are mlx-lm's choice"}


def reread(
    first: Sequence[int], again: Sequence[int], margins: Sequence[float], moved: float, how: str
) -> dict[str, Any]:
    """What a second answer means. ``margins``: of the first answer, between the two likeliest tokens; ``moved``: how
    far rounding moves log probabilities; ``how``: what was otherwise."""
    at = parting(first, again[: len(first)])
    if at is None:
        return {"verdict": RIGHT, "said": f"the same {len(first)} tokens {how}"}
    said = f"token {at + 1} is another {how}; the two likeliest were {margins[at]:.2g} apart"
    is_near = margins[at] <= TIMES_MOVED * moved
    return {"verdict": ROUNDING if is_near else WRONG, "said": said, "at": at + 1, "gap": margins[at]}


def worst(verdicts: Sequence[Mapping[str, Any]]) -> str | None:
    """The verdict on all answers of a system; ``None`` if there was none."""
    found = {each["verdict"] for each in verdicts}
    return next((word for word in (WRONG, ROUNDING, RIGHT) if word in found), None)
