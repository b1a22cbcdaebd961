"""Copies over encrypted links, emulated or not, that are killed; and strangers who ask a worker for weights.

    python -m tests.campaigns.copies --megabytes 256 --kills 20 --strangers 30

A child process copies a model of random bytes from this process, over an encrypted link of a gigabit, ten gigabits, or
as it is, and is killed (-9) at random moments of the first; then it is let finish. Bytes are counted where they are
sent, so what was under way when the child was killed counts as sent twice. The link's own limit is what the same two
processes reach on the same link with frames of one piece that nobody reads from a disk, hashes or writes. Seconds of
processors are of both ends together: where both run on one machine with two of them, those are the limit. What would be
the limit on machines with a processor for each thread is the busiest thread of either end, for the same bytes.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from measuring import busiest, thread_seconds
from weights import CONFIG

from splitinfer.core.json_text import dumps
from splitinfer.core.tensor_info import TensorInfo
from splitinfer.engine.files.answering import Answers, find_running
from splitinfer.engine.files.copying import Remote, ask_manifest, pull
from splitinfer.engine.files.reader import Reader
from splitinfer.engine.links.connection import Connection
from splitinfer.errors import PeerError
from splitinfer.models.checkpoint import data_begin, open_folder, read_header
from splitinfer.store.copied_file import header_of
from splitinfer.store.models import ModelStore
from splitinfer.store.ranges import PIECE
from splitinfer.wire import codec
from splitinfer.wire.messages import AskManifest, AskRanges, Hello, Message, Range, Welcome
from splitinfer.wire.session import Session
from transports import Frame, KeyPair, Link, LinkClosed, LinkOptions, Listener, Security, TransportError, listen

from .strangers import Victim, encrypted

ROOT = Path(__file__).resolve().parents[2]
NAME = "campaign/model"
LINKS = {"1gbe": "emulated+tcp://127.0.0.1:0?link=1gbe", "10gbe": "emulated+tcp://127.0.0.1:0?link=10gbe",
         "as it is": "tcp://127.0.0.1:0"}  # fmt: skip
HERE, THERE = KeyPair.make(), KeyPair.make()
_CHILD = """
import json, sys, time
from pathlib import Path
from typing import Any
sys.path[:0] = {paths!r}
from measuring import busiest, thread_seconds, touch
sys.setswitchinterval(0.0005)  # as the command line does
from splitinfer.engine.files.copying import pull
from splitinfer.engine.files.reader import Reader
from splitinfer.store.models import ModelStore
from transports import KeyPair, LinkOptions, Security, connect
options, cpu = LinkOptions(security=Security(KeyPair(*{own!r}), {peer!r})), time.process_time()
if {touched!r}:
    touch(Path({store!r} + ".touched"), {touched!r})
    cpu = time.process_time()
ran, now = thread_seconds(), dict()
def report(at, total):
    marks.append((time.monotonic(), at))
    now.update(thread_seconds())
if {drain!r}:
    link, took, begun = connect({address!r}, timeout=10, options=options), 0, None
    while took < {drain!r}:
        took += sum(memoryview(part).nbytes for part in link.recv(timeout=60).parts)
        begun = begun or (time.monotonic(), took)
    seconds = time.monotonic() - begun[0]
    found = {{"cpu": time.process_time() - cpu, "busiest": busiest(ran, thread_seconds())}}
    print(json.dumps({{"rate": (took - begun[1]) / seconds, **found}}), flush=True)
    link.close()
else:
    with Reader({address!r}, options, 10.0) as reader:
        print("connected", flush=True)
        marks, store = [], ModelStore(Path({store!r}))
        done = pull(reader, store, {name!r}, None, report)
    (t0, b0), (t1, b1) = marks[0], marks[-1]
    found = {{"cpu": time.process_time() - cpu, "busiest": busiest(ran, now)}}
    print(json.dumps({{"rate": (b1 - b0) / max(1e-9, t1 - t0), "nbytes": done.nbytes, **found}}), flush=True)
"""


class Sender:
    """Answers readers with one model, in this process, and counts what it sends."""

    def __init__(self, folder: Path, address: str) -> None:
        checkpoint = open_folder(folder)
        self._find = find_running(lambda: [(checkpoint, NAME)])
        options = LinkOptions(security=Security(HERE, None, lambda key: key == THERE.public))
        self._listener: Listener = listen(address, options=options)
        self.address = "tcp://" + self._listener.address.partition("://")[2].partition("?")[0]
        self.links: list[_Counted] = []
        self.stream = 0  # bytes to send to the next peer without being asked
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(TransportError):
            while True:
                link = _Counted(self._listener.accept())
                self.links.append(link)
                serve = self._stream_to if self.stream else self._answer
                threading.Thread(target=serve, args=(link,), daemon=True).start()

    def _stream_to(self, link: "_Counted") -> None:
        data = [random.Random(at).randbytes(PIECE) for at in range(64)]  # more than a cache holds, as weights are
        with suppress(TransportError):
            for at in range(-(-self.stream // PIECE)):
                link.send(Frame(b"x", (data[at % len(data)],)))
            with suppress(TransportError):
                link.recv(timeout=120)

    def _answer(self, link: "_Counted") -> None:
        with suppress(TransportError):
            session = Session(opened=False)
            hello = codec.decode(link.recv(timeout=20).header)
            assert isinstance(hello, Hello)
            session.received(hello)
            end = Connection(link, hello.role, hello.name, hello.session, session)
            end.send(Welcome("campaign", hello.versions, "cpu", 0))
            answers = Answers(end, self._find)
            link.deliver_to(lambda item: answers.close() if isinstance(item, LinkClosed) else answers.put(item))

    @property
    def sent(self) -> int:
        """Bytes of frames so far, on all links."""
        return sum(link.num_bytes for link in self.links)

    def close(self) -> None:
        self._listener.close()


class _Counted:
    """A link whose sent bytes are counted."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, frame: Frame) -> None:
        self._link.send(frame)
        self.num_bytes += len(frame.header) + sum(memoryview(part).nbytes for part in frame.parts)


@contextmanager
def child(sender: Sender, store: Path, drain: int = 0, touched: int = 0) -> Iterator[subprocess.Popen[str]]:
    code = _CHILD.format(
        paths=[str(ROOT), str(ROOT / "tests" / "store")], own=(THERE.public, THERE.secret), peer=HERE.public,
        address=sender.address, store=str(store), name=NAME, drain=drain, touched=touched,
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def result_of(process: "subprocess.Popen[str]") -> dict[str, float]:
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    assert process.wait() == 0, lines
    return dict(json.loads(lines[-1]))


def make_model(folder: Path, megabytes: int) -> Path:
    """A model of random bytes: layers with a large, a middling and a small tensor each."""
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    sizes = [3 * 10**6 + 7, 200_000, 4096]
    chance, infos, at = random.Random(7), list[TensorInfo](), 0
    while at < megabytes * 10**6:
        for size in sizes:
            name = f"model.layers.{len(infos) // 3}.{len(infos) % 3}"
            infos.append(TensorInfo(name, "U8", (size,), "model.safetensors", at, at + size))
            at += size
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_of(infos))
        for info in infos:
            file.write(chance.randbytes(info.nbytes))
    return folder


def check_copy(model: Path, store: ModelStore) -> int:
    """Compare every tensor with the original; return their bytes."""
    (stored,) = store.models()
    original = open_folder(model)
    wanted = hashes(dict.fromkeys(original.tensors, model / "model.safetensors"))
    assert hashes(stored.tensors()) == wanted
    return sum(info.nbytes for info in original.tensors.values())


def hashes(places: dict[str, Path]) -> dict[str, str]:
    """The tensors in these files, hashed."""
    found = {}
    for path in set(places.values()):
        begin = data_begin(path)
        with path.open("rb") as file:
            for info in read_header(path):
                file.seek(begin + info.begin)
                found[info.name] = hashlib.sha256(file.read(info.nbytes)).hexdigest()
    return {name: found[name] for name in places}


def killed(folder: Path, model: Path, kills: int, seed: int) -> dict[str, float]:
    """Kill the child after a random number of bytes of a copy over a gigabit, again and again; then let it finish."""
    chance, store = random.Random(seed), folder / "killed"
    sender = Sender(model, LINKS["1gbe"])
    copied, midway = 0, 0
    most = 2 * sum(path.stat().st_size for path in model.iterdir()) / kills
    for _ in range(kills):
        with child(sender, store) as process:
            assert process.stdout is not None
            process.stdout.readline()  # connected
            before, enough = sender.sent, chance.uniform(0.0, most)
            while process.poll() is None and sender.sent - before < enough:
                time.sleep(0.002)
            copied += process.poll() is not None
            midway += sender.sent - before > 2 * PIECE
    with child(sender, store) as process:
        result_of(process)
    nbytes = check_copy(model, ModelStore(store))
    sent = sender.sent
    sender.close()
    counted = {"kills": kills, "midway": midway, "finished_before": copied, "tensor_bytes": nbytes, "sent": sent}
    return counted | {"sent_twice": sent - nbytes, "twice_per_kill": (sent - nbytes) / max(1, kills)}


def speed(folder: Path, model: Path, link: str, rounds: int) -> dict[str, float | str]:
    """The best of some copies, the best of the link itself, and what was sent for each byte of the tensors."""
    sender = Sender(model, LINKS[link])
    size = sum(path.stat().st_size for path in model.iterdir())
    bare, copies = list[dict[str, float]](), list[dict[str, float]]()
    for at in range(rounds):
        sender.stream = size
        bare.append(timed(sender, folder / "none", drain=size))
        sender.stream, before = 0, sender.sent
        copies.append(timed(sender, folder / f"speed {link} {at}", touched=size))
        nbytes = check_copy(model, ModelStore(folder / f"speed {link} {at}"))
        sent = sender.sent - before
    sender.close()
    rate, limit = (max(each["rate"] for each in found) for found in (copies, bare))
    cpu, least = (1e9 / size * min(each["cpu"] for each in found) for found in (copies, bare))
    thread, one = (1e9 / size * min(each["busiest"] for each in found) for found in (copies, bare))
    rates = {"MB/s": rate / 1e6, "limit MB/s": limit / 1e6, "share": rate / limit}
    return {"link": link, **rates, "cpu s/GB": cpu, "limit cpu s/GB": least} | {
        "busiest thread s/GB": thread, "limit busiest thread s/GB": one, "sent/tensors": sent / nbytes,
    }  # fmt: skip


def timed(sender: Sender, store: Path, drain: int = 0, touched: int = 0) -> dict[str, float]:
    """What a child reports; seconds of processors with those of this end."""
    cpu, ran = time.process_time(), thread_seconds()
    with child(sender, store, drain, touched) as process:
        found = result_of(process)
    both = max(found["busiest"], busiest(ran, thread_seconds()))
    return found | {"cpu": found["cpu"] + time.process_time() - cpu, "busiest": both}


def strangers(folder: Path, model: Path, count: int, seed: int) -> dict[str, object]:
    """Strangers at the door of a real, encrypted worker whose store has the model."""
    store = ModelStore(folder / "door")
    sender = Sender(model, LINKS["as it is"])
    with Reader(sender.address, LinkOptions(security=Security(THERE, HERE.public)), 10.0) as reader:
        pull(reader, store, NAME, None, lambda _done, _total: None)
    sender.close()
    digest, before = store.models()[0].digest, tree(store.path)
    heard: list[str] = []
    chance = random.Random(seed)
    with encrypted(folder / "worker", "--models-dir", str(store.path)) as victim:
        assert victim.options.security is not None
        for at in range(count):
            heard.append(attempt(victim, digest, at, chance))
        with Reader(victim.address, victim.options, 10.0) as reader:
            assert isinstance(ask_manifest(reader, digest), Remote), "who is admitted must get it"
        log = victim.worker.err
    assert tree(store.path) == before, "something was written"
    counted = {word: heard.count(word) for word in ("read", "refused")}
    return {"attempts": count, **counted, "written": 0, "served in the log": log.count("copies weights")}


def attempt(victim: Victim, digest: str, at: int, chance: random.Random) -> str:
    """One attempt of somebody whose key is not known: "read" if anything was told."""
    security = victim.options.security
    assert security is not None
    stranger = LinkOptions(security=Security(KeyPair.make(), security.peer))
    ways = (stranger, LinkOptions(), LinkOptions(security=Security(KeyPair.make(), KeyPair.make().public)))
    files = (AskManifest(digest), AskManifest("", NAME), AskManifest("", "../.."))
    asks: list[Message] = [*files, AskRanges((Range("model.safetensors", 0, 9),))]
    role = ("reader", "coordinator", "upstream")[at % 3]
    try:
        with Reader(victim.address, ways[at % len(ways)], 2.0, role=role) as reader:
            reader.send(chance.choice(asks))
            reader.receive()
            return "read"
    except PeerError:
        return "refused"


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """All files with their sizes and times."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--strangers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", nargs="*", default=list(LINKS))
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory(prefix="splitinfer-copy-") as name:
        folder = Path(name)
        model = make_model(folder / "model", chosen.megabytes)
        for link in chosen.links:
            print(dumps(speed(folder, model, link, chosen.rounds)), flush=True)
        if chosen.kills:
            print(dumps(killed(folder, model, chosen.kills, chosen.seed)), flush=True)
        if chosen.strangers:
            print(dumps(strangers(folder, model, chosen.strangers, chosen.seed)), flush=True)


if __name__ == "__main__":
    main()
