"""The page's modules without a document, by node's own test runner: `*.test.mjs` beside this file."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SITE = FOLDER.parents[1] / "splitinfer" / "server" / "page" / "site"
NODE = shutil.which("node")


def _version() -> int:
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.strip().removeprefix("v").partition(".")[0])


needs_node = pytest.mark.skipif(NODE is None or _version() < 20, reason="node 20 or newer is not installed")


@needs_node
def test_what_decides():
    tests = sorted(map(str, FOLDER.glob("*.test.mjs")))
    assert len(tests) >= 4
    done = subprocess.run([NODE, "--test", *tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"pass [1-9]", done.stdout)


PARSE = """
const fs = require("fs"), vm = require("vm");
for (const file of process.argv.slice(1)) new vm.SourceTextModule(fs.readFileSync(file, "utf8"), { identifier: file });
"""


@needs_node
def test_every_module_can_be_read():
    command = [NODE, "--no-warnings", "--experimental-vm-modules", "-e", PARSE]
    done = subprocess.run([*command, *map(str, SITE.rglob("*.js"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", sorted((SITE / "state").glob("*.js")), ids=lambda path: path.name)
def test_what_decides_has_no_document_and_no_server(file: Path):
    outside = r"window\.|document\.(query|create)|fetch\(|indexedDB|Date\.now|Math\.random|\.\./(io|view)"
    assert re.findall(outside, file.read_text()) == []
