"""Make a demo pair from a folder of text: one tokenizer, a target model and a smaller draft.

What is trained. mlx-lm's own ``llama`` model, so what is trained is exactly what is loaded later. The
target and the draft learn separately, each to predict the next token (plain cross-entropy); they share
a byte-level BPE tokenizer, which is all that speculative decoding asks of them.

What is held out. By default the last 3 % of every file's characters, cut back to a line end; with
``--held-book`` whole files, and then nothing else. Neither the models nor a tokenizer made here see any
of it. The tail of a book whose beginning was read is easier than a book never opened, so a
figure means little without saying which of the two it is; the report does say.

    file    |  training text                              |  held  |
            0                                        ~0.97 n       n     (n characters)

The optimizer. AdamW, with weight decay on the matrices only (a norm's gain has no reason to shrink),
gradients clipped to norm 1. The learning rate climbs linearly over the first steps and then follows half
a cosine down to 5 % of its peak. The cosine runs over the spent share of the budget, in steps or in
minutes, whichever is further on: a slow machine takes fewer steps and still ends at a low rate.

Arithmetic. The weights and the optimizer's state are float32; a step computes with a bfloat16 copy on a
GPU and in float32 on a CPU, where bfloat16 has no fast path. Saved weights are float16.

How it is judged. Bits per byte = nats per token / ln 2 / bytes per token, the last measured on the
held-out text; unlike nats per token it compares models with different tokenizers. Draft agreement is
the share of held-out positions where the draft's likeliest next token is also the target's, both reading
the true text: the share of greedy drafts that would stand. Both come from the saved folders, so they
judge what a person will load. The text is read in windows of ``--length`` tokens, each from no context.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import typer
from mlx import nn
from mlx import optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm import load
from mlx_lm.models import llama
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from splitinfer.core.json_text import dumps
from splitinfer.errors import ConfigError

END = "<|end|>"  # between texts, and what a model says when it has finished
SPECIAL_TOKENS = [END, "<|user|>", "<|tale|>"]
# Nothing between a person's words and the answer: what was generated is then what the next turn's prompt says.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] != 'user' and not loop.last %}\n\n{% endif %}{% endfor %}"
)
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}  # so small a model repeats itself when greedy
MAX_POSITIONS = 4096
WEIGHTS = "model.safetensors"
WARMUP_STEPS = 100
FLOOR = 0.05  # of the peak learning rate, at the end of the cosine
SECONDS_BETWEEN_CHECKPOINTS = 120.0
DEFAULT_MINUTES, DEFAULT_DRAFT_MINUTES = 38.0, 8.0  # what the shipped pair had, on two processors
PROBE_WINDOWS = 16  # held-out windows looked at while training
MOST_WINDOWS = 512  # ... and at the end, spread over all of the held-out text

Tokens = npt.NDArray[np.int32]
Model = Any  # mlx-lm carries no types
Say = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """The sizes of one model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    def check(self) -> None:
        if min(asdict(self).values()) < 1:
            raise ConfigError(f"every size of a model must be at least 1, not {asdict(self)}.")
        if self.hidden % (2 * self.heads):
            raise ConfigError(f"{self.hidden} hidden units do not make {self.heads} heads of an even size.")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly.")

    def config(self, vocab: int) -> dict[str, Any]:
        """The config.json of such a model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": vocab,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


@dataclass(frozen=True)
class Budget:
    """How long to train; with both bounds, the one reached first."""

    steps: int | None = None
    minutes: float | None = None

    def spent(self, step: int, seconds: float) -> float:
        """The share of it that is gone; 1 or more ends the training."""
        by_step = step / self.steps if self.steps else 0.0
        by_clock = seconds / 60 / self.minutes if self.minutes else 0.0
        return max(by_step, by_clock)

    def warmup(self) -> int:
        return max(1, min(WARMUP_STEPS, self.steps // 10)) if self.steps else WARMUP_STEPS


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    budget: Budget
    peak_lr: float
    batch: int = 8
    length: int = 512
    seed: int = 0
    dtype: mx.Dtype = mx.float32


Plans = dict[str, tuple[Shape, Recipe]]  # by the name of the folder, in the order of training


@dataclass(frozen=True)
class Books:
    """Text cut in two, one item per file; a file wholly held out has no training text, and the reverse."""

    train: list[str]
    held: list[str]
    how: str  # what was held out, in words


@dataclass(frozen=True)
class Corpus:
    """The same as token ids, texts separated by END."""

    train: Tokens
    held: Tokens
    bytes_per_token: float  # of the held-out text


@dataclass(frozen=True)
class Outcome:
    """What one training run did."""

    steps: int
    tokens: int
    seconds: float
    last_loss: float  # nats per token of the last batch


@dataclass(frozen=True)
class Judgement:
    """One model on the held-out text."""

    parameters: int
    nats_per_token: float
    bits_per_byte: float


def named(model: Model) -> dict[str, mx.array]:
    """Every weight under the name it is saved by."""
    return dict(tree_flatten(model.parameters()))


def on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


def number(scalar: mx.array) -> float:
    return cast(float, scalar.item())


# ---- text -----------------------------------------------------------------------------------------


def read_books(folder: Path, *, held_share: float = 0.03, held_books: Sequence[str] = ()) -> Books:
    """Read every .txt under a folder and set the held-out part of each aside."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.")
    paths = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    if not paths:
        raise ConfigError(f"{folder} holds no .txt file to learn from.")
    if unknown := set(held_books) - {path.stem for path in paths}:
        raise ConfigError(f"{folder} has no book called {', '.join(sorted(unknown))} to hold out.")
    train, held = [], []
    for path in paths:
        share = held_share if not held_books else float(path.stem in held_books)
        early, late = cut(read_text(path), share)
        train.append(early)
        held.append(late)
    whole = f"whole books: {', '.join(sorted(held_books))}"
    tails = f"the last {held_share * 100:g} % of each of {len(paths)} files"
    return Books([t for t in train if t], [h for h in held if h], whole if held_books else tails)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): convert it or take it away.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def cut(text: str, held_share: float) -> tuple[str, str]:
    """Training text and held-out tail; the cut falls just after a line end where there is one before it."""
    at = round(len(text) * (1 - held_share))
    at = (text.rfind("\n", 0, at) + 1 or at) if at < len(text) else at
    return text[:at], text[at:]


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """A byte-level BPE: every text can be written with it, and END has id 0."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab < len(SPECIAL_TOKENS) + len(alphabet):
        least = len(SPECIAL_TOKENS) + len(alphabet)
        raise ConfigError(f"a vocabulary of {vocab} is too small: bytes and special tokens alone take {least}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    # By lines: the trainer counts words, and one string per book would leave it a single processor.
    lines = (line for text in texts for line in text.splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer.json of a model folder, or the file itself."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer at {file}.")
    return Tokenizer.from_file(str(file))


def encode(books: Books, tokenizer: Tokenizer, *, length: int, judge_only: bool = False) -> Corpus:
    """Turn the books into ids, and refuse them where there is not one window on either side."""
    train = np.empty(0, np.int32) if judge_only else to_ids(books.train, tokenizer)
    held = to_ids(books.held, tokenizer)
    least = min(len(held), len(held) if judge_only else len(train))
    if least <= length:
        raise ConfigError(
            f"there is too little text: {len(train)} tokens to train on and {len(held)} held out, "
            f"where --length {length} needs {length + 1} of each; add text, or lower --length."
        )
    num_bytes = sum(len(text.encode()) for text in books.held)
    return Corpus(train, held, bytes_per_token=num_bytes / (len(held) - len(books.held)))


def to_ids(texts: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    end = tokenizer.token_to_id(END) or 0
    ids = [np.array([*tokenizer.encode(text).ids, end], np.int32) for text in texts]
    return np.concatenate(ids) if ids else np.empty(0, np.int32)


def windows(ids: Tokens, length: int, *, most: int) -> Tokens:
    """[count, length + 1]: non-overlapping in what they predict; if there are too many, evenly spread ones."""
    count = (len(ids) - 1) // length
    chosen = np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(int)
    return np.stack([ids[i * length : i * length + length + 1] for i in chosen])


# ---- training -------------------------------------------------------------------------------------


def build(config: dict[str, Any], seed: int) -> Model:
    """An untrained model: small normal matrices, smaller still where a layer adds to the residual stream."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    residual_std = 0.02 / math.sqrt(2 * config["num_hidden_layers"])

    def draw(path: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return mx.ones_like(weight)
        std = residual_std if path.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        return mx.random.normal(weight.shape, scale=std)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


def learning_rate(peak: float, *, step: int, warmup: int, spent: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, spent)))
    return peak * min(1.0, (step + 1) / warmup) * (FLOOR + (1 - FLOOR) * cosine)


def make_optimizer(peak_lr: float) -> Any:
    def is_matrix(_path: str, weight: mx.array) -> bool:
        return weight.ndim >= 2

    decaying, plain = (
        optim.AdamW(peak_lr, betas=[0.9, 0.95], weight_decay=decay, bias_correction=True) for decay in (0.1, 0.0)
    )
    return optim.MultiOptimizer([decaying, plain], [is_matrix])


def make_step(model: Model, optimizer: Any, dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    """One update: tokens [batch, length + 1] → loss. The model holds the float32 weights between calls."""

    def loss_of(weights: Any, tokens: mx.array) -> mx.array:
        model.update(tree_map(lambda w: w.astype(dtype), weights))
        logits = model(tokens[:, :-1]).astype(mx.float32)
        loss: mx.array = nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")
        return loss

    def step(tokens: mx.array) -> mx.array:
        weights = model.parameters()
        loss, gradients = mx.value_and_grad(loss_of)(weights, tokens)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        model.update(optimizer.apply_gradients(gradients, weights))
        return loss

    optimizer.init(model.trainable_parameters())
    if not on_gpu():  # no faster there, and it would need a C++ compiler at hand
        return step
    state = [model.state, optimizer.state]
    return mx.compile(step, inputs=state, outputs=state)


def draw_batch(rng: np.random.Generator, ids: Tokens, recipe: Recipe) -> mx.array:
    starts = rng.integers(0, len(ids) - recipe.length, recipe.batch)
    return mx.array(np.stack([ids[at : at + recipe.length + 1] for at in starts]))


def train(
    model: Model,
    corpus: Corpus,
    recipe: Recipe,
    *,
    save: Callable[[], None],
    say: Say,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train until the budget is spent or ``should_stop``, a step at least; ``save`` now and then, and at the end."""
    optimizer = make_optimizer(recipe.peak_lr)
    run = make_step(model, optimizer, recipe.dtype)
    rng = np.random.default_rng(recipe.seed)
    probe = windows(corpus.held, recipe.length, most=PROBE_WINDOWS)
    step, loss = 0, mx.array(math.nan)
    started = saved = time.monotonic()
    while (spent := recipe.budget.spent(step, time.monotonic() - started)) < 1 and not (step and should_stop()):
        optimizer.learning_rate = learning_rate(recipe.peak_lr, step=step, warmup=recipe.budget.warmup(), spent=spent)
        previous, loss = loss, run(draw_batch(rng, corpus.train, recipe))
        mx.async_eval(loss, model.parameters(), optimizer.state)  # type: ignore[no-untyped-call]
        mx.eval(previous)  # one step stays in flight: the GPU need not wait for the next batch
        step += 1
        if time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
            save()
            say(progress(step, time.monotonic() - started, recipe, number(loss), judge(model, probe)[0]))
            saved = time.monotonic()
    last_loss = number(loss)
    seconds = time.monotonic() - started
    save()
    say(progress(step, seconds, recipe, last_loss, judge(model, probe)[0]))
    return Outcome(step, step * recipe.batch * recipe.length, seconds, last_loss)


def progress(step: int, seconds: float, recipe: Recipe, loss: float, held: float) -> str:
    tokens = step * recipe.batch * recipe.length
    return (
        f"{seconds / 60:6.1f} min, step {step}, {tokens / 1e6:.2f} M tokens, {tokens / max(seconds, 1e-9):.0f} tok/s, "
        f"loss {loss:.3f}, held out {held:.3f} nats/token"
    )


# ---- folders --------------------------------------------------------------------------------------


def check_writable(out: Path) -> None:
    """Find out before the training, not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".probe").touch()
        (out / ".probe").unlink()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from error


def open_folder(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Make a model folder and put everything but the weights in it."""
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    tokenizer_config = {**names, "model_max_length": MAX_POSITIONS, "chat_template": CHAT_TEMPLATE}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS).unlink(missing_ok=True)  # of another run: they would not fit the new config
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(SAMPLING, indent=1) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n")
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from error


def save_weights(model: Model, folder: Path) -> None:
    """Float16, whole or not at all: a reader, or a power cut, meets the old weights or the new ones."""
    weights = {name: w.astype(mx.float16) for name, w in named(model).items()}
    partial = folder / f".partial-{WEIGHTS}"  # mlx-lm reads "model*.safetensors", and so never this one
    try:
        mx.save_safetensors(str(partial), weights, metadata={"format": "mlx"})
        partial.replace(folder / WEIGHTS)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the weights cannot be written to {folder}: {error}") from error


# ---- judging --------------------------------------------------------------------------------------


def judge(model: Model, held: Tokens, *, batch: int = 8) -> tuple[float, Tokens]:
    """Nats per token over the windows, and the likeliest next token at each of their positions."""
    nats, likeliest = 0.0, []
    for at in range(0, len(held), batch):
        tokens = mx.array(held[at : at + batch])
        logits = model(tokens[:, :-1]).astype(mx.float32)
        nats += number(nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="sum"))
        likeliest.append(np.array(mx.argmax(logits, axis=-1), np.int32))
    greedy = np.concatenate(likeliest)
    return nats / greedy.size, greedy


def judge_folder(folder: Path, corpus: Corpus, length: int) -> tuple[Judgement, Tokens]:
    """Judge saved weights, in float32: float16 matrices are slow on a CPU and the figure is the same."""
    try:
        model = load(str(folder))[0]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} does not load as a model: {error}") from error
    model.set_dtype(mx.float32)
    nats, greedy = judge(model, windows(corpus.held, length, most=MOST_WINDOWS))
    parameters = sum(w.size for w in named(model).values())
    return Judgement(parameters, nats, nats / math.log(2) / corpus.bytes_per_token), greedy


def judge_pair(target: Path, draft: Path | None, corpus: Corpus, length: int) -> dict[str, Any]:
    """The figures of the last line: each model's, and the share of positions on which the two agree."""
    judgement, greedy = judge_folder(target, corpus, length)
    figures: dict[str, Any] = {"target": asdict(judgement), "draft": None, "draft_agreement": None}
    if draft is not None:
        judgement, guess = judge_folder(draft, corpus, length)
        figures |= {"draft": asdict(judgement), "draft_agreement": float((greedy == guess).mean())}
    return figures | {"judged_tokens": greedy.size, "bytes_per_token": corpus.bytes_per_token}


def check_same_tokenizer(target: Path, draft: Path) -> None:
    if read_tokenizer(target).get_vocab() != read_tokenizer(draft).get_vocab():
        raise ConfigError(f"{target} and {draft} do not share a tokenizer, so the draft cannot speak for the target.")


# ---- the command ----------------------------------------------------------------------------------


@contextmanager
def first_interrupt_stops() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the training to end after its step; a second one breaks off as usual."""
    asked = threading.Event()
    usual = signal.getsignal(signal.SIGINT)

    def ask(_number: int, _frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, usual)


def train_folder(
    folder: Path, shape: Shape, recipe: Recipe, corpus: Corpus, tokenizer: Tokenizer, *, say: Say, stop: Any
) -> Outcome:
    config = shape.config(tokenizer.get_vocab_size())
    open_folder(folder, config, tokenizer)
    model = build(config, recipe.seed)
    return train(model, corpus, recipe, save=lambda: save_weights(model, folder), say=say, should_stop=stop)


def train_pair(out: Path, plans: Plans, corpus: Corpus, tokenizer: Tokenizer, say: Say) -> dict[str, Outcome]:
    """Train what ``plans`` names, in its order; an interrupt ends it, with what is trained so far saved."""
    outcomes: dict[str, Outcome] = {}
    device = "the GPU" if on_gpu() else "the CPU"
    with first_interrupt_stops() as stop:
        for name, (shape, recipe) in plans.items():
            if not stop():
                say(f"{name}: {shape.layers} layers of {shape.hidden}, {str(recipe.dtype).split('.')[-1]} on {device}")
                outcomes[name] = train_folder(out / name, shape, recipe, corpus, tokenizer, say=say, stop=stop)
    return outcomes


def figures_table(figures: dict[str, Any], how: str) -> Table:
    table = Table(title=f"held out: {how}", title_justify="left", title_style="")
    table.add_column("model")
    for heading in ("parameters", "nats/token", "bits/byte", "agreement"):
        table.add_column(heading, justify="right")
    for name in ("target", "draft"):
        if row := figures[name]:
            agreement = f"{figures['draft_agreement']:.1%}" if name == "draft" else ""
            nats, bits = f"{row['nats_per_token']:.3f}", f"{row['bits_per_byte']:.3f}"
            table.add_row(name, f"{row['parameters']:,}", nats, bits, agreement)
    return table


def report(figures: dict[str, Any], how: str) -> None:
    """A table for a person, then one line for a program."""
    Console().print(figures_table(figures, how))
    typer.echo(dumps({"held_out": how, **figures}))


def judge_only(target: Path, draft: Path, books: Books, length: int) -> None:
    check_same_tokenizer(target, draft)
    corpus = encode(books, read_tokenizer(target), length=length, judge_only=True)
    report(judge_pair(target, draft, corpus, length), books.how)


def make_pair(out: Path, plans: Plans, books: Books, tokenizer: Path | None, vocab: int) -> None:
    """Tokenizer, training, judgement, report."""
    say: Say = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
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


def pick_dtype(name: str | None) -> mx.Dtype:
    dtypes = {None: mx.bfloat16 if on_gpu() else mx.float32, "bfloat16": mx.bfloat16, "float32": mx.float32}
    if name not in dtypes:
        raise ConfigError(f"--dtype is float32 or bfloat16, not {name}.")
    return dtypes[name]


def pick_budget(steps: int | None, minutes: float | None, *, default: float) -> Budget:
    return Budget(steps, default if steps is None and minutes is None else minutes)


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def train_demo_model(
    corpus: Annotated[Path, typer.Argument(help="A folder of .txt files (UTF-8), looked through at any depth.")],
    out: Annotated[Path | None, typer.Argument(help="Where OUT/target and OUT/draft go.")] = None,
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
    held_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Hold out this share of each file's end.")] = 0.03,
    held_book: Annotated[list[str] | None, typer.Option(help="Hold out this whole file (no .txt) instead.")] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    draft_lr: float = 3e-3,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=1, max=MAX_POSITIONS)] = 512,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 [bfloat16 on a GPU, else float32].")] = None,
    seed: int = 0,
    keep_target: Annotated[bool, typer.Option("--keep-target", help="Train only the draft of OUT/target.")] = False,
    evaluate_only: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="TARGET DRAFT", help="Train nothing; judge these two folders.")
    ] = None,
) -> None:
    """Train a target and a draft model on a folder of text, and judge them on text they have not seen.

    Ctrl-C ends the training early; what is trained by then is saved and judged. The last line of
    stdout is one JSON document.
    """
    books = read_books(corpus, held_share=held_share, held_books=held_book or ())
    if evaluate_only:
        judge_only(*evaluate_only, books, length)
        return
    if out is None:
        raise ConfigError("OUT is missing: say where the two models go.")
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


def main() -> None:
    try:
        app(prog_name="train_demo_model")
    except ConfigError as error:
        typer.echo(f"train_demo_model: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
