"""The page `docs/server-fields.md`: every field of every request, and what becomes of it. Made of the tables.

python -m splitinfer.server.field_page > docs/server-fields.md
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from splitinfer.server.anthropic import messages
from splitinfer.server.fields import Form, Honoured, Ignored, Object, Refused, Size, Treatment
from splitinfer.server.openai import chat, completions, responses
from splitinfer.server.texts import DETOKENIZE_FIELDS, TEMPLATE_FIELDS, TOKENIZE_FIELDS

ROUTES: Mapping[str, Mapping[str, Treatment]] = {
    "/v1/chat/completions": chat.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/responses/input_tokens": responses.COUNTED,
    "/v1/messages": messages.FIELDS,
    "/v1/messages/count_tokens": messages.COUNTED,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
    "/apply-template": TEMPLATE_FIELDS,
}
_INTRODUCTION = """\
# Fields of requests

What [the server](server.md) does with each field that the official clients of OpenAI and Anthropic can send, and with
some that other clients send. Requests are read by the tables that this page is made of
(`splitinfer/server/field_page.py`), and a test compares them with the types of the clients' packages.

- **yes**: it does what the API says, or what is said here.
- **ignored**: it changes nothing, for the reason given.
- **refused**: status 400, with the field's name and this sentence. Values that ask for nothing are taken.

`null` asks for nothing under any name. Any other field is refused by name.
"""


def page() -> str:
    """The page as Markdown. A form that is in several fields is written once, where it comes first."""
    return "\n".join([_INTRODUCTION, *_Writer().lines()])


@dataclass(slots=True)
class _Writer:
    _written: list[Form] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """All sections' lines."""
        for route, fields in ROUTES.items():
            yield f"## `{route}`\n"
            yield from self._table(fields, "field")

    def _table(self, fields: Mapping[str, Treatment], what: str) -> Iterator[str]:
        yield f"| {what} | | |"
        yield "|---|---|---|"
        for name, treatment in fields.items():
            yield f"| `{name}` | {_word(treatment)} | {_note(treatment)} |"
        yield ""
        for form in _forms(fields.values()):
            if form not in self._written:
                self._written.append(form)
                yield from self._form(form)

    def _form(self, form: Form) -> Iterator[str]:
        yield f"### {form.title}\n"
        if isinstance(form, Object):
            yield from self._table(form.fields, "field")
            return
        if form.default is not None:
            yield f"One without `{form.key}` is `{form.default}`.\n"
        if form.others is not None:
            yield f"What is not named here is ignored: {form.others.why}.\n"
        yield from self._table(form.members, f"`{form.key}`")


def _note(treatment: Treatment) -> str:
    match treatment:
        case Honoured(note, inside, each, size):
            form = inside or each
            link = "" if form is None else f"[{form.title}](#{form.title.lower().replace(' ', '-')})"
            return "; ".join(part for part in (note, _most(size), link) if part)
        case Ignored(why, size):
            return "; ".join(part for part in (why, _most(size)) if part)
        case Refused(why, asks_nothing):
            return f"{why}; may be {asks_nothing}" if str(asks_nothing) else why


def _most(size: Size | None) -> str:
    return "" if size is None else f"{size}"


def _word(treatment: Treatment) -> str:
    match treatment:
        case Honoured():
            return "yes"
        case Ignored():
            return "ignored"
        case Refused():
            return "refused"


def _forms(treatments: Iterable[Treatment]) -> list[Form]:
    found: list[Form] = []
    for treatment in treatments:
        if isinstance(treatment, Honoured):
            found += [form for form in (treatment.inside, treatment.each) if form is not None and form not in found]
    return found


if __name__ == "__main__":
    sys.stdout.write(page())
