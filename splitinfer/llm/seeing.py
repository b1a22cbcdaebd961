"""Pictures of a request: read, put into its prompt, and held for the stage that computes their rows."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from splitinfer.core.picture import MAX_ROWS, Picture, row_ids, with_placeholders
from splitinfer.errors import ContextExceeded, RequestError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.mlx_vlm import is_installed
from splitinfer.models.pictures import Pixels, known
from splitinfer.pictures.decoding import Limits
from splitinfer.pictures.families import Prepared, family_of, layers_at_once, sees
from splitinfer.pictures.marks import taken_out
from splitinfer.pictures.reader import PictureReader
from splitinfer.pictures.sources import from_url, read_file
from splitinfer.text.tokenizer import Tokenizer

Source = bytes | str | os.PathLike[str] | Prepared
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
    """Whether a model of whose layers the first stage has so many is loaded with its tower: by default where its family
    is known, mlx-vlm is installed, and that stage has the layers that must be with the tower."""
    if not sees(checkpoint.config) or wanted is not None:
        return bool(wanted) and sees(checkpoint.config)
    return is_installed() and first_layers >= layers_at_once(checkpoint.config)


class Seeing:
    """For one model. ``can_see``: whether it was loaded with its tower. ``folders``: below which a client of a server
    may name files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        *,
        can_see: bool,
        limits: Limits | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        self._checkpoint, self._tokenizer, self.can_see = checkpoint, tokenizer, can_see
        self.limits, self.folders = limits or Limits(), tuple(folders)

    @cached_property
    def _reader(self) -> PictureReader | None:
        family = family_of(self._checkpoint.folder, self._checkpoint.config, self._token_id) if self.can_see else None
        return None if family is None else PictureReader(family, self.limits)

    @cached_property
    def mark(self) -> str:
        """What a prompt's text has in the place of a picture: as the model's template writes it."""
        family = None if self._reader is None else self._reader.family
        if family is None or self._tokenizer is None:
            return ""
        written = self._tokenizer.picture_mark()
        ids = self._tokenizer.encode(written, adds_special=False) if written else []
        return written if written and ids.count(family.placeholder) == 1 else family.mark

    def taken_out(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
        """Messages with ``mark`` in the places of their pictures, and the pictures' sources. What else in them would be
        a placeholder, because somebody wrote its name or the model chose it in an answer, becomes text."""
        if self._reader is None or self._tokenizer is None:
            return taken_out(messages, self.mark)
        placeholder = self._reader.family.placeholder
        plain = [
            {name: value for name, value in message.items() if name != "token_ids" or placeholder not in value}
            for message in messages
        ]
        return taken_out(plain, self.mark, self._tokenizer.codec.decode([placeholder]))

    def _token_id(self, text: str) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.token_id(text)

    def check(self, count: int) -> PictureReader:
        """What reads ``count`` pictures of a request.

        Raises:
            RequestError: the model does not see, or there are too many.
        """
        if self._reader is None:
            raise RequestError(f"this model takes no pictures: {self._why_not}")
        self._reader.check_count(count)
        return self._reader

    @property
    def _why_not(self) -> str:
        if not sees(self._checkpoint.config):
            return "it does not see, or its family is not supported (docs/use/pictures.md lists those that are)"
        least = layers_at_once(self._checkpoint.config)
        return "pictures are off (--no-pictures), mlx-vlm is not installed (pip install 'splitinfer[vlm]')" + (
            f", or the first machine has not the first {least} layers" if least else ""
        )

    def read(self, source: Source, room: int | None = None) -> Prepared:
        """One picture. ``room``: pixels that are left for it.

        Raises:
            RequestError: it cannot be read.
        """
        reader = self.check(1)
        if isinstance(source, Prepared):
            return source
        if isinstance(source, str) and source.startswith("data:"):
            return reader.read(from_url(source, self.limits.nbytes), room)
        return reader.read(source if isinstance(source, bytes) else self._bytes(Path(source)), room)

    def _read_all(self, sources: Sequence[Source], context: int) -> list[Prepared]:
        """Pictures one by one. What is too large for what the others left is refused before it is decoded."""
        reader = self.check(len(sources))
        area, read, left, pixels = reader.family.step**2, list[Prepared](), context, self.limits.fitted
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

    def _bytes(self, path: Path) -> bytes:
        try:
            return read_file(path, self.limits.nbytes)
        except OSError as error:
            raise RequestError(f"the picture {path} cannot be read: {error.strerror or error}") from error

    def prompt(self, tokens: Sequence[int], sources: Sequence[Source], context: int) -> SeenPrompt:
        """A prompt with its pictures in the places of its placeholders, in their order. ``context``: its most tokens.

        Raises:
            ContextExceeded: they are more than that has room for.
            RequestError: the model does not see, a picture cannot be read, or there are more or fewer placeholders.
        """
        if not sources:
            return SeenPrompt(tuple(map(int, tokens)))
        reader = self.check(len(sources))
        reader.check_places(tokens, len(sources))
        read = self._read_all(sources, context - len(tokens) + len(sources))
        found, starts = reader.places([int(token) for token in tokens], read)
        pictures = tuple(
            Picture(start, one.key, one.sent, one.grid, one.is_whole) for start, one in zip(starts, read, strict=True)
        )
        for picture in pictures:
            found[picture.start : picture.end] = row_ids(picture.key, len(picture.token_ids))
        pixels = tuple(known(Pixels(one.key, one.make, one.nbytes, one.named, one.token_ids)) for one in read)
        return SeenPrompt(tuple(found), pictures, pixels)
