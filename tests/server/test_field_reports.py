"""What users of other servers have reported, asked of this one over HTTP: characters of several tokens."""

from typing import Any

import openai
import pytest
from constrained import save_with_markers

from splitinfer.llm import LLM

TEXT = "Ein 👩\u200d👩\u200d👧\u200d👦 und 🇩🇪 so ❤\ufe0f \u00e9 e\u0301 fin ok"  # several characters are seen as one


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = save_with_markers(tmp_path_factory.mktemp("texts"), (), template, special=False)
    return {"model": folder, "cuts": [2, 2], "context": 192}


def _written(client: openai.OpenAI, **more: Any) -> tuple[str, str | None]:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hot?"}], "max_tokens": 120, "stream": True, **more}
    asked["extra_body"] = {"structured_outputs": {"choice": [TEXT]}}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked) if chunk.choices]
    return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason


def test_a_stop_string_or_an_end_may_be_within_a_character_that_people_see(client: openai.OpenAI, llm: LLM) -> None:
    assert _written(client) == (TEXT, "stop")
    for stop in ("👦", "\u200d", "🇪", "\ufe0f", "\u0301", "🇩🇪 so", "fin", "\u00e9 e"):
        assert _written(client, stop=[stop]) == (TEXT[: TEXT.index(stop)], "stop"), repr(stop)
    tokens = [llm.tokenizer.token_bytes(token) for token in llm.tokenizer.encode(TEXT)]
    for most in range(1, 20):
        whole = b"".join(tokens[:most]).decode(errors="ignore")
        assert _written(client, max_tokens=most) == (whole, "length")
