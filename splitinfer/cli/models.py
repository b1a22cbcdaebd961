"""`splitinfer models`: lists the weights on this machine, copies weights from other machines, and removes copies."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.options import ModelsSize, StoreDir, Timeout, Verbose, finite, store_of
from splitinfer.cli.running import say, show_table, tell
from splitinfer.common.endpoint import Endpoint
from splitinfer.common.plain_text import size
from splitinfer.errors import ConfigError

if TYPE_CHECKING:
    from splitinfer.engine.weights.copying import WeightReader
    from splitinfer.weights.models import ModelStore, StoredModel

from collections.abc import Iterable

models_app = typer.Typer(no_args_is_help=True, help="List, copy and remove weights on this machine.")

_Model = Annotated[str, typer.Argument(help="The model's name, or the fingerprint that `ls` shows.")]


@models_app.command("ls")
def ls(models_dir: StoreDir = None) -> None:
    """List the models on this machine: which layers of each, how many bytes, and where."""
    if rows := [*map(_row, _store(models_dir).models()), *_hub_rows()]:
        show_table(("model", "layers", "size", "fingerprint", "where"), rows)
    else:
        tell("there are no weights on this machine, neither copied nor from the hub")


@models_app.command("pull")
def pull(
    model: _Model,
    from_: Annotated[
        str | None, typer.Option("--from", help="A worker's address, host or tcp://host:port; the hub if not given.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="That worker's key; without one the link is not encrypted.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="First and last layer, as 20-39; all if not given.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, callback=finite, help="MB a second, at most.")
    ] = None,
    models_dir: StoreDir = None,
    models_gb: ModelsSize = None,
    timeout: Timeout = 10.0,
    verbose: Verbose = False,
) -> None:
    """Copy a model's weights to this machine, from a worker or from the hub; earlier copies stay."""
    span = _span(layers)
    if from_ is None:
        _pull_from_hub(model, span)
        return
    store = _store(models_dir, models_gb)
    with _reader(from_, key, timeout) as reader:
        _pull(reader, store, model, span, None if rate is None else rate * 1e6)


@models_app.command("rm")
def rm(model: _Model, models_dir: StoreDir = None) -> None:
    """Remove a model that was copied to this machine."""
    store = _store(models_dir)
    found = store.named(model)
    if len(found) != 1:
        if not found:
            raise ConfigError(f"nothing of {model} was copied to this machine; `splitinfer models ls` lists the copies")
        digests = ", ".join(one.digest[:12] for one in found)
        raise ConfigError(f"{len(found)} models here are called {model}; name one by its fingerprint: {digests}")
    freed = found[0].remove()
    tell(f"removed {found[0].manifest.model}: {size(freed)} freed in {store.path}")


def _pull(
    reader: "WeightReader", store: "ModelStore", model: str, span: tuple[int, int] | None, rate: float | None
) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from splitinfer.console import errors
    from splitinfer.engine.weights.copying import pull as pull_from

    columns = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as progress:
        task = progress.add_task("copying", total=None)
        done = pull_from(
            reader, store, model, span, lambda at, total: progress.update(task, completed=at, total=total), rate
        )
    manifest = done.stored.manifest
    tell(f"copied {size(done.nbytes)} of {manifest.model} ({_layers(done.stored)}) to {done.stored.folder}")
    if done.lacking:
        say(f"{reader.peer} lacks another {size(done.lacking)} of it; ask others for those")


def _pull_from_hub(model: str, span: tuple[int, int] | None) -> None:
    from splitinfer.models.folder.hub import fetch, open_model
    from splitinfer.models.load.loader import survey

    checkpoint = open_model(model)
    tensors = checkpoint.tensors if span is None else survey(checkpoint, *span, None).tensors
    fetch(model, checkpoint, tensors, lambda _done, _total, file: typer.echo(file, err=True) if file else None)
    tell(f"{model} is in {checkpoint.folder}")


def _reader(address: str, key: str | None, timeout: float) -> "WeightReader":
    from splitinfer.engine.links.connection import options_to
    from splitinfer.engine.weights.copying import WeightReader
    from splitinfer.errors import Refused
    from splitinfer.keyring import Keyring
    from transports import check_key

    if key is not None:
        try:
            check_key(key)
        except ValueError as error:
            raise ConfigError(f"--key: {error}") from error
    whole = str(Endpoint.parse(address))
    try:
        return WeightReader(whole, options_to(key, Keyring().own), timeout)
    except Refused as error:
        if key is not None:
            raise
        raise Refused(f"{error}; the worker printed its key when it started: give it with --key") from error


def _store(folder: str | None, gigabytes: float | None = None) -> "ModelStore":
    store = store_of(folder, gigabytes)
    if store is None:
        raise ConfigError("--models-dir none is for workers that copy nothing; name a folder here")
    return store


def _span(layers: str | None) -> tuple[int, int] | None:
    """Return the half-open range of layers that ``20-39`` or ``20`` names."""
    if layers is None:
        return None
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", layers)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(f"--layers {layers!r:.40} names no layers; give the first and the last, as 20-39")
    return first, last + 1


def _row(stored: "StoredModel") -> tuple[str, ...]:
    return stored.manifest.model, _layers(stored), size(stored.nbytes), stored.digest[:12], str(stored.folder)


def _layers(stored: "StoredModel") -> str:
    return layers_in(stored.tensors(), (info.name for info in stored.manifest.tensors))


def _hub_rows() -> list[tuple[str, ...]]:
    """Return the rows of the models that the hub's client has downloaded here."""
    from splitinfer.models.folder.hub import kept

    return [
        (model, count, size(sum(blob.stat().st_size for blob in folder.glob("blobs/*"))), "hub", str(folder))
        for model, count, folder in kept()
    ]


# -- the layers of tensors, by the numbers that nearly all models put into their names ---------------------------------

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def layers_in(names: Iterable[str], of: Iterable[str]) -> str:
    """Return in words the layers whose tensors are all among ``names``, and whether other tensors are there. ``of``:
    all tensors of the model.

    >>> of = [f"model.layers.{i}.{t}" for i in range(6) for t in "ab"] + ["model.norm", "lm_head"]
    >>> layers_in([name for name in of if ".1." in name or ".2." in name or ".5." in name], of)
    '1-2, 5'
    >>> layers_in(["model.layers.0.a", "model.norm"], of)
    'and others'
    >>> layers_in(of, of)
    'all'
    """
    here, whole = set(names), set(of)
    if here >= whole:
        return "all"
    missing = {_layer_of(name) for name in whole - here}
    layers = sorted(layer for layer in {_layer_of(name) for name in here} - missing if layer is not None)
    ranges = ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in _runs(layers))
    others = "and others" if any(_layer_of(name) is None for name in here) else ""
    return " ".join(filter(None, (ranges, others))) or "none"


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run in rising numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
