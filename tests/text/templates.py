"""Chat templates of the shapes that there are, each short: what families of models take, refuse, and leave out; and
folders that have them, with the built-in model's tokenizer."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from splitinfer.demo import TARGET
from splitinfer.text.turns import Form

_OPENS = "{% if add_generation_prompt %}<assistant>{% endif %}"
_CALL = '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
_SAID = "<{{ m.role }}>{{ m.content | trim }}{% for c in m.tool_calls %}{% set f = c.function %}@CALL@{% endfor %}</>"
_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"


def _each(said: str, before: str = "", call: str = _CALL) -> str:
    return before + "{% for m in messages %}" + said.replace("@CALL@", call) + "{% endfor %}" + _OPENS


def _refused(when: str, why: str) -> str:
    return "{% if " + when + " %}{{ raise_exception('" + why + "') }}{% endif %}"


_ALTERNATES = _refused("(m.role == 'user') != (loop.index0 % 2 == 0)", "roles must alternate")
_COUNTED = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    + _refused("(m.role == 'user') != (ns.n % 2 == 0)", "roles must alternate")
    + "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
_WITHOUT_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
)

SHAPES: Mapping[str, str] = {
    "everything": _each(_SAID, _TOOLS),
    "arguments are objects": _each(
        _SAID, _TOOLS, "{{ f.name }}{% for k, v in f.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"
    ),
    "a user is demanded": _each(
        _SAID,
        _TOOLS + "{% set ns = namespace(is_there=false) %}{% for m in messages %}"
        "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.is_there = true %}"
        "{% endif %}{% endfor %}" + _refused("not ns.is_there", "No user query found in messages."),
    ),
    "strict turns": _WITHOUT_FIRST
    + _each(_ALTERNATES + "<{{ m.role }}>{% if loop.first and system %}{{ system }}\n\n{% endif %}{{ m.content }}</>"),
    "strict turns, no system": _each(
        _refused("m.role == 'system'", "System role not supported") + _ALTERNATES + "<{{ m.role }}>{{ m.content }}</>"
    ),
    "nine letters": _WITHOUT_FIRST
    + _COUNTED
    + _each(
        "{% if m.role == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[CALLS]{% for c in m.tool_calls %}"
        + _refused("c.id | length != 9", "ids must have nine letters")
        + "{{ c.function | tojson }}{{ c.id }}{% endfor %}"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% elif m.role == 'tool' %}"
        + _refused("m.tool_call_id | length != 9", "ids must have nine letters")
        + "[RESULT]{{ m.content }} {{ m.tool_call_id }}[/RESULT]"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    ).replace("loop.last and", "m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] and"),
    "contents": _each(
        "{% if loop.first and m.role != 'system' %}<system>You are small.</>{% endif %}"
        "{{ '<' + m['role'] + '>' + m['content'] + '</>' }}"
    ),
    "contents alone": _each("{{ m['content'] }}{% if m.role != 'user' and not loop.last %}\n\n{% endif %}"),
    "three roles": _each(
        "{% if m.role == 'user' or m.role == 'assistant' or (loop.first and m.role == 'system') %}"
        "<{{ m.role }}>{{ m.content }}</>{% endif %}"
    ),
    "one call": _each(
        "{% if m.tool_calls %}"
        + _refused("m.tool_calls | length != 1", "only single tool-calls at once")
        + '<assistant>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}</>"
        "{% elif m.role == 'tool' %}<ipython>{{ m.content | tojson }}</>"
        "{% else %}<{{ m.role }}>{{ m.content | trim }}</>{% endif %}",
        _TOOLS,
    ),
    "systems first": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n{% endif %}{% endfor %}"
    + _each("{% if m.role != 'system' %}" + _SAID + "{% endif %}", _TOOLS),
    "pairs": _each(
        "{% if m.role == 'tool' %}"
        + _refused("ns.open == 0", "not the same number of calls and results")
        + "{% set ns.open = ns.open - 1 %}{% else %}"
        + _refused("ns.open", "not the same number of calls and results")
        + "{% set ns.open = m.tool_calls | length if m.tool_calls else 0 %}{% endif %}"
        + _refused("m.role == 'user' and not loop.first and loop.previtem.role == 'tool'", "user behind tool")
        + _SAID,
        _TOOLS + "{% set ns = namespace(open=0) %}",
    ),
    "known roles": _each(
        _refused("m.role not in ['system', 'user', 'assistant', 'tool']", "Unexpected message role.") + _SAID, _TOOLS
    ),
}  # fmt: skip


def _raise(why: str) -> None:
    raise ValueError(why)


@cache
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def writer(shape: str, *, opens: bool = True) -> Callable[[Form], str]:
    """What writes a form with a template, as transformers would."""
    template = _compiled(SHAPES[shape])

    def write(form: Form) -> str:
        tools = list(form.tools) or None
        return str(template.render(messages=list(form.messages), tools=tools, add_generation_prompt=opens))

    return write


def folder_with(folder: Path, template: str | None, more: Sequence[str] = (), *, special: bool = False) -> Path:
    """The built-in model's tokenizer with a template of its own and more tokens."""
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    tokenizer.add_tokens([AddedToken(one, special=special, normalized=False) for one in more])
    tokenizer.save(f"{folder}/tokenizer.json")
    config = json.loads((TARGET / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder
