"""The shipped demo pair is whole; the recipe that made such a pair still learns."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from demo_training.corpus import encode, read_books, windows
from demo_training.judging import judge, judge_pair
from demo_training.model import Shape, build
from demo_training.pair import train_pair
from demo_training.tokenizer import check_same_tokenizer, read_tokenizer, train_tokenizer
from demo_training.training import Budget, Recipe
from mlx.utils import tree_flatten
from mlx_lm import generate, load

from splitinfer.demo import DEMO_MODELS, DRAFT, TARGET

SIZES = {
    "demo": {"num_hidden_layers": 12, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 512},
    "demo-draft": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 352},
}
PARAMETERS = {"demo": 5_116_608, "demo-draft": 631_424}


@pytest.fixture(scope="module", params=sorted(SIZES))
def shipped(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model, tokenizer = load(str(DEMO_MODELS[request.param]))
    return request.param, model, tokenizer


def test_the_sizes_are_those_the_readme_states(shipped: tuple[str, Any, Any]) -> None:
    name, model, _ = shipped
    config = json.loads((DEMO_MODELS[name] / "config.json").read_text())
    assert {key: config[key] for key in SIZES[name]} == SIZES[name]
    assert (config["num_key_value_heads"], config["vocab_size"]) == (1, 2048)
    assert sum(w.size for _, w in tree_flatten(model.parameters())) == PARAMETERS[name]


def test_the_pair_shares_one_tokenizer() -> None:
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
    check_same_tokenizer(TARGET, DRAFT)
    assert read_tokenizer(TARGET).get_vocab_size() == 2048


def test_the_tokenizer_gives_any_text_back(shipped: tuple[str, Any, Any]) -> None:
    _, _, tokenizer = shipped
    text = "There was once a miller, naïve — 森の娘 🌲\n\ttabs  and   spaces"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == {0}


# ---- the recipe -----------------------------------------------------------------------------------

TINY = Shape(layers=1, hidden=16, ffn=32, heads=2, kv_heads=1)


def write_tales(folder: Path, *, sentences: int = 400) -> Path:
    folder.mkdir(exist_ok=True)
    who, what = ("king", "queen", "fox", "hen"), ("slept", "sang", "rode away", "laughed")
    for book in range(2):
        lines = (f"The {who[(i + book) % 4]} {what[i * i % 4]}.\n" for i in range(sentences))
        (folder / f"book-{book}.txt").write_text("".join(lines))
    return folder


def test_three_steps_lower_the_loss_and_leave_a_folder_that_loads(tmp_path: Path) -> None:
    books = read_books(write_tales(tmp_path / "tales"))
    tokenizer = train_tokenizer(books.train, 280)
    corpus = encode(books, tokenizer, length=16)
    plan = Recipe(Budget(steps=3), peak_lr=1e-2, batch=4, length=16)
    config = TINY.config(tokenizer.get_vocab_size())
    before, _ = judge(build(config, seed=0), windows(corpus.held, 16, most=8))

    train_pair(tmp_path / "out", {"target": (TINY, plan)}, corpus, tokenizer, lambda _: None)
    figures = judge_pair(tmp_path / "out" / "target", None, corpus, 16)

    assert before == pytest.approx(math.log(280), abs=0.1)  # it starts out knowing nothing
    assert figures["target"]["nats_per_token"] < before - 0.1
    model, loaded = load(str(tmp_path / "out" / "target"))
    assert generate(model, loaded, prompt="The", max_tokens=4, verbose=False)
    assert not list((tmp_path / "out").rglob(".partial*"))
