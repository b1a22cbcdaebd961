"""Pictures by the APIs, the REPL and the library: read, counted, refused in a sentence, and never fetched."""

import base64
import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from seeing import data_url, png, save_talking
from stages import pipeline
from typed_inputs import Script, sampled

from splitinfer import LLM, RequestError, SamplingParams
from splitinfer.chat.chat import Chat
from splitinfer.demo import TARGET
from splitinfer.errors import ContextExceeded, QueueFull
from splitinfer.models.cut import pictures as models_pictures
from splitinfer.models.cut.pictures import PictureTower
from splitinfer.pictures.decoding import Limits
from splitinfer.pictures.families import Family
from splitinfer.pictures.marks import has_pictures, marked
from splitinfer.server.service import Service

QUESTION = "What is it?"
ROWS = 5 * 4  # of the picture
_SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
_BLOCKS = [{"type": "image", "source": _SOURCE}, {"type": "text", "text": QUESTION}]
MESSAGES: Any = [{"role": "user", "content": _BLOCKS}]
_PARTS = [{"type": "input_image", "image_url": data_url(png())}, {"type": "input_text", "text": QUESTION}]
INPUT: Any = [{"role": "user", "content": _PARTS}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_talking(tmp_path_factory.mktemp("talking"))
    with pipeline(folder, [2, 2], picture_dir=folder) as running:
        (folder / "a.png").write_bytes(png())
        yield running


def asked(client: openai.OpenAI, *urls: str) -> openai.types.chat.ChatCompletion:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    turns: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return client.chat.completions.create(model="m", messages=turns, max_tokens=8, temperature=0)


def by_library(llm: LLM, data: bytes) -> str:
    text = f"user: {llm.seeing.mark}{QUESTION}\n"
    return llm.generate([text], SamplingParams(max_tokens=8), pictures=[[data]])[0].text


def test_all_apis_and_the_library_answer_alike(llm: LLM, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert llm.seeing.mark == "<|vision_start|><|image_pad|><|vision_end|>"
    expected = by_library(llm, png())
    assert by_library(llm, png(seed=2)) != expected
    chat = asked(client, data_url(png()))
    assert chat.choices[0].message.content == expected
    assert chat.usage.prompt_tokens == len(llm.tokenizer.encode(f"user: {llm.seeing.mark}{QUESTION}\n")) - 1 + ROWS
    response = client.responses.create(model="m", input=INPUT, max_output_tokens=8, temperature=0)
    assert response.output_text == expected
    message = claude.messages.create(model="m", messages=MESSAGES, max_tokens=8)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) >= ROWS
    counted = claude.messages.count_tokens(model="m", messages=MESSAGES)
    assert counted.input_tokens >= ROWS


def test_the_log_of_prompts_has_marks_for_pictures(
    service: Service, client: openai.OpenAI, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(service, "logs_prompts", True)
    asked(client, data_url(png()))
    (said,) = [record.getMessage() for record in caplog.records if " asks " in record.getMessage()]
    assert QUESTION in said
    assert "<|image_pad|>" in said
    assert "base64" not in said


def test_a_second_question_about_a_picture_finds_its_kv(
    llm: LLM, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": data_url(png(seed=7))}}
    turns: list[Any] = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION * 60}]}]

    def ask() -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(model="m", messages=turns, max_tokens=8, temperature=0)

    first = ask()
    monkeypatch.setattr(PictureTower, "_rows_of", None)  # nobody needs the tower again
    turns += [first.choices[0].message.model_dump(include={"role", "content"}), {"role": "user", "content": "And now?"}]
    second = ask()
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > ROWS


def test_names_and_signs_of_pictures_in_texts_are_text(llm: LLM, client: openai.OpenAI) -> None:
    """An answer that named a placeholder, and a page that has the signs between which pictures stand."""
    picture: Any = {"type": "image_url", "image_url": {"url": data_url(png())}}
    said = "\ufdd0/etc/passwd\ufdd1 <|image_pad|>"
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": f"<|image_pad|> {said}"}, picture]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    answer = client.chat.completions.create(model="m", messages=turns, max_tokens=4, temperature=0)
    assert answer.usage.prompt_tokens > ROWS
    placeholder = llm.seeing.check(1).placeholder
    kept, files = llm.seeing.taken_out([{"content": marked("a.png")}, {"content": "x", "token_ids": [5, placeholder]}])
    assert (kept[1], files) == ({"content": "x"}, ["a.png"])


def test_pictures_are_counted_before_they_are_values(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Family, "normalised", None)
    tokens = [5, llm.seeing.check(1).placeholder] * 4
    seen = [png(seed=i + 20) for i in range(4)]
    with pytest.raises(ContextExceeded, match="need more tokens than the context has"):
        llm.seeing.prompt(tokens, seen, 4 + 2 * ROWS)
    assert len(llm.seeing.prompt(tokens, seen, 4 + 4 * ROWS).tokens) == 4 + 4 * ROWS
    with pytest.raises(ContextExceeded, match=f"the first 3 pictures take {3 * ROWS} tokens; the context has"):
        llm.seeing.prompt(tokens, seen, 4 + 2 * ROWS)  # they are known by now
    under_way = sum(one.prepared.nbytes for one in models_pictures._known.values())
    monkeypatch.setattr(models_pictures, "_MOST_KNOWN", under_way + 4000)
    held = llm.seeing.prompt(tokens[:2], seen[:1], 100)
    with pytest.raises(QueueFull, match="too many pictures"):
        llm.seeing.prompt(tokens, seen, 100)
    assert llm.seeing.prompt(tokens[:2], seen[:1], 100).pixels == held.pixels


def test_the_chat_shows_a_picture(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(png())
    screen = Script(f"/image {tmp_path / 'b.png'}", QUESTION, "And now?", f"/image {tmp_path / 'none.png'}")
    chat = Chat(llm, sampled(max_tokens=8), screen)
    assert chat.run() == 0
    assert chat.conversation.turns[0].assistant == by_library(llm, png())
    assert len(chat.conversation.turns) == 2
    assert "No such file" in screen.said[-1]
    saved = tmp_path / "saved.json"
    screen.inputs = [f"/save {saved}", f"/load {saved}", "And then?", f"/image {tmp_path / 'b.png'}", "The same?"]
    chat._llm.seeing.limits = Limits(pictures=1)
    assert chat.run() == 0
    chat._llm.seeing.limits = Limits()
    assert [has_pictures([{"content": turn.user}]) for turn in chat.conversation.turns][-1], (
        "it went on without old ones"
    )
    assert len(chat.conversation.turns) <= 3
    parts = [{"type": "image_url", "image_url": {"url": data_url(png())}}, {"type": "text", "text": QUESTION}]
    page = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]
    saved.write_text(json.dumps(page))
    screen.inputs = [f"/load {saved}", "And then?"]
    assert chat.run() == 0
    assert len(chat.conversation.turns) == 2


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://169.254.169.254/latest", "addresses are not fetched"),
        ("data:text/plain;base64,aGk=", "must begin with data:image/"),
        ("data:image/png;base64,@@@", "is not valid base64"),
        (data_url(b"nothing"), "is not a picture in one of the formats"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(client: openai.OpenAI, url: str, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        asked(client, url)


def test_files_of_a_folder_that_was_named(llm: LLM, client: openai.OpenAI, tmp_path: Path) -> None:
    folder = llm.seeing.folder
    expected = asked(client, data_url(png())).choices[0].message.content
    assert asked(client, f"file://{folder}/a.png").choices[0].message.content == expected
    (folder / "away.png").symlink_to(tmp_path / "elsewhere.png")
    (tmp_path / "elsewhere.png").write_bytes(png())
    for path in ("away.png", "../" * 9 + "etc/passwd"):
        with pytest.raises(openai.BadRequestError, match="is not in a folder that may be read"):
            asked(client, f"file://{folder}/{path}")


def test_too_many_or_too_few(llm: LLM, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has 17 pictures; at most 16"):
        asked(client, *[data_url(png())] * 17)
    with pytest.raises(RequestError, match=r"has 2 places for pictures .* came with 1 pictures"):
        llm.submit(f"user: {llm.seeing.mark * 2}", pictures=[png()])
    with pytest.raises(RequestError, match=r"none.png cannot be read: No such file"):
        llm.submit(f"user: {llm.seeing.mark}", pictures=["none.png"])


def test_a_model_that_does_not_see_says_so() -> None:
    with pipeline(TARGET, [12]) as llm, pytest.raises(RequestError, match="takes no pictures: it does not see"):
        llm.submit([1, 2], pictures=[png()])
