"""Packages whose modules are imported before their ``__init__`` has run."""

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitinfer.light_package import register

NAME = "a_heavy_package"
INIT = 'import time\n__version__ = "1.0"\ntime.sleep(0.1)\nfrom a_heavy_package.inner import VALUE\nOTHER = [VALUE]\n'


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "inner.py").write_text(f"from {NAME} import __version__\nVALUE = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_module_comes_without_its_package_and_exists_once() -> None:
    register(NAME, {"VALUE": "inner"}, "1.0")
    stand_in = importlib.import_module(NAME)
    inner = importlib.import_module(f"{NAME}.inner")
    assert stand_in.VALUE is inner.VALUE
    assert "OTHER" not in vars(stand_in)
    assert sys.modules[NAME] is stand_in
    assert stand_in.OTHER == [inner.VALUE]
    real = importlib.import_module(NAME)
    assert real is not stand_in
    assert real.inner is inner
    register(NAME)
    assert sys.modules[NAME] is real


@pytest.mark.usefixtures("package")
def test_threads_that_read_the_package_at_once_get_the_same_one() -> None:
    register(NAME, version="1.0")
    stand_in, found = importlib.import_module(NAME), []
    threads = [threading.Thread(target=lambda: found.append(stand_in.OTHER)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    assert all(each is found[0] for each in found)


@pytest.mark.usefixtures("package")
def test_a_name_that_the_package_does_not_have() -> None:
    register(NAME, version="1.0")
    stand_in = importlib.import_module(NAME)
    with pytest.raises(AttributeError):
        stand_in.nothing_of_the_kind
    with pytest.raises(AttributeError):
        stand_in.__wrapped__
