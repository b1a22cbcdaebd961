"""The shipped demo pair is whole and tells tales; the recipe that made such a pair still learns."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from demo_training.corpus import encode, read_books, windows
from demo_training.folders import check_writable
from demo_training.judging import judge, judge_pair
from demo_training.model import Shape, build
from demo_training.pair import train_pair
from demo_training.tokenizer import check_same_tokenizer, read_tokenizer, train_tokenizer
from demo_training.training import Budget, Recipe, learning_rate, train
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import generate, load

from splitinfer.demo import DEMO_MODELS, DRAFT, TARGET
from splitinfer.errors import ConfigError

SIZES = {
    "demo": {"num_hidden_layers": 12, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 512},
    "demo-draft": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 352},
}
PARAMETERS = {"demo": 5_116_608, "demo-draft": 631_424}

TALE = """\
There was once a miller who had three daughters, and the youngest of them was so gentle that the birds
came down from the roof to eat out of her hand. Now it happened one winter, when the snow lay deep upon
the mill-wheel, that there was no more corn to grind and no more bread in the house. Then the miller
said, "One of you must go through the forest to the old woman who lives beyond the hill, and ask her for
a sack of flour." The eldest was afraid of the wolves, and the second was afraid of the dark; but the
youngest put on her red shoes, took a crust in her pocket, and went out at the door without a word.

She had not gone far when she met a little grey man sitting upon a stone. "Good day, my child," said he,
"have you nothing to give a poor old man who has not eaten for three days?" "I have only a crust," she
answered, "but you shall have the half of it." When he had eaten, he gave her a small silver key, and
said, "Keep this well, and when you come to a door that has no lock, then think of me."

So she went on and on, until the moon stood over the trees, and at last she came to a house in the midst
of the wood. There was a light in the window, but the door had neither latch nor lock. The girl took the
silver key out of her pocket, and no sooner had she laid it against the wood than the door sprang open,
and there sat the old woman by the fire, spinning gold thread from a heap of straw. "I have waited for
you a hundred years," cried the old woman; "whoever shares her last crust may ask of me what she will."
"Then give me a sack of flour for my father," said the girl. The old woman laughed, and filled the sack,
and however much was taken out of it, it was never empty again. And when the king heard of it, he rode to
the mill with all his knights, and would have no one but the miller's daughter for his queen.
"""


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


def test_it_knows_a_tale_when_it_reads_one(shipped: tuple[str, Any, Any]) -> None:
    # Measured: 1.43 and 1.53 bits per byte. Knowing nothing costs 11 bits a token, here 3.1 bits a byte.
    name, model, _ = shipped
    tokenizer = read_tokenizer(DEMO_MODELS[name])
    ids = mx.array([[0, *tokenizer.encode(TALE).ids]])
    logits = model(ids[:, :-1]).astype(mx.float32)
    nats = nn.losses.cross_entropy(logits, ids[:, 1:], reduction="sum").item()
    assert 1.0 < nats / math.log(2) / len(TALE.encode()) < {"demo": 1.55, "demo-draft": 1.65}[name]


def test_the_pair_shares_one_tokenizer() -> None:
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
    check_same_tokenizer(TARGET, DRAFT)
    assert read_tokenizer(TARGET).get_vocab_size() == 2048


def test_the_tokenizer_gives_any_text_back(shipped: tuple[str, Any, Any]) -> None:
    _, _, tokenizer = shipped
    text = TALE[:300] + " naïve — 森の娘 🌲\n\ttabs  and   spaces"
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


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    books = read_books(write_tales(tmp_path / "tales", sentences=100), held_books=["book-1"])
    corpus = encode(books, read_tokenizer(DRAFT), length=32)
    figures = judge_pair(DRAFT, DRAFT, corpus, 32)
    assert figures["draft_agreement"] == 1.0
    assert figures["target"] == figures["draft"]


def test_asked_to_stop_it_ends_after_its_step_and_saves(tmp_path: Path) -> None:
    books = read_books(write_tales(tmp_path / "tales"))
    corpus = encode(books, read_tokenizer(DRAFT), length=16)
    saves: list[int] = []
    outcome = train(
        build(TINY.config(2048), seed=0),
        corpus,
        Recipe(Budget(steps=1000), peak_lr=1e-3, batch=2, length=16),
        save=lambda: saves.append(1),
        say=lambda _: None,
        should_stop=lambda: True,
    )
    assert (outcome.steps, saves) == (1, [1])


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    folder = write_tales(tmp_path / "tales")
    tails = read_books(folder, held_share=0.1)
    for early, late, path in zip(tails.train, tails.held, sorted(folder.iterdir()), strict=True):
        assert early + late == path.read_text()
        assert early.endswith("\n")
        assert 0.1 <= len(late) / len(early + late) < 0.11
    whole = read_books(folder, held_books=["book-1"])
    assert (len(whole.train), len(whole.held), whole.how) == (1, 1, "whole books: book-1")


def test_the_learning_rate_climbs_and_then_falls_to_a_twentieth() -> None:
    rates = [learning_rate(1.0, step=s, warmup=10, spent=s / 100) for s in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] or max(rates) == rates[10]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.05)


def test_windows_predict_every_position_once() -> None:
    ids = np.arange(101, dtype=np.int32)
    assert windows(ids, 10, most=99)[:, 1:].flatten().tolist() == list(range(1, 101))
    assert windows(ids, 10, most=2)[:, 0].tolist() == [0, 90]


def test_bad_input_is_refused_in_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"holds no \.txt file"):
        read_books(empty)
    (empty / "short.txt").write_text("Once.\n")
    with pytest.raises(ConfigError, match="too little text"):
        encode(read_books(empty), read_tokenizer(DRAFT), length=512)
    (empty / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.txt is not UTF-8"):
        read_books(empty)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(empty / "short.txt" / "out")
    with pytest.raises(ConfigError, match="do not make 3 heads"):
        Shape(1, 16, 32, 3, 1).check()


def test_the_command_says_what_is_wrong_and_exits_with_1(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    found = os.pathsep.join([str(root), str(root / "scripts")])
    command = [sys.executable, "-m", "demo_training", str(tmp_path / "nowhere"), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": found}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"train_demo_model: {tmp_path / 'nowhere'} is not a folder.\n"
