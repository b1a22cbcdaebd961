"""Films the front page's scene: a worker is killed in the middle of an answer, and the answer goes on.

A real coordinator and a real worker run the demo model on this machine, in processes of their own. What both print is
kept with its time, and drawn as an SVG that plays in a browser without a script. Nothing is sped up. The commands are
shown as they are typed on two Macs, without options of sampling; lines about loading are not shown. The same prompt is
answered before without a loss, and both answers must be equal.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "pulled.svg"
LAYOUT = """model: demo
stages:
  - {name: studio, layers: 6}
  - {name: mini, layers: 6, address: "tcp://127.0.0.1:PORT"}
"""
ASK = (
    "coord", "--raw", "--status", "--max-tokens", "180", "--temp", "0.4", "--top-p", "0.9", "--seed", "2",
    "--repetition-penalty", "1.1", "--kv-dir", "none", "--prompt", "The wolf came to the door and",
)  # fmt: skip
SHOWN = "splitinfer coord --layout mine.yaml --prompt 'The wolf came to the door and'"
WORKER = ("worker", "--name", "mini", "--kv-dir", "none", "--port")
KILLED_AFTER, AWAY, AT_END = 60, 2.5, 5.0  # characters of the answer; seconds
_BEHIND = 0.2  # seconds by which the last line comes after the text that was printed before it, on another pipe
_FRAME = 0.12  # seconds: what comes within it appears at once
_WIDTH, _LINE, _CHAR = 92, 18, 7.83  # characters of a line, its height, the width of a character at 13 px


class Piece(NamedTuple):
    """What was printed at a time since the film's begin, and how it is drawn."""

    at: float
    text: str
    style: str = ""


class Process:
    """A splitinfer command whose output is kept with its times."""

    def __init__(self, name: str, words: Sequence[str], folder: Path) -> None:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name] if shutil.which("unshare") else []
        command = [*named, sys.executable, "-u", "-m", "splitinfer", *words]
        environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        self.pieces: list[tuple[float, str, bool]] = []
        self._threads = [threading.Thread(target=self._read, args=(is_error,)) for is_error in (False, True)]
        for thread in self._threads:
            thread.start()

    def _read(self, is_error: bool) -> None:
        pipe = self.popen.stderr if is_error else self.popen.stdout
        while data := pipe.read1(4096):  # type: ignore[union-attr]
            self.pieces.append((time.monotonic(), data.decode(errors="replace"), is_error))

    def text(self, is_error: bool) -> str:
        return "".join(text for _, text, kind in self.pieces if kind == is_error)

    def wait_for(self, happened: str | int, seconds: float = 60.0) -> None:
        """Until standard error has a text, or standard output so many characters."""
        deadline = time.monotonic() + seconds
        while len(self.text(False)) < happened if isinstance(happened, int) else happened not in self.text(True):
            if time.monotonic() > deadline or self.popen.poll() is not None:
                raise SystemExit(f"{happened!r} did not come: {self.text(True)}")
            time.sleep(0.02)

    def end(self, sign: int | None = None) -> None:
        if sign is not None:
            self.popen.send_signal(sign)
        self.popen.wait(60)
        for thread in self._threads:
            thread.join()


def play(folder: Path, port: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces of the coordinator's window and of the worker's."""
    worker = (*WORKER, str(port))
    (folder / "mine.yaml").write_text(LAYOUT.replace("PORT", str(port)))
    ask = [*ASK[:1], "--layout", str(folder / "mine.yaml"), *ASK[1:]]
    first = Process("mini", worker, folder)
    first.wait_for("waits at")
    undisturbed = Process("studio", ask, folder)
    undisturbed.end()
    asked = time.monotonic()
    coordinator = Process("studio", ask, folder)
    coordinator.wait_for(KILLED_AFTER)
    killed = time.monotonic()
    first.end(signal.SIGKILL)
    time.sleep(AWAY)
    again = time.monotonic()
    second = Process("mini", worker, folder)
    coordinator.end()
    second.end(signal.SIGTERM)
    if coordinator.text(False) != undisturbed.text(False):
        raise SystemExit("the answer is not the one without a loss")
    begin = next(at for at, _, is_error in coordinator.pieces if not is_error) - 1.0
    studio = [Piece(0, f"studio ~ % {SHOWN}\n", "typed")]
    in_order = sorted(coordinator.pieces, key=lambda piece: piece[0] + ("tok/s" in piece[1]) * _BEHIND)
    for at, text, is_error in in_order:
        lines = [line for line in text.splitlines(keepends=True) if not (is_error and "needs" in line)]
        shown = "".join(lines)
        if shown:
            separated = f"\n{shown}" if is_error and not studio[-1].text.endswith("\n") else shown
            studio.append(Piece(max(0.0, at - begin), separated, "notice" if is_error else ""))
    typed = "mini ~ % splitinfer worker --host 0.0.0.0\n"
    mini = [Piece(0, typed, "typed")]
    mini += [Piece(0, text) for at, text, _ in first.pieces if at > asked]
    mini += [Piece(killed - begin, "(the worker is killed)\n", "notice"), Piece(again - begin, typed, "typed")]
    mini += [Piece(at - begin, text) for at, text, _ in second.pieces]
    return studio, mini


def laid_out(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Lines of pieces, broken between words."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for at, text, style in pieces:
        for word in _words(text):
            if word == "\n":
                lines.append([])
                used = 0
                continue
            if used + len(word) > _WIDTH and word.startswith(" "):
                lines.append([])
                used = 0
            shown = word if used else word.lstrip()
            lines[-1].append(Piece(at, shown, style))
            used += len(shown)
    return lines


def _words(text: str) -> list[str]:
    found = [""]
    for letter in text:
        if letter == "\n":
            found += ["\n", ""]
        elif letter == " ":
            found += [" "]
        else:
            found[-1] += letter
    return [word for word in found if word]


def drawn(windows: Sequence[tuple[str, list[Piece]]]) -> str:
    """The SVG. Each piece is hidden until its time; where animations are off, all is shown."""
    laid = [(title, laid_out(pieces)) for title, pieces in windows]
    end = max(piece.at for _, pieces in windows for piece in pieces) + AT_END
    frames: set[int] = set()
    body, top = [], 0
    width = round(_WIDTH * _CHAR) + 32
    for title, lines in laid:
        while lines and not lines[-1]:
            lines.pop()
        height = len(lines) * _LINE + 44
        body.append(f'<rect y="{top}" width="{width}" height="{height}" rx="8"/>')
        body.append(f'<text x="16" y="{top + 20}" class="title">{escape(title)}</text>')
        for number, line in enumerate(lines):
            spans = []
            for frame, style, text in _merged(line):
                frames.add(frame)
                names = f"f{frame} {style}".strip()
                spans.append(f'<tspan class="{names}">{escape(text)}</tspan>')
            if spans:
                y = top + 46 + number * _LINE
                body.append(f'<text x="16" y="{y}" xml:space="preserve">{"".join(spans)}</text>')
        top += height + 8
    rules = []
    for frame in sorted(frames - {0}):
        share = f"{100 * frame * _FRAME / end:.2f}%"
        rules.append(f"@keyframes k{frame}{{0%{{opacity:0}}{share},100%{{opacity:1}}}}")
        rules.append(f".f{frame}{{animation:k{frame} {end:.1f}s step-end infinite}}")
    style = (
        "rect{fill:#1d2026}text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d5d8dd}"
        ".title{fill:#8a9099;font-weight:bold}.typed{fill:#8fd3ff}.notice{fill:#ffb86b}"
        "@media(prefers-reduced-motion:no-preference){" + "".join(rules) + "}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top - 8}" width="{width}">'
        f"<style>{style}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _merged(line: Sequence[Piece]) -> list[tuple[int, str, str]]:
    merged: list[tuple[int, str, str]] = []
    for at, text, style in line:
        frame = round(at / _FRAME)
        if merged and merged[-1][:2] == (frame, style):
            merged[-1] = (frame, style, merged[-1][2] + text)
        else:
            merged.append((frame, style, text))
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    parser.add_argument("--port", type=int, default=5577, help="that the worker takes on this machine")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        studio, mini = play(Path(folder), asked.port)
    asked.out.write_text(drawn([("studio: coordinator", studio), ("mini: worker", mini)]))
    print(f"{asked.out}: {asked.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
