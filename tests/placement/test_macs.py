"""The pages' tables of which models fit on which Macs are what the formulas of plans give."""

from pathlib import Path

from macs import EXPERTS, MODELS, RECIPES, best, longest, rows, rows_on_disk

ROOT = Path(__file__).parents[2]


def test_the_table_of_which_models_fit_is_what_the_formulas_give():
    page = (ROOT / "docs" / "start" / "models.md").read_text()
    assert f"| memory, GB | {' | '.join(MODELS)} |" in page
    assert [row for row in rows() if f"{row}\n" not in page] == []
    assert f"| memory, GB | {' | '.join(EXPERTS)} |" in page
    assert [row for row in rows_on_disk() if f"{row}\n" not in page] == []
    for macs, (model, draft, draft_gb) in RECIPES.items():
        context, layers = best(model, macs, draft_gb)
        line = next(each for each in page.splitlines() if each.startswith(f"| {' + '.join(map(str, macs))} | `"))
        assert all(one in line for one in (model, draft, f"| {' + '.join(map(str, layers))} |")), (line, layers)
        assert context >= 8192


def test_the_front_page_names_the_models_that_fit_with_the_usual_context():
    page = (ROOT / "README.md").read_text()
    table = page.partition("8,192 tokens or more |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table
    for line in table:
        macs, models = (part.strip() for part in line.strip("| ").split("|"))
        memory = tuple(int(one) for one in macs.split("+"))
        assert models.split(", ") == [name for name in MODELS if longest(name, memory) >= 8192], macs
