"""Carries out a chat's inputs on an LLM, one after another. A ``LineScreen`` reads them and shows the answers."""

import difflib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitinfer.chat import formatting
from splitinfer.chat.commands import Command, help_text, parse
from splitinfer.chat.conversation import Conversation, Turn, fit, from_json, room_for_answer, to_json
from splitinfer.chat.screens import LineScreen, Offers, TerminalScreen, history_file
from splitinfer.common.plain_text import whole_characters
from splitinfer.core.sampling_defaults import SETTABLE, ResolvedSampling
from splitinfer.engine.loop.requests import RequestOutput, StreamEvent
from splitinfer.errors import ContextExceeded, RequestError, SplitinferError
from splitinfer.llm import LLM, Request
from splitinfer.llm.seeing import SeenPrompt
from splitinfer.pictures.marks import has_pictures, marked, portable, shown
from splitinfer.text.answer import ReasoningPart, TextPart

_OF_FILES = {"read": "read", "save": "written", "load": "loaded"}  # commands, and what could not be done
SESSION = "chat"  # the session whose KV the stages' prefix cache holds


def _columns() -> int:
    return shutil.get_terminal_size().columns


class Chat:
    """One conversation. ``has_refused``: some input could not be carried out. ``rescues``: the folder for
    it if the pipeline is lost."""

    def __init__(self, llm: LLM, sampling: ResolvedSampling, screen: LineScreen, rescues: Path | None = None) -> None:
        self.conversation = Conversation()
        self.sampling = self._usual = sampling
        self.has_refused = False
        self._llm, self._screen, self._rescues = llm, screen, rescues
        self._reasoning = ""  # as it was set; empty: as the model does
        self._files = ""  # pictures and texts that go with the next question
        self._asked = self._draft = ""  # the last question; text to begin the next input with
        self._held = 0  # tokens of the conversation whose KV is cached on the stages
        self._last_layout: formatting.Stats | None = None  # the counters at the last /layout
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: screen.say(help_text()),
            "retry": lambda _: self._retry(),
            "edit": lambda _: self._retry(edits=True),
            "model": lambda _: screen.say(f"{llm.layout.model}; chat with another one: splitinfer chat --model MODEL"),
            "reset": self._reset,
            "temp": self._temp,
            "set": self._set,
            "system": self._system,
            "stats": lambda _: screen.say(formatting.stats_table(llm.layout, llm.stats(), _columns())),
            "layout": self._layout,
            "plan": self._plan,
            "save": self._save,
            "load": self._load,
            "image": self._image,
            "read": self._read,
        }

    def run(self) -> int:
        """Take inputs until they end, /quit, or the loss of the pipeline; return the exit code."""
        try:
            while (text := self._screen.read(self._draft)) is not None:
                self._draft = ""
                if not self._take(text):
                    break
        except SplitinferError as error:
            self._screen.say(str(error))
            self._rescue()
            return 1
        finally:
            self._llm.forget(SESSION)
        return 0

    def _take(self, text: str) -> bool:
        """Carry out one input. False ends the chat."""
        try:
            meant = parse(whole_characters(text))
        except ValueError as error:
            self._refuse(str(error))
            return True
        match meant:
            case Command("quit"):
                return False
            case Command(name, argument) if name in _OF_FILES:
                self._carry(name, argument)
            case Command(name, argument):
                self._commands[name](argument)
            case str(said):
                files, self._files = self._files, ""
                self._turn(files + said)
        return True

    def _carry(self, name: str, file: str) -> None:
        """Carry out a command that reads or writes a file, if that can be done."""
        try:
            self._commands[name](file)
        except FileExistsError:
            self._refuse(f"{file} already exists; choose another name")
        except (OSError, RuntimeError, ValueError) as error:  # no such home, a null character
            self._refuse(f"{file} cannot be {_OF_FILES[name]}: {_reason(error)}")

    def _refuse(self, sentence: str) -> None:
        self.has_refused = True
        self._screen.say(sentence)

    # -- turns -------------------------------------------------------------------------------

    def _turn(self, asked: str) -> None:
        """Submit a request and stream the answer; a refused request leaves the conversation unchanged.

        Raises:
            SplitinferError: the pipeline was lost.
        """
        self._asked = asked
        before = self._llm.stats()
        try:
            request = self._ask(asked)
        except RequestError as error:
            remedy = "; send less, or free the context with /reset" if isinstance(error, ContextExceeded) else ""
            self._refuse(f"{error}{remedy}")
            return
        if (waits_for := self._llm.health().waits_for) is not None:
            self._screen.say(f"waiting for {waits_for}; Ctrl-C gives this question up")
        self._show(request)
        output = request.result()
        if output.error is not None:
            if output.text:
                self._record(asked, output)
            raise SplitinferError(output.error)
        if output.token_ids:
            self._held = formatting.held(output, self._llm.stats())
        self._record(asked, output)
        self._screen.set_status(formatting.status(output, before, self._llm.stats()))
        if (brought := self._llm.outcome()) is not None:
            self._screen.say(brought)

    def _show(self, request: Request) -> None:
        """Show an answer as it comes, and before that how far its prompt is read."""
        with self._screen.answering(request.abort) as write:
            for event in request.watched(formatting.LOOK_EVERY):
                if event is not None:
                    for text, is_reasoning in _shown(event):
                        write(text, is_reasoning=is_reasoning)
                elif (reading := request.reading) is not None:
                    self._screen.wait(formatting.progress(reading))

    def _ask(self, asked: str) -> Request:
        context, params = self._llm.context_length, self.sampling.params
        room = room_for_answer(params.max_tokens, context)
        num_dropped, tokens = fit(self.conversation, asked, self._encode, context=context, room=room)
        conversation = self.conversation.without_oldest(num_dropped)
        seen = self._seen(conversation.messages(asked))
        params = params if self._reasoning != "off" else replace(params, thinking_budget=0)
        request = self._llm.submit(tokens if seen is None else seen, params, session=SESSION)
        if num_dropped:
            self.conversation = conversation
            self._screen.say(formatting.dropped(num_dropped, context))
        return request

    def _encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        try:
            seen = self._seen(messages)
        except ContextExceeded:  # of so many pictures that they were not read
            return [0] * (self._llm.context_length + 1)
        return self._encoded(messages) if seen is None else list(seen.plain)

    def _encoded(self, messages: Sequence[Mapping[str, Any]], mark: str = "") -> list[int]:
        switches = {"": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
        options = switches.get(self._reasoning, {"enable_thinking": True, "reasoning_effort": self._reasoning})
        return self._llm.tokenizer.encode_chat(messages, mark=mark, options=options)

    def _seen(self, messages: Sequence[Mapping[str, Any]]) -> SeenPrompt | None:
        """Return a conversation with its pictures. Return None if it has none."""
        if not has_pictures(messages):
            return None
        chat, files = self._llm.seeing.taken_out(messages)
        return self._llm.seeing.prompt(self._encoded(chat, self._llm.seeing.mark), files, self._llm.context_length)

    def _record(self, asked: str, output: RequestOutput) -> None:
        """Add the turn with its answer. Keep the beginning of an aborted answer; drop the turn if it is empty."""
        if output.finish_reason == "abort":
            self._screen.say("[stopped]" if output.text else "[stopped before the answer began; this turn is not kept]")
            if not output.text:
                return
        turn = Turn(asked, output.text, tuple(output.token_ids), output.reasoning)
        self.conversation = replace(self.conversation, turns=(*self.conversation.turns, turn))

    def _retry(self, *, edits: bool = False) -> None:
        """Ask the last question again, or offer it for a change; its answer is dropped."""
        turns = self.conversation.turns
        asked = self._asked or (turns[-1].user if turns else "")
        if not asked:
            self._refuse("there is no question to ask again")
            return
        if turns and turns[-1].user == asked:
            self.conversation = replace(self.conversation, turns=turns[:-1])
        if edits:
            self._draft = asked
        else:
            self._turn(asked)

    # -- commands ----------------------------------------------------------------------------

    def _reset(self, _: str) -> None:
        self._go_on_with(replace(self.conversation, turns=()))
        self._screen.say("conversation cleared")

    def _temp(self, value: str) -> None:
        if value and not self._change("temperature", value):
            return
        now = self.sampling
        self._screen.say(f"the temperature is {now.params.temperature:g} ({now.origins['temperature']})")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not text:
            self._screen.say(formatting.sampling_table(self.sampling, self._reasoning))
        elif name not in (known := (*SETTABLE, "reasoning")):
            begun = [each for each in known if each.startswith(name)]
            near = begun or difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if len(near) == 1 else f"known: {', '.join(known)}"
            self._refuse(f"unknown setting {name!r}; {hint}")
        elif not value:
            self._refuse(f"/set {name} needs a value after it, or 'default'")
        elif name == "reasoning":
            self._reasoning = "" if value.strip() == "default" else value.strip()
            self._screen.say(f"reasoning is {self._reasoning or 'as usual'}")
        elif self._change(name, value.strip()):
            self._screen.say(f"{name} is {formatting.setting(self.sampling, name)} ({self.sampling.origins[name]})")

    def _change(self, name: str, value: str) -> bool:
        """Set one sampling value, or put back the first; false, with the reason shown, where it is invalid."""
        try:
            is_usual, now = value == "default", self.sampling
            self.sampling = now.reset(name, self._usual) if is_usual else now.with_value(name, value)
        except ValueError as error:
            self._refuse(str(error))
            return False
        return True

    def _system(self, text: str) -> None:
        if text:
            self.conversation = replace(self.conversation, system=None if text == "clear" else text)
        system = self.conversation.system
        self._screen.say("there is no system message" if system is None else f"the system message is: {system}")

    def _layout(self, _: str) -> None:
        now = self._llm.stats()
        health = self._llm.health()
        states = [stage.state for stage in health.stages]
        table = formatting.layout_table(self._llm.layout, now, self._last_layout, self._held, states, _columns())
        self._screen.say(table if health.absent is None else f"{table}\n{health.absent}")
        self._last_layout = now

    def _plan(self, argument: str) -> None:
        if argument not in ("", "apply"):
            self._refuse(f"/plan {argument:.20} is unknown; use /plan or /plan apply")
            return
        try:
            found = self._llm.plan()
            table = "" if found.beside is None else formatting.comparison(found.beside, _columns()) + "\n"
            self._screen.say(table + found.text)
            if argument and found.is_worth_it:
                paused = self._llm.follow(found)
                self._screen.say(f"{self._llm.layout.cut} is in force; loading it took {paused:.1f} s")
        except SplitinferError as error:
            self._refuse(str(error))

    def _image(self, name: str) -> None:
        try:
            self._llm.seeing.read(str(Path(name).expanduser()))
        except (SplitinferError, RuntimeError, ValueError) as error:  # no such home, a null character
            self._refuse(str(error))
        else:
            self._files += marked(str(Path(name).expanduser().absolute()))
            self._screen.say(f"{name} goes with your next message")

    def _read(self, name: str) -> None:
        text = whole_characters(Path(name).expanduser().read_text(encoding="utf-8"))
        self._files += f"{text}\n\n"
        self._screen.say(f"{name} goes with your next message")

    def _rescue(self) -> None:
        """Save what the loss of the pipeline would take with it."""
        if self._rescues is not None and self.conversation.turns:
            name = str(self._rescues / time.strftime("chat-%Y%m%d-%H%M%S.json"))
            self._carry("save", name)

    def _save(self, name: str) -> None:
        _write_new(Path(name).expanduser(), portable(to_json(self.conversation)))
        self._screen.say(f"{_turns(self.conversation)} saved to {name}; next time, go on with: /load {name}")

    def _load(self, name: str) -> None:
        path = Path(name).expanduser()
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise ValueError("it is not a file")
        conversation = from_json(portable(path.read_text(encoding="utf-8"), reads=True))
        self._go_on_with(conversation)
        last = [f"\n> {shown(turn.user)}\n{turn.assistant}" for turn in conversation.turns[-1:]]
        self._screen.say("\n".join([f"{_turns(conversation)} loaded from {name}", *last]))

    def _go_on_with(self, conversation: Conversation) -> None:
        self.conversation, self._asked = conversation, ""
        self._held = 0
        self._llm.forget(SESSION)


def run_chat(llm: LLM, sampling: ResolvedSampling, offers: Offers) -> int:
    """Chat in a terminal, or on the lines of a pipe, until the user leaves, and return the exit code. ``offers``: how a
    screen gets the process's signals.

    A terminal has a greeting, line editing and a status line. Elsewhere every line of standard input is a turn or a
    command, answers go to standard output, and the code is 1 if any line could not be carried out.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        chat = Chat(llm, sampling, LineScreen(sys.stdin))
        return chat.run() or int(chat.has_refused)
    history = history_file()
    with TerminalScreen(history, offers) as terminal:
        terminal.say(formatting.greeting(llm.layout, llm.context_length))
        return Chat(llm, sampling, terminal, rescues=history and history.parent).run()


def _shown(event: StreamEvent) -> list[tuple[str, bool]]:
    """Return the texts of an event, and whether each is reasoning."""
    kept = [part for part in event.parts if isinstance(part, TextPart | ReasoningPart)]
    return [(part.text, isinstance(part, ReasoningPart)) for part in kept] or [(event.text, False)]


def _write_new(path: Path, text: str) -> None:
    """Write a new file, whole or not at all. Raises OSError, ValueError: it is there, or cannot be written."""
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except (OSError, ValueError):
            path.unlink()
            raise


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start})"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _turns(conversation: Conversation) -> str:
    count = len(conversation.turns)
    return "1 turn" if count == 1 else f"{count:,} turns"
