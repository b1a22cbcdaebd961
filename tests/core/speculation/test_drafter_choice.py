"""Which drafter is chosen at a place, on scripted texts and a scripted model."""

from collections.abc import Callable
from random import Random

import pytest

from splitinfer.core.speculation.drafter_choice import Choosers, FlightChooser


def drafted(
    text: list[int], prompt: int, model: Callable[[int], int], *, chooser: FlightChooser, block: int = 3
) -> list[bool]:
    """Draft for a text in blocks, each behind the tokens known; for each token that was drafted right or wrong, in
    order, whether the draft was right. ``model``: the token it drafts for a position."""
    found, known = [], prompt
    while known < len(text) - block:
        tokens = text[:known]
        drafts = chooser.guesses(tokens, [], block)
        for i in range(block):
            by_model = i >= len(drafts)
            if by_model:
                drafts.append(model(known + i))
            chooser.drafted(tokens, drafts[:i], drafts[i], by_model=by_model)
        right = 0
        while right < block and drafts[right] == text[known + right]:
            right += 1
        found += [True] * right + [False] * (right < block)
        known += right + 1
    return found


def prose(count: int, seed: int) -> list[int]:
    """Tokens as frequent as words are, in no order: what followed before says little."""
    dice = Random(seed)
    return [int(30 * dice.random() ** 3) for _ in range(count)]


def a_model(text: list[int], right: float, seed: int = 3) -> Callable[[int], int]:
    dice = Random(seed)
    wrong = {at: dice.random() >= right for at in range(len(text))}
    return lambda at: (text[at] + wrong[at]) % 1000


def share(found: list[bool]) -> float:
    return sum(found) / len(found)


@pytest.mark.parametrize("right", [0.5, 0.8])
def test_in_prose_the_model_drafts(right: float) -> None:
    text = prose(600, 1)
    found = drafted(text, 50, a_model(text, right), chooser=Choosers().of(1))
    assert share(found) > right - 0.06


def test_a_guess_saves_the_model_where_both_are_right() -> None:
    text = prose(80, 4) * 4
    chooser, asked = Choosers().of(1), list[int]()

    def model(at: int) -> int:
        asked.append(at)
        return text[at]

    assert share(drafted(text, 80, model, chooser=chooser)) == 1.0
    assert len(asked) > 0
    assert not [at for at in asked if at > 160], "from the second time on guesses have shown to be right"


def test_a_text_that_stops_repeating_itself() -> None:
    passage, new = prose(100, 5), prose(300, 6)
    text = [*passage, *passage, *new]
    chooser = Choosers().of(1)
    drafted(text[:200], 100, a_model(text, 0.7), chooser=chooser)
    found = drafted(text, 200, a_model(text, 0.7), chooser=chooser)
    assert share(found) > 0.7 - 0.08


def test_guesses_are_judged_though_nobody_took_them() -> None:
    passage = prose(200, 7)
    chooser = Choosers().of(1)
    assert chooser.guesses(passage, [], 4) == []
    read = [*passage, *passage[:100]]
    assert chooser.guesses(read, [], 4) == passage[100:104], "the prompt has shown what guesses are worth here"


def test_a_new_sequence_begins_with_what_others_have_shown() -> None:
    choosers, text = Choosers(), prose(100, 8) * 4
    assert not choosers.of(1).takes_guess(16)
    drafted(text, 80, a_model(text, 0.5), chooser=choosers.of(1))
    mine = choosers.of(2)
    assert mine.takes_guess(16)
    assert not mine.takes_guess(1)
    assert not mine.takes_guess(0)


def test_drafts_behind_a_wrong_one_are_not_judged() -> None:
    chooser = Choosers().of(1)
    for position, token in enumerate((4, 5, 6)):
        chooser.drafted([1, 2], [4, 5][:position], token, by_model=True)
    chooser.guesses([1, 2, 9, 8, 7], [], 1)  # the first was wrong, so nothing is known of the others
    assert sum(each.tried for each in chooser._drafts) == 1


def test_of_a_model_that_drafts_in_any_case_all_drafts_are_judged() -> None:
    """Its drafts are right at first, where guesses are not; then the text repeats, and it does not know."""
    choosers, text = Choosers(), [7, 1, 9, 2, 8, 3, 7, 4, 9, 5, 8, 6, *[11, 12, 13, 14, 15] * 12]
    taken = list[bool]()
    for at in range(4, len(text) - 3):
        right = text[at : at + 3]
        drafts = right if at < 14 else [0, 0, 0]
        taken.append(choosers.chosen(1, text[:at], drafts) == right)
    assert all(taken[:8])
    assert all(taken[-20:])
