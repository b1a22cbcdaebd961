"""Families of models that see: the input of their towers, and the tokens that stand for a picture.

This module reads a checkpoint's ``config.json`` and its processor's configuration, without mlx-vlm and transformers.
Its values equal the values of each family's own processor.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from splitinfer.common.model_config import positive, text_part
from splitinfer.errors import ModelError
from splitinfer.pictures.sizes import Fit

TokenId = Callable[[str], int | None]  # of a special token's text
Values = npt.NDArray[np.float32]
RGB = npt.NDArray[np.uint8]  # [height, width, 3]

_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A picture for one model.

    key: a digest of its content. family, rgb: what ``values`` are made from each time; the pixels take an eighth of
    their bytes. values, named: the tower's input. token_ids: the placeholders of its rows, as the tower knows them;
    sent: as stages receive them. before, after: tokens around them in the prompt. grid: see ``core.picture.Picture``.
    """

    key: bytes
    family: "Family"
    rgb: RGB
    named: Mapping[str, Any]
    token_ids: tuple[int, ...]
    sent: tuple[int, ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    grid: tuple[int, int] = (0, 0)

    @property
    def values(self) -> Values:
        return _VALUES[self.family.name](self.family, self.rgb)

    @property
    def nbytes(self) -> int:
        """The bytes of its pixels."""
        return self.rgb.nbytes

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.token_ids) + len(self.after)


@dataclass(frozen=True, slots=True)
class Family:
    """How a checkpoint sees. ``placeholder``: the token that a prompt has once for each picture. ``mark``: a text with
    it, for templates that give none. ``is_whole``: see ``core.picture.Picture``."""

    name: str
    placeholder: int
    mark: str
    fit: Fit
    patch: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    others: Mapping[str, int] = field(default_factory=dict)  # further tokens
    is_whole: bool = False

    def prepared(self, rgb: RGB) -> Prepared:
        """Return ``rgb``, which already has the size that ``fit`` asks for, prepared for the model."""
        height, width = rgb.shape[:2]
        inputs = (self.name, self.patch, self.merge, self.mean, self.std, rgb.shape)
        digest = hashlib.blake2b(repr(inputs).encode(), digest_size=32)
        digest.update(np.ascontiguousarray(rgb).data)
        rows, columns = height // self.step, width // self.step
        return _MAKERS[self.name](self, digest.digest(), rgb, rows, columns)

    def as_json(self) -> str:
        """Return the family in the form that ``family_from`` reads."""
        return json.dumps(asdict(self))

    @property
    def step(self) -> int:
        """The side, in pixels, of the square that one of the tower's rows covers."""
        return self.patch * self.merge

    def normalised(self, rgb: RGB) -> Values:
        """Return [3, height, width] values in the tower's range."""
        values = rgb.astype(np.float32)
        values *= np.float32(1 / 255)
        values -= np.array(self.mean, np.float32)
        values /= np.array(self.std, np.float32)
        return values.transpose(2, 0, 1)


def family_from(text: str) -> Family:
    """Return the family that ``Family.as_json`` has written.

    Raises:
        ValueError: the text is not that of a family.
    """
    return TypeAdapter(Family).validate_json(text)


def _patches(family: Family, rgb: RGB) -> Values:
    """Return the patches, grouped by the squares to merge, each twice: a picture is a film of two equal frames."""
    p, m, (rows, columns) = family.patch, family.merge, (side // family.step for side in rgb.shape[:2])
    once = family.normalised(rgb).reshape(3, rows, m, p, columns, m, p).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.repeat(once[:, :, :, :, :, None], 2, axis=5).reshape(rows * m * columns * m, -1)


def _qwen(family: Family, key: bytes, rgb: RGB, rows: int, columns: int) -> Prepared:
    ids = (family.placeholder,) * (rows * columns)
    named = {"image_grid_thw": np.array([[1, rows * family.merge, columns * family.merge]], np.int64)}
    return Prepared(key, family, rgb, named, ids, ids, grid=(rows, columns))


def _planes(family: Family, rgb: RGB) -> Values:
    return np.ascontiguousarray(family.normalised(rgb)[None])


def _pixtral(family: Family, key: bytes, rgb: RGB, rows: int, columns: int) -> Prepared:
    """Return a picture whose rows of placeholders have a token between them and one after the last."""
    row = (family.placeholder,) * columns
    ids = (*(*row, family.others["break"]) * (rows - 1), *row, family.others["end"])
    return Prepared(key, family, rgb, {"image_sizes": [rgb.shape[:2]]}, ids, ids)


def _gemma(family: Family, key: bytes, rgb: RGB, rows: int, columns: int) -> Prepared:
    """Return a picture whose rows take the padding's entry from tables that depend on tokens."""
    around = (family.others["begin"],), (family.others["end"],)
    ids = (family.placeholder,) * (rows * columns)
    return Prepared(key, family, rgb, {}, ids, (0,) * len(ids), *around)


_MAKERS = {"qwen": _qwen, "pixtral": _pixtral, "gemma": _gemma}
_VALUES = {"qwen": _patches, "pixtral": _planes, "gemma": _planes}


def family_of(folder: Path, config: Mapping[str, Any], token_id: TokenId) -> Family | None:
    """Return the family of a checkpoint. Return None if it cannot see, or its family is not known here. ``token_id``:
    gives the id of a special token's text.

    Raises:
        ModelError: its configuration, or its processor's, has impossible values.
    """
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    make = _READERS.get(str(config.get("model_type")))
    try:
        return None if make is None else make(config, _processor(folder), token_id)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OSError) as error:
        files = " or ".join(("config.json", *(name for name in _PROCESSORS if (folder / name).exists())))
        raise ModelError(
            f"{folder} cannot see: {files} has unusual values ({error}); correct it, or start with --no-pictures"
        ) from error


def sees(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("vision_config"), Mapping) and str(config.get("model_type")) in _READERS


def layers_at_once(config: Mapping[str, Any]) -> int:
    """Return the number of first layers that need more of a picture than its rows, and so must be with the tower."""
    if positive(config, "hidden_size_per_layer_input"):
        return positive(config, "num_hidden_layers") or 0  # all of them look at the rows themselves
    found = config["vision_config"].get("deepstack_visual_indexes")
    return len(found) if isinstance(found, list) else 0


def _processor(folder: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint's image processor, or an empty dict."""
    for name in _PROCESSORS:
        if (folder / name).exists():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            return {**found, **found.get("image_processor", {})}
    return {}


def _colours(processor: Mapping[str, Any], mean: Any, std: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(processor.get("image_mean") or mean), tuple(processor.get("image_std") or std)


def _read_qwen(config: Mapping[str, Any], processor: Mapping[str, Any], _token_id: TokenId) -> Family:
    vision, size = config["vision_config"], processor.get("size") or {}
    patch = processor.get("patch_size") or vision.get("patch_size", 16)
    merge = processor.get("merge_size") or vision.get("spatial_merge_size", 2)
    least = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    usual = ((0.5,) * 3, (0.5,) * 3) if "3" in str(config["model_type"]) else _CLIP
    fit = Fit("area", patch * merge, least, most)
    mark, colours = "<|vision_start|><|image_pad|><|vision_end|>", _colours(processor, *usual)
    return Family("qwen", config.get("image_token_id", 151655), mark, fit, patch, merge, *colours)


def _read_pixtral(config: Mapping[str, Any], processor: Mapping[str, Any], token_id: TokenId) -> Family:
    vision, size = config["vision_config"], processor.get("size") or {}
    patch, merge = vision.get("patch_size", 16), config.get("spatial_merge_size", 1)
    longest = size.get("longest_edge") or vision.get("image_size") or 1024
    others = {"break": token_id("[IMG_BREAK]") or 12, "end": token_id("[IMG_END]") or 13}
    placeholder = config.get("image_token_index") or config.get("image_token_id") or 10
    fit = Fit("longest", patch * merge, 0, longest)
    return Family("pixtral", placeholder, "[IMG]", fit, patch, merge, *_colours(processor, *_CLIP), others)


def _read_gemma(config: Mapping[str, Any], processor: Mapping[str, Any], _token_id: TokenId) -> Family:
    vision = config["vision_config"]
    patch = processor.get("patch_size") or vision.get("patch_size", 16)
    merge = processor.get("pooling_kernel_size") or vision.get("pooling_kernel_size", 3)
    tokens = processor.get("max_soft_tokens") or vision.get("default_output_length", 280)
    others = {
        "begin": config.get("boi_token_id", 255999),
        "end": config.get("eoi_token_id") or config.get("eoi_token_index") or 258882,
    }
    colours = ((0.0,) * 3, (1.0,) * 3) if not processor.get("do_normalize") else _colours(processor, *((0.5,) * 3,) * 2)
    fit = Fit("budget", patch * merge, 0, tokens * (patch * merge) ** 2)
    whole = text_part(config).get("use_bidirectional_attention") == "vision"
    placeholder = config.get("image_token_id", 258880)
    return Family("gemma", placeholder, "<|image|>", fit, patch, merge, *colours, others, whole)


_READERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], TokenId], Family]] = {
    "qwen2_vl": _read_qwen,
    "qwen2_5_vl": _read_qwen,
    "qwen3_vl": _read_qwen,
    "qwen3_vl_moe": _read_qwen,
    "mistral3": _read_pixtral,
    "pixtral": _read_pixtral,
    "gemma4": _read_gemma,
}
