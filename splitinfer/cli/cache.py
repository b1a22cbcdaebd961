"""`splitinfer cache`: lists, removes and cleans up the KV stored on this machine's disk."""

from pathlib import Path
from typing import Annotated

import typer

from splitinfer.cli.running import say, show_table, tell
from splitinfer.common.plain_text import duration, size
from splitinfer.kvstore.files import DEFAULT_CAP, default_folder

cache_app = typer.Typer(no_args_is_help=True, help="List, remove and clean up the KV stored on this machine's disk.")

_Folder = Annotated[
    Path | None, typer.Option("--kv-dir", help="The folder; the one in your cache folder if not given.")
]


@cache_app.command("ls")
def ls(kv_dir: _Folder = None) -> None:
    """List the stored KV by model and layers, the last used first."""
    from splitinfer.kvstore.maintenance import look

    folder = kv_dir or default_folder()
    found = look(folder)
    if not found:
        tell(f"no KV is stored in {folder}")
        return
    rows = [
        (
            Path(one.model).name, f"{one.layers[0]}-{one.layers[1] - 1}", f"{one.num_blocks:,}", f"{one.num_tokens:,}",
            size(one.nbytes), f"{duration(one.used)} ago", one.arithmetic, one.group,
        )
        for one in found
    ]  # fmt: skip
    show_table(("model", "layers", "blocks", "tokens", "size", "last used", "computed in", "group"), rows)
    tell(f"{size(sum(one.nbytes for one in found))} in {folder}")


@cache_app.command("rm")
def rm(
    model: Annotated[str | None, typer.Argument(help="A model, or a group, as `ls` lists it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove all of it.")] = False,
    kv_dir: _Folder = None,
) -> None:
    """Remove the KV of one model, or all of it."""
    from splitinfer.kvstore.maintenance import remove

    folder = kv_dir or default_folder()
    if (model is None) != every:
        raise typer.BadParameter("name a model, or give --all" if model is None else "give a model or --all, not both")
    names = {None} if model is None else _groups_of(model, folder)
    if not names:
        say(f"no KV of {model} is stored in {folder}; `splitinfer cache ls` lists the stored KV")
        raise typer.Exit(1)
    removed = [remove(folder, name) for name in names]
    tell(f"removed {sum(n for n, _ in removed):,} files, {size(sum(count for _, count in removed))}")


def _groups_of(model: str, folder: Path) -> set[str]:
    """Return the groups that the name of a model or of a group stands for."""
    from splitinfer.kvstore.maintenance import look

    return {one.group for one in look(folder) if model in (one.model, Path(one.model).name, one.group)}


@cache_app.command("gc")
def gc(
    kv_dir: _Folder = None,
    kv_disk_gb: Annotated[
        float, typer.Option("--kv-disk-gb", min=0, max=1e9, help="GB to leave at most.")
    ] = DEFAULT_CAP / 1e9,
) -> None:
    """Check every file; remove damaged, incomplete and useless ones, then the oldest beyond the limit."""
    from splitinfer.kvstore.maintenance import clean

    done = clean(kv_dir or default_folder(), int(kv_disk_gb * 1e9))
    tell(
        f"removed {done.damaged} damaged files, {done.orphans} without those before them, {done.unfinished} unfinished "
        f"and {done.surplus} over the cap: {size(done.nbytes)}"
    )
