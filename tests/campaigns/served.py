"""What the campaigns of long prompts share: a pipeline of two processes behind HTTP, and a client of raw sockets."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from splitinfer.bench.shared.stand_in import stand_in_layout
from splitinfer.core.sequence import Sequence
from splitinfer.engine.coordinator.requests import RequestState
from splitinfer.llm import LLM, Settings
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

VOCAB = 2048
AT_MOST = 600.0  # seconds without a byte


def text_of(name: str, length: int) -> str:
    """Letters, of which the stand-in's tokenizer makes one token each."""
    rng = Random(name)
    return "".join(rng.choice("etaoinshrdlu ") for _ in range(length))


@dataclass(frozen=True)
class Served:
    """``sequences``: all that were submitted, in order."""

    llm: LLM
    server: Server
    sequences: list[Sequence]

    def ask(self, text: str, num_tokens: int) -> socket.socket:
        """Ask for a greedy answer as a stream, by a connection of its own."""
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "temperature": 0,
                "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True},
            }
        )  # fmt: skip
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=AT_MOST)
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection

    def answer(self, text: str, num_tokens: int) -> tuple[str, dict[str, Any]]:
        """An answer's text, and its usage."""
        with self.ask(text, num_tokens) as connection:
            return read(connection)


def read(connection: socket.socket) -> tuple[str, dict[str, Any]]:
    """A stream to its end: its text, and its usage."""
    parts = []
    while data := connection.recv(1 << 16):
        parts.append(data)
    lines = [line for line in b"".join(parts).split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]


@contextmanager
def served(context: int, **settings: Any) -> Iterator[Served]:
    """A random model with a long context, on two processes."""
    with LLM(str(stand_in_layout(2, vocab=VOCAB)), settings=Settings(context=context, **settings)) as llm:
        sequences, submit = list[Sequence](), llm._engine.submit

        def noted(state: RequestState) -> None:
            sequences.append(state.sequence)
            submit(state)

        llm._engine.submit = noted  # type: ignore[method-assign]
        with closing(Server(Service(llm, "campaign"), Listen(port=0))) as server:
            yield Served(llm, server, sequences)
