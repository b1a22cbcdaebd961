"""`bench --mode server`: short, on a machine that is quick enough for a test; and when tokens count as there."""

import json
from pathlib import Path

import pytest

from splitinfer.bench.modes import measure
from splitinfer.bench.server import run
from splitinfer.bench.server.client import arrivals_of, chat_text, message_text, token_times
from splitinfer.bench.shared.options import Options
from splitinfer.errors import ModelError
from splitinfer.machine.selection import VARIABLE

MACHINE = """
stages:
  - {layers: 2, rows_ms: {1: 12, 8: 12.5, 512: 60}, buffers: 20}
  - {layers: 2, rows_ms: {1: 12, 8: 12.5, 512: 60}, buffers: 4}
launches_ahead: true
"""


def test_a_token_is_there_with_its_last_character():
    arrivals = [(1.0, "ab"), (2.0, "c"), (2.5, "de")]
    assert token_times(arrivals, [0, 1, 2, 3, 4, 5]) == (1.0, 1.0, 1.0, 2.0, 2.5, 2.5)
    with pytest.raises(ModelError, match="a stream of 6 characters ended after 5"):
        token_times(arrivals, [6])
    with pytest.raises(ModelError, match="ended after 0"):
        token_times([], [1])


def test_text_is_found_wherever_a_socket_cuts_it():
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("a é", "b")]
    body = "HTTP/1.1 200 OK\r\n\r\n" + "".join(
        f"9\r\ndata: {json.dumps(c, ensure_ascii=False)}\n\n\r\n" for c in chunks
    )
    raw = (body + "data: [DONE]\n\n\r\n0\r\n\r\n").encode()
    for size in (1, 7, 1000):
        reads = [(float(i), raw[i : i + size]) for i in range(0, len(raw), size)]
        found = arrivals_of(reads, chat_text)
        assert [text for _, text in found] == ["a é", "b"]
        assert [at for at, _ in found] == sorted(at for at, _ in found)
    assert message_text({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}) == "x"
    assert message_text({"type": "ping"}) == ""


def test_the_document_compares_with_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run, "_ALONE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "machine.yaml").write_text(MACHINE)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "machine.yaml"))
    options = Options(trials=1, streams=(3,), stream_prompt_tokens=8, stream_tokens=12, connect_timeout=20.0)
    assert measure("server", options) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert set(found["medians"]) == {"LLM", "chat completions", "messages"}
    chat, library = found["medians"]["chat completions"], found["medians"]["LLM"]
    assert chat["rate_to_library"] == pytest.approx(chat["tokens_per_second"] / library["tokens_per_second"])
    assert chat["ttft_p50"] >= 0.024, "no token can come sooner than the device allows"
    assert chat["loop_seconds_per_token"] > library["loop_seconds_per_token"]
    assert "of LLM" in out
