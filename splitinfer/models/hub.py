"""Opens the model that a layout names: "demo", a local folder, one that was copied to this machine, or a hub id.

For a hub id only the small files are downloaded at first; the tensors' names and shapes come from the weight
files' headers alone (HTTP ranges), and ``fetch`` downloads just the files a stage needs. The hub's client is imported
at its first use: that takes half a second, which local folders need not wait for.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from splitinfer.core.tensor_info import TensorInfo
from splitinfer.demo import DEMO_MODELS
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import GGUF, Checkpoint, in_gguf, open_folder, read_config, read_header, table_of
from splitinfer.models.copied import open_stored
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.paths import default_folder

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.jsonl", "tokenizer.model", "*.tiktoken"]

Report = Callable[[int, int, str], None]  # bytes done, bytes in all, file name


def open_model(model: str) -> Checkpoint:
    """The checkpoint a layout's ``model`` names.

    Raises:
        ModelError: it is no demo model, no folder and not in the store, and the hub does not have it or cannot be
            reached.
    """
    if model in DEMO_MODELS:
        return open_folder(DEMO_MODELS[model])
    path = _folder(model)
    if path is not None:
        return open_folder(path)
    stored = _stored(model)
    if stored is not None:
        return open_stored(stored)
    if model.lower().endswith(GGUF):
        raise in_gguf(f"{model:.100}")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        known = ", ".join(sorted(DEMO_MODELS))
        raise ModelError(
            f"there is no model {model!r:.100}: it is not a folder, a hub id (owner/name) or one of {known}"
        )
    return _open_hub(model)


def open_local(model: str, revision: str | None = None) -> Checkpoint | None:
    """The checkpoint of that name if all of it is on this machine; ``None`` otherwise. Never asks the hub. An empty
    folder is as good as none.

    Raises:
        ModelError: it is a folder that holds something else than a model.
    """
    folder = _folder(model)
    is_empty = folder is None or all(path.name.startswith(".") for path in folder.iterdir())
    if model in DEMO_MODELS or not is_empty:
        return open_model(model)
    snapshot = local_snapshot(model, revision)
    if snapshot is None or not _is_whole(snapshot):
        return None
    return open_folder(snapshot, snapshot.name)


def local_snapshot(model: str, revision: str | None = None) -> Path | None:
    """The folder in which the hub's client keeps a model's files, if it has any. Never asks the hub."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return None
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _is_whole(snapshot: Path) -> bool:
    """Whether its configuration and all weights are there."""
    try:
        return (snapshot / "config.json").exists() and bool(_all_weights(snapshot))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _all_weights(folder: Path) -> list[Path]:
    """A folder's files of weights; none if the index names one that is not there."""
    local, index = sorted(folder.glob("model*.safetensors")), folder / "model.safetensors.index.json"
    if index.exists():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return local if set(named) <= {path.name for path in local} else []
    return local


def _stored(model: str) -> StoredModel | None:
    """The model of that name in this machine's store, with its tokenizer: what workers copy for themselves has none."""
    found = ModelStore(default_folder()).named(model)
    whole = [one for one in found if set(one.manifest.small(tokenizer=True)) <= set(one.files())]
    return whole[0] if len(whole) == 1 else None


def _folder(model: str) -> Path | None:
    """The local folder of that name; ``None`` if there is none."""
    try:
        path = Path(model).expanduser()
        return path if path.is_dir() else None
    except (RuntimeError, OSError, ValueError):  # no such user's home; a name too long for a path; a zero byte
        return None


def _open_hub(repo: str) -> Checkpoint:
    import huggingface_hub
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=_SMALL_FILES))
        return Checkpoint(folder, read_config(folder), table_of(_hub_tensors(repo, folder)), folder.name)
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo} is not on this machine and the hub cannot be reached") from error
    except (HTTPError, HFValidationError, NotASafetensorsRepoError, SafetensorsParsingError, OSError) as error:
        if "gguf" in repo.lower():
            raise in_gguf(repo) from error
        raise ModelError(f"{repo} cannot be opened at the hub ({_first_line(error)})") from error
    except ModelError:
        if "gguf" in repo.lower():
            raise in_gguf(repo) from None
        raise


def _hub_tensors(repo: str, folder: Path) -> list[TensorInfo]:
    """All tensors: from the local files if all are there, else from the headers at the hub."""
    if local := _all_weights(folder):
        return [info for path in local for info in read_header(path)]
    import huggingface_hub

    found = huggingface_hub.HfApi().get_safetensors_metadata(repo, revision=folder.name)
    return [
        TensorInfo(name, t.dtype, tuple(t.shape), file, *t.data_offsets)
        for file, meta in found.files_metadata.items()
        for name, t in meta.tensors.items()
    ]


def fetch(model: str, checkpoint: Checkpoint, files: Sequence[str], report: Report) -> None:
    """Download those of ``files`` that are not in the checkpoint's folder.

    Raises:
        ModelError: a file is missing from a local folder, or cannot be downloaded.
    """
    sizes = {f: sum(t.nbytes for t in checkpoint.tensors.values() if t.file == f) for f in files}
    not_copied = {t.file for t in checkpoint.tensors.values() if t.name not in checkpoint.copied}
    missing = [f for f in files if f in not_copied and not (checkpoint.folder / f).exists()]
    total, done = sum(sizes[f] for f in missing), 0
    for file in missing:
        if checkpoint.revision is None:
            raise ModelError(f"{checkpoint.folder} lacks {file}")
        report(done, total, file)
        _download(model, file, checkpoint.revision)
        done += sizes[file]
    if missing:
        report(total, total, "")


def _download(model: str, file: str, revision: str) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    try:
        huggingface_hub.hf_hub_download(model, file, revision=revision)
    except (HTTPError, OSError) as error:
        raise ModelError(f"{file} of {model} could not be downloaded ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
