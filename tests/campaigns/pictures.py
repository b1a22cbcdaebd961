"""Sends hostile pictures to a server: ``python -m tests.campaigns.pictures [--count 200] [--seed 1]``.

Bombs, damaged files, wrong types, wrong base64, addresses of this machine and of others. Each has to get a 400 with one
sentence; nothing may be fetched (a listener counts its connections), no process may stay, and a picture that is in
order has to be answered afterwards as before.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "pictures")]

import seeing
import stages
from test_decoding import bomb

from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

Make = Callable[[random.Random, int], str]


def _damaged(dice: random.Random, _port: int) -> str:
    data = bytearray(seeing.png(dice.randrange(9, 90), dice.randrange(9, 90)))
    del data[dice.randrange(20, len(data) - 13) :]
    return seeing.data_url(bytes(data))


def _bomb(dice: random.Random, _port: int) -> str:
    return seeing.data_url(bomb(dice.randrange(9_000, 90_000), dice.randrange(9_000, 90_000)))


def _noise(dice: random.Random, _port: int) -> str:
    beginnings = (
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
        b"BM",
        b"II*\0",
        b"%PDF-",
    )
    return seeing.data_url(
        dice.choice(beginnings) + dice.randbytes(dice.randrange(900)), dice.choice(("png", "jpeg", "x"))
    )


def _wrong_type(dice: random.Random, _port: int) -> str:
    heads = ("text/html", "image/svg+xml", "application/json", "image/png;charset=utf-8", "", "image/")
    return f"data:{dice.choice(heads)}{dice.choice((';base64', ''))},PHN2Zz4="


def _not_base64(dice: random.Random, _port: int) -> str:
    return "data:image/png;base64," + "".join(dice.choice("ab=+/-_ \n%é") for _ in range(dice.randrange(1, 80)))


def _address(dice: random.Random, port: int) -> str:
    hosts = (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"user@127.0.0.1:{port}", "169.254.169.254")
    schemes = ("http", "https", "ftp", "gopher", "HTTP", "file", "//", "jar:http")
    return f"{dice.choice(schemes)}://{dice.choice(hosts)}/a.png"


def _file(dice: random.Random, _port: int) -> str:
    paths = (
        "/etc/passwd",
        "/dev/zero",
        "/proc/self/environ",
        "../../etc/passwd",
        "/dev/stdin",
        "a\0b",
        "~/.ssh/id_rsa",
    )
    return f"{dice.choice(('file://', 'file:', 'FILE://', ''))}{dice.choice(paths)}"


def _stretched(dice: random.Random, _port: int) -> str:
    return seeing.data_url(seeing.png(dice.randrange(900, 2000), 4))


KINDS: tuple[Make, ...] = (_damaged, _bomb, _noise, _wrong_type, _not_base64, _address, _file, _stretched)


def main() -> int:
    """Send them; 0 if all were refused as they should."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    dice, wrong, kinds = random.Random(asked.seed), list[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        met = _counting(listener)
        with stages.pipeline(seeing.save_talking(Path(name)), [2, 2]) as llm:
            server = Server(Service(llm, "talking"), Listen(port=0))
            before = _ask(server.port, seeing.data_url(seeing.png()))
            for i in range(asked.count):
                make = KINDS[i % len(KINDS)]
                url = make(dice, listener.getsockname()[1])
                status, said = _ask(server.port, url)
                kinds[f"{make.__name__[1:]}: {status}"] += 1
                if status != 400 or not said or "\n" in said or len(said) > 300:
                    wrong.append(f"{make.__name__} {url[:60]!r}: {status} {said!r:.200}")
            after = _ask(server.port, seeing.data_url(seeing.png()))
            server.close()
        left = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    print(*(f"{count:4} {kind}" for kind, count in sorted(kinds.items())), *wrong, sep="\n")
    print(f"{len(wrong)} wrong of {asked.count}; {len(met)} connections to addresses; {len(left)} processes left")
    return int(bool(wrong or met or left or before != after or before[0] != 200))


def _ask(port: int, url: str) -> tuple[int, str]:
    """The status, and the answer or the error's sentence."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    document = json.loads(answer.read())
    connection.close()
    said = document["error"]["message"] if "error" in document else document["choices"][0]["message"]["content"]
    return answer.status, str(said)


def _counting(listener: socket.socket) -> list[object]:
    """Connections that the listener gets."""
    met = list[object]()

    def accept() -> None:
        while True:
            try:
                met.append(listener.accept())
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    return met


if __name__ == "__main__":
    sys.exit(main())
