"""Pictures of a request: read, put into its prompt, and held for the stage that computes their rows."""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from splitinfer.core.picture import MAX_ROWS, Picture, row_ids, with_placeholders
from splitinfer.errors import ContextExceeded, RequestError
from splitinfer.models.cut.pictures import Pixels, known
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.mlx_vlm import is_installed
from splitinfer.pictures.decoding import Limits, decode
from splitinfer.pictures.families import Family, Prepared, family_of, layers_at_once, sees
from splitinfer.pictures.marks import taken_out
from splitinfer.pictures.sources import from_url, read_file
from splitinfer.text.tokenizer import Tokenizer

PictureSource = bytes | str | os.PathLike[str] | Prepared
"""A picture: the bytes of a file, or the path of one, or a data URL."""


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """A prompt's tokens, with row ids where its ``pictures`` are; ``pixels``: their values, to be held as long as the
    request is."""

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    pixels: tuple[Pixels, ...] = ()

    @property
    def plain(self) -> tuple[int, ...]:
        """The tokens as stages are sent them."""
        return with_placeholders(self.tokens, 0, self.pictures)


def may_see(checkpoint: Checkpoint, wanted: bool | None, first_layers: int) -> bool:
    """Return whether a model of whose layers the first stage has so many is loaded with its tower: by default where its
    family is known, mlx-vlm is installed, and that stage has the layers that must be with the tower."""
    if not sees(checkpoint.config) or wanted is not None:
        return bool(wanted) and sees(checkpoint.config)
    return is_installed() and first_layers >= layers_at_once(checkpoint.config)


_KEPT_BYTES = 256 * 2**20


class Seeing:
    """For one model; several threads may use it. ``can_see``: whether it was loaded with its tower. ``folder``:
    below which a server's clients may name files. A picture that comes again, as in each turn of a conversation, is
    not decoded again."""

    def __init__(
        self, checkpoint: Checkpoint, tokenizer: Tokenizer | None, *, can_see: bool, folder: Path | None = None
    ) -> None:
        self._checkpoint, self._tokenizer, self.can_see = checkpoint, tokenizer, can_see
        self.limits, self.folder = Limits(), folder
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _family(self) -> Family | None:
        return family_of(self._checkpoint.folder, self._checkpoint.config, self._token_id) if self.can_see else None

    @cached_property
    def mark(self) -> str:
        """What a prompt's text has in the place of a picture: as the model's template writes it."""
        family = self._family
        if family is None or self._tokenizer is None:
            return ""
        written = self._tokenizer.picture_mark()
        ids = self._tokenizer.encode(written, adds_special=False) if written else []
        return written if written and ids.count(family.placeholder) == 1 else family.mark

    def taken_out(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
        """Return messages with ``mark`` in the places of their pictures, and the pictures' sources. What else in them
        would be a placeholder, because somebody wrote its name or the model chose it in an answer, becomes text."""
        if self._family is None or self._tokenizer is None:
            return taken_out(messages, self.mark)
        placeholder = self._family.placeholder
        plain = [
            {name: value for name, value in message.items() if name != "token_ids" or placeholder not in value}
            for message in messages
        ]
        return taken_out(plain, self.mark, self._tokenizer.codec.decode([placeholder]))

    def _token_id(self, text: str) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.token_id(text)

    def check(self, count: int) -> Family:
        """Return the model's family, if it reads ``count`` pictures of a request.

        Raises:
            RequestError: the model does not see.
            ContextExceeded: there are too many.
        """
        if self._family is None:
            raise RequestError(f"this model takes no pictures: {self._why_not}")
        if count > self.limits.pictures:
            raise ContextExceeded(f"a request has {count} pictures; at most {self.limits.pictures} are read")
        return self._family

    def takes(self, url: str) -> bool:
        """Return whether the model sees a picture of a server's client, which is decoded for that."""
        try:
            return self._family is not None and bool(self.read(from_url(url, self.limits.nbytes, self.folder)))
        except RequestError:
            return False

    @property
    def _why_not(self) -> str:
        if not sees(self._checkpoint.config):
            return "it does not see, or its family is not supported (docs/use/pictures.md lists those that are)"
        least = layers_at_once(self._checkpoint.config)
        return "pictures are off (--no-pictures), mlx-vlm is not installed (pip install mlx-vlm)" + (
            f", or the first machine has not the first {least} layers" if least else ""
        )

    def read(self, source: PictureSource, room: int | None = None) -> Prepared:
        """Return one picture. ``room``: pixels that are left for it.

        Raises:
            ContextExceeded: it would have more.
            RequestError: it cannot be decoded, or not within the limits.
            NotInstalled: Pillow is missing.
        """
        family = self.check(1)
        if isinstance(source, Prepared):
            return source
        data = self._bytes(source)
        name = hashlib.blake2b(data, digest_size=32).digest()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        made = family.prepared(decode(data, family.fit, self.limits, room))
        with self._lock:
            self._kept[name] = made
            while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return made

    def _bytes(self, source: bytes | str | os.PathLike[str]) -> bytes:
        if isinstance(source, bytes):
            return source
        if isinstance(source, str) and source.startswith("data:"):
            return from_url(source, self.limits.nbytes)
        try:
            return read_file(Path(source), self.limits.nbytes)
        except OSError as error:
            raise RequestError(f"the picture {source!s} cannot be read: {error.strerror or error}") from error

    def prompt(self, tokens: Sequence[int], sources: Sequence[PictureSource], context: int) -> SeenPrompt:
        """Return a prompt with its pictures in the places of its placeholders, in their order. ``context``: its most
        tokens.

        Raises:
            ContextExceeded: they are more than that has room for.
            RequestError: the model does not see, a picture cannot be read, or there are more or fewer placeholders.
        """
        if not sources:
            return SeenPrompt(tuple(map(int, tokens)))
        placeholder = self.check(len(sources)).placeholder
        wanted = sum(token == placeholder for token in tokens)
        if wanted != len(sources):
            raise RequestError(
                f"the prompt has {wanted} places for pictures (token {placeholder}) and came with "
                f"{len(sources)} pictures"
            )
        read = self._read_all(sources, context - len(tokens) + len(sources))
        found, pictures, left = list[int](), list[Picture](), iter(read)
        for token in map(int, tokens):
            if token != placeholder:
                found.append(token)
                continue
            one = next(left)
            found += one.before
            pictures.append(Picture(len(found), one.key, one.sent, one.grid, one.family.is_whole))
            found += [*row_ids(one.key, len(one.token_ids)), *one.after]
        pixels = tuple(map(known, read))
        return SeenPrompt(tuple(found), tuple(pictures), pixels)

    def _read_all(self, sources: Sequence[PictureSource], context: int) -> list[Prepared]:
        """Return pictures one by one. What is too large for what the others left is refused before it is decoded."""
        area, read, left, pixels = self.check(1).step ** 2, list[Prepared](), context, self.limits.fitted
        for source in sources:
            one = self.read(source, max(0, min(min(left, MAX_ROWS) * area, pixels)))
            read.append(one)
            left, pixels = left - one.num_tokens, pixels - one.nbytes // 3
            if left < 0 or pixels < 0:  # it was read before, and so not refused
                raise ContextExceeded(
                    f"the first {len(read)} pictures take {context - left:,} tokens; the context has {context:,}, and "
                    f"a request's pictures may have {self.limits.fitted:,} pixels in the sizes that the model wants"
                )
        return read
