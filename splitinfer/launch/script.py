"""What is sent to a machine: a script for its /bin/sh, which looks for splitinfer there and asks it. Pure.

`ssh HOST COMMAND` runs the login shell of that user, whichever it is, not as a login shell: PATH is the system's own
(sshd(8), "Login process"), without what ~/.zprofile adds (0xSero/litter #1: Homebrew's programs are not found). So the
command is only ``/bin/sh -s``, which every shell reads alike, the script comes on standard input, and looks where
programs are:

    PATH                                            whatever sshd or ~/.zshenv has put there
    $XDG_BIN_HOME, $XDG_DATA_HOME/../bin,
    ~/.local/bin                                    uv's tools, and pipx (uv's manual, "Storage": executable directory)
    ~/.local/share/{uv/tools,pipx/venvs}/...        their environments, where no link was made
    /opt/homebrew/bin, /usr/local/bin, ...          Homebrew on Apple silicon, elsewhere
    the same place as here                          a clone with its .venv
    python3 -m splitinfer                           an environment that is on PATH

macOS's own /usr/bin/python3 is not asked unless Apple's developer tools are there: it would open a dialog on that
screen.

Lines of the answer begin with a mark that nobody can guess, because a shell's own files may print what they like. A
program of another version is not the end: one of the same version may be found behind it.
"""

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from string import Template

ANSWERED, OTHER_VERSION = 0, 3
"""Exit codes of `splitinfer on-host`: it has answered; it has said its versions and done nothing."""


class _Script(Template):
    delimiter = "^"  # "$" is the shell's


_SCRIPT = _Script("""\
main() {  # a function, so that all of it is read before anything runs
mark=^mark
request=^request
tried=:
ask() {
  "$@" on-host -- "$mark" "$request" "$@" </dev/null
  code=$?
  [ $code = 0 ] && exit 0
  [ $code = 3 ] || printf '%s failed %s\\n' "$mark" "$*"
}
^first
for program in \\
  "$(command -v splitinfer)" \\
  "${UV_TOOL_BIN_DIR:-/nowhere}/splitinfer" \\
  "${XDG_BIN_HOME:-/nowhere}/splitinfer" \\
  "${XDG_DATA_HOME:-/nowhere}/../bin/splitinfer" \\
  "$HOME/.local/bin/splitinfer" \\
  /opt/homebrew/bin/splitinfer \\
  /usr/local/bin/splitinfer \\
  /home/linuxbrew/.linuxbrew/bin/splitinfer \\
  "${XDG_DATA_HOME:-$HOME/.local/share}/uv/tools/splitinfer/bin/splitinfer" \\
  "$HOME/.local/share/pipx/venvs/splitinfer/bin/splitinfer" \\
  "$HOME/.local/pipx/venvs/splitinfer/bin/splitinfer" \\
  "$HOME/Library/Application Support/pipx/venvs/splitinfer/bin/splitinfer" \\
  ^here
do
  case "$tried" in *":$program:"*) continue;; esac
  tried="$tried$program:"
  [ -f "$program" ] && [ -x "$program" ] && ask "$program"
done
for python in "$(command -v python3)" "$(command -v python)"; do
  [ -n "$python" ] || continue
  case "$python" in /usr/bin/*) [ "$(uname)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || continue;; esac
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("splitinfer") is None)' </dev/null 2>/dev/null &&
    ask "$python" -m splitinfer
done
printf '%s none\\n' "$mark"
}
main
""")


def script(mark: str, request: str, program: Sequence[str] = (), here: str | None = None, home: str = "/") -> str:
    """The script that has a machine carry out ``request``.

    ``program``: the command that answered before, tried first. ``here``: the path of this machine's own command, and
    ``home`` its user's folder: the same place there may have one.
    """
    return _SCRIPT.substitute(
        mark=shlex.quote(mark),
        request=shlex.quote(request),
        first=f"ask {shlex.join(program)}" if program else "",
        here="" if here is None else _same_place(here, home),
    )


def _same_place(path: str, home: str) -> str:
    """Where ``path`` would be in the folder of another user, as a word for a shell."""
    inside = PurePosixPath(path)
    if home == "/" or not inside.is_relative_to(home):
        return shlex.quote(path)
    return '"$HOME"/' + shlex.quote(str(inside.relative_to(home)))
