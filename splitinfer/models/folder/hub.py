"""Opens the model that a layout names: "demo", a local folder, a copy in this machine's store, or a hub id.

For a hub id only the small files are downloaded at first. The tensors' names and shapes come from the weight files'
headers alone (HTTP ranges), and ``fetch`` downloads only the files that a stage needs. The hub's client is imported at
its first use, because that takes half a second that local folders can save.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from splitinfer.common.tensor_info import TensorInfo
from splitinfer.demo import DEMO_MODELS
from splitinfer.errors import ModelError
from splitinfer.models.folder.checkpoint import (
    GGUF,
    Checkpoint,
    in_gguf,
    open_folder,
    open_stored,
    read_config,
    read_header,
)
from splitinfer.models.folder.weight_files import IncompleteModel, read_index, resolve, weight_files
from splitinfer.weights.models import ModelStore, StoredModel, default_folder

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.jsonl", "tokenizer.model", "*.tiktoken"]

log = logging.getLogger(__name__)

OnFile = Callable[[int, int, str], None]  # bytes done, bytes in all, file name


def open_model(model: str) -> Checkpoint:
    """Return the checkpoint that a layout's ``model`` names.

    Raises:
        ModelError: it is not a demo model, a folder or in the store, and the hub lacks it or cannot be reached.
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
    try:
        return _open_hub(model)
    except ModelError as error:
        if "gguf" in model.lower():
            raise in_gguf(model) from error
        raise


def open_local(model: str, revision: str | None = None) -> Checkpoint | None:
    """Return the checkpoint named ``model`` if all of it is on this machine and readable, else ``None``. Never asks the
    hub. An empty folder counts as missing.

    Raises:
        ModelError: it is a folder without a model.
    """
    folder = _folder(model)
    is_empty = folder is None or all(path.name.startswith(".") for path in folder.iterdir())
    is_named, snapshot = model in DEMO_MODELS or not is_empty, local_snapshot(model, revision)
    try:
        if is_named:
            return open_model(model)
        return None if snapshot is None else _open_snapshot(model, snapshot)
    except ModelError as error:
        if is_named and not isinstance(error, IncompleteModel):
            raise
        log.info("not used: %s", error)
        return None


def local_snapshot(model: str, revision: str | None = None) -> Path | None:
    """Return the hub client's folder of a model, if config.json is in it, else ``None``. Never asks the hub."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return None
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    except (HFValidationError, OSError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def kept() -> Iterator[tuple[str, str, Path]]:
    """Yield each model that the hub's client keeps here: its name, a phrase that counts its weight files, its
    folder."""
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        model = folder.name.removeprefix("models--").replace("--", "/")
        snapshot = local_snapshot(model)
        try:
            if snapshot is not None:
                yield model, f"{len(_open_snapshot(model, snapshot).files)} files", folder
        except IncompleteModel as error:
            yield model, error.count, folder
        except ModelError as error:
            log.info("%s", error)


def _open_snapshot(repo: str, snapshot: Path) -> Checkpoint:
    """Return the checkpoint in a folder of the hub's client. Raise IncompleteModel if a file of weights is missing."""
    return open_folder(snapshot, snapshot.name, _listed(repo, snapshot.name))


def _listed(repo: str, commit: str) -> list[str] | None:
    """Return the names of a repository's files if the hub's client remembers them (older versions do not)."""
    import huggingface_hub

    try:
        return [file.path for file in huggingface_hub.get_cached_repo_tree(repo, revision=commit)]
    except Exception as error:  # noqa: BLE001 - the client's file may be damaged, or the client too old
        log.info("no list of the files of %s: %s", repo, error)
        return None


def _stored(model: str) -> StoredModel | None:
    """Return the model of that name in this machine's store if it has its tokenizer (workers' own copies lack it)."""
    found = ModelStore(default_folder()).named(model)
    whole = [one for one in found if set(one.manifest.small(tokenizer=True)) <= set(one.files())]
    return whole[0] if len(whole) == 1 else None


def _folder(model: str) -> Path | None:
    """Return the local folder of that name, or ``None`` if it does not exist."""
    try:
        path = Path(model).expanduser()
        return path if path.is_dir() else None
    except (RuntimeError, OSError, ValueError):  # an unknown user's home; a name too long for a path; a zero byte
        return None


def named_anywhere(model: str) -> str:
    """Return a name for a model that is valid from any working folder: the absolute path if it is a folder."""
    folder = None if model in DEMO_MODELS else _folder(model)
    return model if folder is None else str(folder.absolute())


def _open_hub(repo: str) -> Checkpoint:
    """Return a repository's checkpoint: from this machine if it is complete here, else with headers from the hub."""
    import huggingface_hub

    folder: Path | None
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=_SMALL_FILES))
        listed = _listed(repo, folder.name) or huggingface_hub.HfApi().list_repo_files(repo, revision=folder.name)
    except Exception as error:  # the hub, or a server that answers in its place, may make its client raise anything
        reason, folder = why_not(repo, error), local_snapshot(repo)
        if folder is None:
            raise ModelError(f"{repo} is not on this machine, and {reason}") from error
        try:
            return _open_snapshot(repo, folder)
        except IncompleteModel as incomplete:
            raise ModelError(f"{incomplete}, and {reason}") from error
    try:
        return open_folder(folder, folder.name, listed)
    except IncompleteModel as incomplete:
        return Checkpoint(folder, read_config(folder), _tensors_at_hub(repo, folder, listed, incomplete), folder.name)


def _tensors_at_hub(
    repo: str, folder: Path, listed: Collection[str], incomplete: IncompleteModel
) -> dict[str, TensorInfo]:
    """Return all tensors, from the headers of the files here and at the hub."""
    import huggingface_hub

    api, index = huggingface_hub.HfApi(), read_index(folder)

    def header(file: str) -> list[TensorInfo] | None:
        if file not in listed or "/" in file:
            return None
        if (folder / file).exists():
            return read_header(folder / file)
        found = api.parse_safetensors_file_metadata(repo, file, revision=folder.name)
        return [TensorInfo(name, t.dtype, tuple(t.shape), file, *t.data_offsets) for name, t in found.tensors.items()]

    files = weight_files(listed, index)
    try:
        with ThreadPoolExecutor(8) as pool:
            headers = dict(zip(files, pool.map(header, files), strict=True))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{incomplete}, and {why_not(repo, error)}") from error
    return resolve(headers, index, repo)


def fetch(model: str, checkpoint: Checkpoint, tensors: Iterable[str], report: OnFile) -> None:
    """Download the files of the ``tensors`` that are not on this machine. Report progress in bytes.

    Raises:
        ModelError: a file is missing from a local folder, or cannot be downloaded.
    """
    missing = sorted({checkpoint.tensors[name].file for name in checkpoint.missing(tensors)})
    sizes = {f: sum(t.nbytes for t in checkpoint.tensors.values() if t.file == f) for f in missing}
    total, done = sum(sizes.values()), 0
    for file in missing:
        if checkpoint.revision is None:
            raise ModelError(f"{checkpoint.folder} lacks {file}")
        import huggingface_hub

        report(done, total, file)
        try:
            huggingface_hub.hf_hub_download(model, file, revision=checkpoint.revision)
        except Exception as error:
            raise ModelError(f"{file} of {model} could not be downloaded: {why_not(model, error)}") from error
        done += sizes[file]
    if missing:
        report(total, total, "")


# -- errors of the hub -----------------------------------------------------------------------------


# huggingface_hub raises about twenty kinds of errors with texts of several lines, often one as the cause of another. If
# the answer does not come from the hub, the error is whatever its JSON parser raises.


def why_not(repo: str, error: Exception) -> str:
    """Return the reason for the error as the second half of a sentence, such as "the hub cannot be reached (...)"."""
    from huggingface_hub import constants, errors

    elsewhere = (
        "what answers at {endpoint} is not the hub ({line}): log in to this network in a browser, or check HF_ENDPOINT"
    )
    login = "log in with `hf auth login`"
    kinds: dict[type[BaseException], str] = {  # the first kind that is among the causes
        errors.GatedRepoError: f"it is gated: accept its terms at {{endpoint}}/{{repo}}, then {login}",
        errors.RepositoryNotFoundError: f"the hub has no such model, or it is private: check the name, or {login}",
        errors.HFValidationError: "the hub allows no such name: give owner/name",
        errors.HfHubHTTPError: "{status}",
        errors.OfflineModeIsEnabled: "the hub cannot be reached (HF_HUB_OFFLINE is set)",
        errors.FileMetadataError: elsewhere,
        errors.HTTPError: "the hub cannot be reached ({line})",
        ConnectionError: "the hub cannot be reached ({line})",
        TimeoutError: "the hub cannot be reached ({line})",
        errors.LocalEntryNotFoundError: "the hub cannot be reached",
        errors.SafetensorsParsingError: "a file of weights at the hub cannot be read ({line})",
        OSError: "its files cannot be stored on this machine ({line})",
        BaseException: elsewhere,
    }
    chain = list(_causes(error))
    found, text = next((one, text) for kind, text in kinds.items() for one in chain if isinstance(one, kind))
    line = (str(found).strip().splitlines() or [type(found).__name__])[0]
    status = _of_status(getattr(getattr(found, "response", None), "status_code", None), login)
    return text.format(repo=repo, endpoint=constants.ENDPOINT, line=line[:200], status=status)


def _of_status(status: int | None, login: str) -> str:
    match status:
        case 401 | 403:
            return f"the hub refuses your login ({status}): {login} again"
        case 404:
            return "the hub does not have that file (404)"
        case 429:
            return f"the hub gets too many requests from you (429): wait a few minutes, or {login}"
    return f"the hub fails ({status}): try again later"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its chain of causes."""
    seen = set[int]()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        yield now
        seen.add(id(now))
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)
