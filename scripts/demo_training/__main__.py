"""The command line: ``scripts/train_demo_model CORPUS OUT``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer
from rich.console import Console

from demo_training.corpus import Books, encode, read_books
from demo_training.folders import check_writable
from demo_training.judging import judge_pair
from demo_training.model import MAX_POSITIONS, Shape, on_gpu
from demo_training.pair import Plans, train_pair
from demo_training.report import report
from demo_training.tokenizer import check_same_tokenizer, read_tokenizer, train_tokenizer
from demo_training.training import Budget, Recipe, Say
from splitinfer.errors import ConfigError

DEFAULT_MINUTES, DEFAULT_DRAFT_MINUTES = 38.0, 8.0  # as for the shipped pair, on two processors

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def train_demo_model(
    corpus: Annotated[Path, typer.Argument(help="A folder with .txt files (UTF-8) at any depth.")],
    out: Annotated[Path | None, typer.Argument(help="The folder for OUT/target and OUT/draft.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Train the target so long [38, or --steps].")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="... or for so many steps.")] = None,
    draft_minutes: Annotated[float | None, typer.Option(min=0.01, help="[8, or the steps]")] = None,
    draft_steps: Annotated[int | None, typer.Option(min=1, help="[as --steps]")] = None,
    layers: int = 12,
    hidden: int = 192,
    ffn: int = 512,
    heads: int = 3,
    kv_heads: int = 1,
    draft_layers: int = 2,
    draft_hidden: int = 128,
    draft_ffn: int = 352,
    draft_heads: int = 2,
    draft_kv_heads: int = 1,
    tokenizer: Annotated[Path | None, typer.Option(help="Reuse this tokenizer.json, or a model folder's.")] = None,
    vocab: Annotated[int, typer.Option(help="Tokens of a new tokenizer.")] = 2048,
    held_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Hold out this share at each file's end.")] = 0.03,
    held_book: Annotated[list[str] | None, typer.Option(help="Hold out this whole file (no .txt) instead.")] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    draft_lr: float = 3e-3,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1, max=MAX_POSITIONS)] = 512,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 [bfloat16 on a GPU, else float32].")] = None,
    seed: int = 0,
    drafter_minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Train only a drafter of OUT/target so long (needs torch).")
    ] = None,
    drafter_sequences: Annotated[int, typer.Option(min=1, help="Texts of the target to learn from.")] = 2048,
    keep_target: Annotated[bool, typer.Option("--keep-target", help="Train only the draft of OUT/target.")] = False,
    evaluate_only: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="TARGET DRAFT", help="Train nothing; evaluate these two folders."),
    ] = None,
) -> None:
    """Train a target and a draft model on a folder of text, and evaluate them on held-out text.

    Ctrl-C ends the training early; the models are saved and evaluated as they are. The last line of standard output
    is one JSON document.
    """
    books = read_books(corpus, held_share=held_share, held_books=held_book or ())
    if evaluate_only:
        evaluate(*evaluate_only, books, length)
        return
    if out is None:
        raise ConfigError("OUT is missing: give the folder for the two models.")
    if drafter_minutes is not None:
        train_drafter(out, books, drafter_minutes, drafter_sequences, seed)
        return
    target_budget = pick_budget(steps, minutes, default=DEFAULT_MINUTES)
    if draft_steps is None and draft_minutes is None:
        draft_steps = steps
    draft_budget = pick_budget(draft_steps, draft_minutes, default=DEFAULT_DRAFT_MINUTES)
    computed_in = pick_dtype(dtype)
    plans = {
        "target": (
            Shape(layers, hidden, ffn, heads, kv_heads),
            Recipe(target_budget, lr, batch, length, seed, computed_in),
        ),
        "draft": (
            Shape(draft_layers, draft_hidden, draft_ffn, draft_heads, draft_kv_heads),
            Recipe(draft_budget, draft_lr, batch, length, seed, computed_in),
        ),
    }
    if keep_target:
        del plans["target"]
        tokenizer = out / "target"
    make_pair(out, plans, books, tokenizer, vocab)


def make_pair(out: Path, plans: Plans, books: Books, tokenizer: Path | None, vocab: int) -> None:
    """Make the tokenizer, train and evaluate the models, and report."""
    say = talker()
    for shape, _ in plans.values():
        shape.check()
    check_writable(out)
    chosen = read_tokenizer(tokenizer) if tokenizer else train_tokenizer(books.train, vocab)
    length = max(recipe.length for _, recipe in plans.values())
    corpus = encode(books, chosen, length=length)
    say(f"{len(corpus.train)} training tokens, {len(corpus.held)} held out ({books.how})")
    outcomes = train_pair(out, plans, corpus, chosen, say)
    draft = out / "draft" if "draft" in outcomes else None
    figures = judge_pair(out / "target", draft, corpus, length)
    trained = {name: asdict(outcome) for name, outcome in outcomes.items()}
    report({**figures, "trained": trained, "out": str(out)}, books.how)


def train_drafter(out: Path, books: Books, minutes: float, sequences: int, seed: int) -> None:
    """Train a drafter on the hidden states of ``out/target``, into ``out/drafter``."""
    try:
        from demo_training.drafter.make import make_drafter
    except ModuleNotFoundError as error:
        raise ConfigError(f"training a drafter needs PyTorch (pip install torch): {error}") from error
    make_drafter(out, books, minutes, sequences, seed, talker())


def evaluate(target: Path, draft: Path, books: Books, length: int) -> None:
    """Evaluate two model folders on the held-out text, and report."""
    check_same_tokenizer(target, draft)
    corpus = encode(books, read_tokenizer(target), length=length, judge_only=True)
    report(judge_pair(target, draft, corpus, length), books.how)


def talker() -> Say:
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print


def pick_budget(steps: int | None, minutes: float | None, *, default: float) -> Budget:
    return Budget(steps, default if steps is None and minutes is None else minutes)


def pick_dtype(name: str | None) -> mx.Dtype:
    dtypes = {None: mx.bfloat16 if on_gpu() else mx.float32, "bfloat16": mx.bfloat16, "float32": mx.float32}
    if name not in dtypes:
        raise ConfigError(f"--dtype is float32 or bfloat16, not {name}.")
    return dtypes[name]


def main() -> None:
    try:
        app(prog_name="train_demo_model")
    except ConfigError as error:
        typer.echo(f"train_demo_model: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
