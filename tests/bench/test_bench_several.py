"""The figures and tables of drafts for several streams."""

from io import StringIO

from rich.console import Console

from splitinfer.bench.speculation.several import _ratio, _summary, none_in, tables

TODAY = {"rate": 20.0, "rates": [10.0, 10.0], "gaps": [0.1] * 99 + [0.12], "per_token": [0.1, 0.1], "choice": None}
DRAFTS = {
    "rate": 50.0, "rates": [10.0, 40.0], "gaps": [0.0] * 150 + [0.12] * 50, "per_token": [0.1, 0.025],
    "choice": {"groups": 1, "in_flight": 1, "drafts": [0, 4], "expected_tokens_per_second": 52.0},
}  # fmt: skip


def test_ratios_are_to_no_drafts_trial_by_trial() -> None:
    found = _summary([DRAFTS, DRAFTS], [TODAY, {**TODAY, "rate": 25.0}])
    assert found["gain"] == (2.5 + 2.0) / 2
    assert found["gains"] == [1.0, 4.0]
    assert found["seconds_a_token_p99_to_today"] == 1.0
    assert found["longest_gap_to_today"] == 1.0
    assert _ratio([DRAFTS], [TODAY]) == 2.5


def test_tables_show_what_is_in_the_document() -> None:
    case = {
        "acceptance": [0.8, 0.8],
        "today": none_in(2),
        "systems": {none_in(2): _summary([TODAY], [TODAY]), "drafts": _summary([DRAFTS], [TODAY])},
        "to_best_without": 2.3,
        "same_tokens": False,
        "optimum": {"gain": 2.6, "groups": 1, "drafts": 3, "in_flight": 1},
    }
    found = {
        "layout": {"name": "two", "layers": [2, 2]},
        "cases": [case],
        "mixed": [{**case, "acceptance": [0.0, 0.95], "optimum": None}],
        "come_and_go": {
            "seconds": 300.0, "acceptance": 0.8, "to_none": 1.5, "to_best_fixed": 1.01,
            "tokens_per_second": {"drafts": 30.0, none_in(2): 20.0},
        },
    }  # fmt: skip
    out = StringIO()
    for table in tables(found):
        Console(file=out, width=200).print(table)
    text = out.getvalue()
    for shown in ("2.60 (1 x 3, 1)", "0.96", "0 to 4", "1.00, 4.00", "to the best fixed choice", "1.01", "no"):
        assert shown in text
