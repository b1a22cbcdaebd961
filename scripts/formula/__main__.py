"""`scripts/make_formula`: writes the formula of a released source archive to standard output."""

import argparse
import hashlib
import re
import sys
from pathlib import Path

from formula.lock import Archive, LockError, read_lock
from formula.ruby import OF_HOMEBREW, Release, formula

_NAME = re.compile(r"splitinfer-(?P<version>[^-]+)\.tar\.gz")


def main(arguments: list[str]) -> int:
    """The exit code. 1: no formula can be made; one sentence says why."""
    parser = argparse.ArgumentParser(prog="scripts/make_formula", description=__doc__)
    parser.add_argument("--lock", type=Path, required=True, help="pylock.toml (PEP 751) for macOS on Apple silicon")
    parser.add_argument("--sdist", type=Path, required=True, help="the released splitinfer-VERSION.tar.gz")
    parser.add_argument("--url", required=True, help="where that file can be downloaded")
    parser.add_argument("--homepage", required=True, help="the project's address")
    given = parser.parse_args(arguments)
    try:
        named = _NAME.fullmatch(given.sdist.name)
        if named is None:
            raise LockError(f"{given.sdist.name} is no source archive of splitinfer")
        digest = hashlib.sha256(given.sdist.read_bytes()).hexdigest()
        archives = read_lock(given.lock.read_text(encoding="utf-8"), frozenset({*OF_HOMEBREW, "splitinfer"}))
        release = Release(given.homepage, Archive("splitinfer", named["version"], given.url, digest))
        sys.stdout.write(formula(release, archives))
    except (LockError, OSError) as error:
        print(f"make_formula: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
