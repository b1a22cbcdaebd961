"""Builds a model from a checkpoint's configuration and any arrays: mlx-lm's class, else mlx-vlm's.

With a placeholder for each tensor (lazy zeros, which take no memory) the model shows which tensors it reads before any
is read. With made-up numbers a model can be timed without its weights: the time of a step does not depend on the
numbers, except through the choice of experts, which is spread evenly.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from splitinfer import cleanup
from splitinfer.common.model_config import positive, text_part
from splitinfer.common.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.models.border.tensors import dtype_of as floating_dtype
from splitinfer.models.drafters.mtp import tensors_of
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library import mlx_vlm
from splitinfer.models.library.mlx_lm import utils as mlx_lm_utils
from splitinfer.weights.manifest import CONFIGS

_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16,
    "F32": mx.float32, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip

_NAMED = 3  # missing tensors that an error lists
_FEW = 2**20 - 3  # random numbers drawn: an odd count, so that no two rows of a tensor are alike
_SMALL = 0.02

_patching = threading.Lock()  # two stages of one process may load at a time
_taking = threading.Lock()


def placeholders_of(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Return lazy zeros with the shapes and dtypes of all tensors; they take no memory."""
    return {name: mx.zeros(info.shape, dtype_of(info)) for name, info in checkpoint.tensors.items()}


def lazy_arrays(checkpoint: Checkpoint, tensors: Iterable[str]) -> dict[str, mx.array]:
    """Return the ``tensors`` that are in a file as lazy arrays: they are read when they are evaluated.

    Raises:
        ModelError: MLX cannot load a file.
    """
    found = dict[str, mx.array]()
    for path, names in checkpoint.paths_of(tensors).items():
        try:
            there: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        except RuntimeError as error:
            raise ModelError(f"{path}: MLX cannot load it ({error})") from error
        found |= {name: there[name] for name in names if name in there}
    return found


def dtype_of(info: TensorInfo) -> mx.Dtype:
    """Return the dtype that a tensor has once MLX has loaded it."""
    return _DTYPES[info.dtype]


def build_model(checkpoint: Checkpoint, arrays: Mapping[str, mx.array], dtype: str | None) -> nn.Module:
    """Return the model as mlx-lm's own ``load_model`` builds it, sanitised and quantised, from ``arrays``."""
    return build_with_pictures(checkpoint, arrays, dtype, sees=False)[0]


def build_with_pictures(
    checkpoint: Checkpoint, arrays: Mapping[str, mx.array], dtype: str | None, *, sees: bool
) -> tuple[nn.Module, nn.Module | None]:
    """Return the model as ``build_model`` does, and if it ``sees`` mlx-vlm's whole model around it, else ``None``."""
    with _configured(checkpoint) as folder:
        try:
            # Not every architecture drops tensors that are not its own, so those of MTP heads are dropped here.
            count = positive(text_part(checkpoint.config), "num_hidden_layers")
            heads = tensors_of(arrays, count)
            own = {name: array for name, array in arrays.items() if name not in heads}
            model = (_seeing if sees else _built)(folder, checkpoint.folder, own)
        except Exception as error:  # a model's code may raise anything
            reason = _few_lines(str(error))
            raise ModelError(f"mlx-lm cannot build the model in {checkpoint.folder} ({reason})") from error
    model = cast_floats(model, dtype)
    return (model.language_model, model) if sees else (model, None)


def build_drafter(checkpoint: Checkpoint, arrays: Mapping[str, mx.array]) -> nn.Module:
    """Return the drafter in a folder of its own as mlx-vlm builds it, sanitised and quantised, from ``arrays``.

    Raises:
        ModelError: mlx-vlm is not installed, or has no class for it.
    """
    if not mlx_vlm.is_installed():
        raise ModelError(f"the drafter in {checkpoint.folder} needs mlx-vlm: pip install mlx-vlm on every machine")
    utils = mlx_vlm.module("utils")
    with _configured(checkpoint) as folder, _found_in(utils, arrays):
        try:
            return cast(nn.Module, utils.load_model(folder, lazy=True))
        except Exception as error:  # a drafter's code may raise anything
            reason = _few_lines(str(error))
            raise ModelError(f"mlx-vlm cannot build the drafter in {checkpoint.folder} ({reason})") from error


@contextmanager
def _configured(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a folder for a library's loader, with a checkpoint's configuration and an empty file of weights."""
    with cleanup.temporary_folder("splitinfer-") as name:
        folder = Path(name)
        for file in CONFIGS:
            if (checkpoint.folder / file).exists():
                (folder / file).symlink_to((checkpoint.folder / file).absolute())
        (folder / "model.safetensors").touch()
        yield folder


class _Given(BaseException):
    """Carries the parameters that a library was about to put into a model."""


def sanitised(checkpoint: Checkpoint, arrays: Mapping[str, mx.array], *, sees: bool) -> dict[str, mx.array]:
    """Return the parameters that a library makes of ``arrays``, by their names within its whole model. Their shapes may
    differ from the model's.

    Raises:
        ModelError: it cannot make them.
    """
    own, original = threading.get_ident(), nn.Module.load_weights

    def take(model: nn.Module, weights: Any, *args: Any, **kwargs: Any) -> nn.Module:
        if threading.get_ident() == own:
            raise _Given(weights)
        return original(model, weights, *args, **kwargs)

    with _taking:
        nn.Module.load_weights = take
        try:
            build_with_pictures(checkpoint, arrays, None, sees=sees)
        except _Given as given:
            return dict(given.args[0])
        finally:
            nn.Module.load_weights = original
    raise ModelError(f"{checkpoint.folder}: its parameters cannot be seen")


def _few_lines(text: str) -> str:
    """Return the first lines of a text as one line. mlx-lm lists every missing or surplus tensor."""
    lines = [line.strip() for line in text.splitlines()]
    more = f" and {len(lines) - _NAMED - 1} more" if len(lines) > _NAMED + 1 else ""
    return " ".join(lines[: _NAMED + 1]).rstrip("," if more else "") + more


def _built(folder: Path, origin: Path, arrays: Mapping[str, mx.array]) -> nn.Module:
    """Return mlx-lm's model, or mlx-vlm's language model if mlx-lm has no class for the configuration."""
    try:
        with _found_in(mlx_lm_utils, arrays):
            return cast(nn.Module, mlx_lm_utils.load_model(folder, lazy=True, get_model_classes=_classes)[0])
    except _NoClass as error:
        if not mlx_vlm.is_installed():
            raise ValueError(f"{error} pip install mlx-vlm adds mlx-vlm's models") from error
    try:
        return cast(nn.Module, _seeing(folder, origin, arrays).language_model)
    except ValueError as error:
        raise ValueError(f"it has no class, and mlx-vlm's class fails: {error}") from error


def _seeing(folder: Path, origin: Path, arrays: Mapping[str, mx.array]) -> nn.Module:
    """Return mlx-vlm's model, which includes the tower for pictures."""
    if not mlx_vlm.is_installed():
        raise ValueError("pictures need mlx-vlm: pip install mlx-vlm on every machine, or --no-pictures")
    with _found_in(mlx_vlm.module("utils"), arrays):
        return mlx_vlm.whole(folder, origin)


def mlx_vlm_of(checkpoint: Checkpoint, *, sees: bool) -> str:
    """Return mlx-vlm's version if the model's classes come from it (always if it ``sees``), else an empty string."""
    if sees:
        return mlx_vlm.version()
    try:
        _classes(dict(checkpoint.config))
    except _NoClass:
        return mlx_vlm.version()
    except (KeyError, TypeError, AttributeError, IndexError):
        return ""  # building the model reports the error
    return ""


class _NoClass(Exception):
    """mlx-lm has no class for a configuration, or refuses a part of it."""


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a model and of its arguments. Raise _NoClass if mlx-lm has none or refuses a value."""
    try:
        model, arguments = mlx_lm_utils._get_classes(config=config)
        arguments.from_dict(config)
    except ValueError as error:
        raise _NoClass(str(error)) from error
    return model, arguments


@contextmanager
def _found_in(utils: Any, arrays: Mapping[str, mx.array]) -> Iterator[None]:
    """Make a library's loader take ``arrays`` for the tensors of every file, during the ``with`` block."""
    with _patching:
        original, utils.mx = utils.mx, SimpleNamespace(**{**vars(utils.mx), "load": lambda _path: dict(arrays)})
        try:
            yield
        finally:
            utils.mx = original


def cast_floats(model: nn.Module, dtype: str | None) -> nn.Module:
    """Cast floating-point parameters to ``dtype``, lazily; not to half precision if the model excludes them."""
    if dtype is None:
        return model
    wanted = floating_dtype(dtype)
    may_halve: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _name: True)
    changed = [
        (name, p.astype(wanted))
        for name, p in tree_flatten(model.parameters())
        if mx.issubdtype(p.dtype, mx.floating) and p.dtype != wanted and (wanted == mx.float32 or may_halve(name))
    ]
    model.update(tree_unflatten(changed))
    return model


# -- made up ---------------------------------------------------------------------------------------


def made_up(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Return a lazy array for every tensor of a checkpoint. Floating-point numbers are random, and so small that no sum
    overflows half precision. They repeat, because drawing all of them would take longer than reading the weights. The
    words of quantised weights are zeros."""
    few = mx.random.uniform(-_SMALL, _SMALL, (_FEW,), key=mx.random.key(0))
    return {name: _tensor(info, few) for name, info in checkpoint.tensors.items()}


def _tensor(info: TensorInfo, few: mx.array) -> mx.array:
    dtype, size = dtype_of(info), prod(info.shape)
    if not mx.issubdtype(dtype, mx.floating):
        return mx.zeros(info.shape, dtype)
    many = mx.broadcast_to(few.astype(dtype), (-(-size // _FEW), _FEW)).reshape(-1)
    return many[:size].reshape(info.shape)
