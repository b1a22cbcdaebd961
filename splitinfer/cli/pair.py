"""`splitinfer pair`: shows this machine's key, and changes the coordinators' keys that its workers admit."""

from typing import Annotated

import typer

from splitinfer.cli.running import say, tell


def pair(
    key: Annotated[
        str | None, typer.Argument(help="A coordinator's key, as `splitinfer pair` prints it there.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="A name for its owner.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Stop admitting it.")] = False,
) -> None:
    """Let another machine use this one's workers; without KEY, show the keys."""
    from splitinfer.keyring import Keyring, same_key

    keyring = Keyring()
    if key is None:
        public = keyring.own().public
        tell(f"this machine's key: {public}\nto admit it, run on a worker's machine: splitinfer pair {public}")
        for known in keyring.known():
            tell(f"admitted here: {known.key} {known.name}".rstrip())
        return
    if remove:
        say("it is no longer admitted" if keyring.forget(key) else "it was not admitted")
        return
    keyring.admit(key, name)
    say("admitted; running workers know it already")
    if key == keyring.own().public:
        why = f"If another machine printed it, that machine {same_key()}."
        say(f"It is this machine's own key, which only its own coordinators need. {why}")
