"""Fetches the libraries of the server's page: those that ``manifest.json`` names, from npm, with their licences.

For each package the manifest has the version, the licence, the integrity of npm's archive (SHA-512), and the files that
are taken: their path in the archive, their name here, and the SHA-256 of what is served. A browser finds no packages by
their names, so a file's ``imports`` say which of its imports become which file; nothing else of it is changed.
"""

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
Package = dict[str, Any]


class VendorError(Exception):
    """What was fetched is not what the manifest says, in one sentence."""


def fetched(name: str, version: str) -> bytes:
    """npm's archive of a package."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, f"{name}@{version}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        (archive,) = Path(folder).glob("*.tgz")
        return archive.read_bytes()


def integrity_of(archive: bytes) -> str:
    """npm's word for an archive's SHA-512 (Subresource Integrity)."""
    return "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()


def with_imports(text: str, imports: dict[str, str]) -> str:
    """A module whose imports of packages are files.

    >>> with_imports('import{h}from"preact";', {"preact": "./preact.js"})
    'import{h}from"./preact.js";'

    Raises:
        VendorError: an import that is to be replaced is not there.
    """
    for name, file in imports.items():
        text, count = re.subn(rf"""(from\s*)(["']){re.escape(name)}\2""", rf"\1\g<2>{file}\2", text)
        if not count:
            raise VendorError(f"nothing is imported from {name!r} any more")
    return text


def files_of(package: Package, archive: bytes) -> dict[str, bytes]:
    """The files of a package as they are served, by their names here, the licence included.

    Raises:
        VendorError: a file is not in the archive.
    """
    made: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for each in [*package["files"], {"from": package["licence_file"], "as": f"{package['name']}.LICENSE"}]:
            try:
                member = tar.extractfile(f"package/{each['from']}")
            except KeyError:
                raise VendorError(f"{package['name']} has no file {each['from']}") from None
            assert member is not None
            data = member.read()
            imports = each.get("imports")
            made[each["as"]] = with_imports(data.decode(), imports).encode() if imports else data
    return made


def update(folder: Path, changed: str | None = None, version: str = "") -> None:
    """Write all files anew; of ``changed``, in another version.

    Raises:
        VendorError: the manifest has no such package, or a checksum is another.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    if changed is not None and changed not in [package["name"] for package in manifest["packages"]]:
        raise VendorError(f"the manifest has no package {changed!r}")
    for package in manifest["packages"]:
        is_new = package["name"] == changed or "integrity" not in package
        if is_new and version:
            package["version"] = version
        archive = fetched(package["name"], package["version"])
        if not is_new and package["integrity"] != integrity_of(archive):
            raise VendorError(f"the archive of {package['name']} {package['version']} is another than the manifest's")
        package["integrity"] = integrity_of(archive)
        files = files_of(package, archive)
        for each in package["files"]:
            sha256 = hashlib.sha256(files[each["as"]]).hexdigest()
            if not is_new and each["sha256"] != sha256:
                raise VendorError(f"{each['as']} is another than the manifest's")
            each["sha256"] = sha256
        for name, data in files.items():
            (folder / name).write_bytes(data)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    try:
        update(Path(sys.argv[1]), *sys.argv[2:4])
    except (VendorError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"vendor_page: {error}")
