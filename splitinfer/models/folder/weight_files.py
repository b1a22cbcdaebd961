"""Decides which tensors a model folder holds, and which file each of them is read from.

- The index counts only if a file that it names is in the folder: converters may keep the index of their source.
- A tensor is read from the file that the index names, else from the only file that has it. Two files are refused.
- A file that the index does not name gives the tensors that are only in it (usually prediction heads, as in
  ``mtp.safetensors``). If it repeats a tensor of the index, it is another copy of the model and gives nothing.
- The folder is complete if every file that gives a tensor is there.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from splitinfer.common.tensor_info import TensorInfo
from splitinfer.errors import ModelError

INDEX = "model.safetensors.index.json"
Index = Mapping[str, str]  # a tensor's name to its file's

_PATTERN = "model*.safetensors"
_BESIDE = "*mtp*.safetensors"  # prediction heads beside a model
_NUMBERED = re.compile(r"(.*-)(\d{1,6})(-of-)(\d{1,6})(\.safetensors)")

log = logging.getLogger(__name__)


class IncompleteModel(ModelError):
    """Files of weights are missing. ``count``: how many are here, as a phrase: "1 of 2 files"."""

    def __init__(self, where: str, num_here: int, missing: Sequence[str]) -> None:
        self.count = f"{num_here} of {num_here + len(missing)} files"
        more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
        verb = "is" if len(missing) == 1 else "are"
        super().__init__(f"{where} has {self.count} of weights: {', '.join(missing[:2])}{more} {verb} missing")


def read_index(folder: Path) -> Index:
    """Return the folder's index, or an empty one if the folder has none.

    Raises:
        ModelError: the index is damaged.
    """
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"] if path.exists() else {}
        if all(isinstance(file, str) for file in found.values()):
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        pass
    raise ModelError(f"{path} is damaged; delete it and download it again")


def weight_files(names: Collection[str], index: Index) -> list[str]:
    """Return the files that may hold the weights of a folder with files of these ``names``, including missing ones.

    >>> weight_files(["config.json", "model-00001-of-00002.safetensors"], {})
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    >>> weight_files(["model.safetensors", "mtp.safetensors"], {"a": "model-00001-of-00001.safetensors"})
    ['model.safetensors', 'mtp.safetensors']
    """
    found, named = {name for name in names if fnmatchcase(name, _PATTERN)}, set(index.values())
    beside = {name for name in names if fnmatchcase(name.lower(), _BESIDE)}
    if named & set(names) or not found:
        return sorted(found | named | beside)
    return sorted(found | beside | {sibling for name in found for sibling in _siblings(name)})


def _siblings(name: str) -> Iterable[str]:
    match = _NUMBERED.fullmatch(name)
    if match is None or int(match[4]) > 10_000:
        return ()
    return (f"{match[1]}{i:0{len(match[2])}}{match[3]}{match[4]}{match[5]}" for i in range(1, int(match[4]) + 1))


def resolve(headers: Mapping[str, Sequence[TensorInfo] | None], index: Index, where: str) -> dict[str, TensorInfo]:
    """Return the folder's tensors by name. ``headers``: the tensors of each of its ``weight_files``; ``None`` for a
    missing file.

    Raises:
        IncompleteModel: a file that gives tensors is missing.
        ModelError: a tensor is in two files, and the index does not say which counts.
    """
    index = {tensor: file for tensor, file in index.items() if file in headers}
    here = {file: {info.name: info for info in infos} for file, infos in headers.items() if infos is not None}
    found = {tensor: here[file][tensor] for tensor, file in index.items() if tensor in here.get(file, ())}
    named = set(index.values())
    copies = [file for file, tensors in here.items() if file not in named and not found.keys().isdisjoint(tensors)]
    for file in copies:
        log.warning("%s: %s is not read: %s has its tensors in other files", where, file, INDEX)
    found |= _only_ones({file: here[file] for file in here if file not in copies}, found, where)
    missing = {file for tensor, file in index.items() if tensor not in found and file not in here}
    missing |= {file for file in headers if file not in here and file not in named and not (index and _is_whole(file))}
    if missing:
        raise IncompleteModel(where, len(here) - len(copies), sorted(missing))
    return found


def _only_ones(here: Mapping[str, Mapping[str, TensorInfo]], but: Collection[str], where: str) -> dict[str, TensorInfo]:
    """Return the tensors that are in one file, except those named in ``but``. Raise ModelError if one is in two."""
    holders = defaultdict[str, list[str]](list)
    for file, tensors in here.items():
        for name in tensors.keys() - but:
            holders[name].append(file)
    for name, files in sorted(holders.items()):
        if len(files) > 1:
            raise ModelError(
                f"{where} has {name} in {files[0]} and in {files[1]}, and no {INDEX} says which one counts: move the "
                "wrong file to another folder"
            )
    return {name: here[file][name] for name, (file,) in holders.items()}


def _is_whole(name: str) -> bool:
    """Return whether a file of this name holds a whole model, alone or together with its numbered siblings."""
    return name == "model.safetensors" or _NUMBERED.fullmatch(name) is not None
