"""The workflows for GitHub's runners say what is so: they parse, name scripts and commands that exist, try the Pythons
that the project is for, pin what they use, and know no secret. Read as text; nothing is run."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

UNTRIED = {"3.14"}  # every dependency has wheels for it; its classifier follows the first green run

both = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def read(path: Path) -> dict[str, Any]:
    """A workflow; with the strings of YAML 1.2, in which ``on`` is one."""
    found = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job["steps"]


def commands(path: Path) -> str:
    return "\n".join(step["run"] for step in steps(path) if "run" in step)


def pythons(path: Path) -> list[set[str]]:
    jobs = read(path)["jobs"].values()
    return [set(job["strategy"]["matrix"]["python"]) for job in jobs if "strategy" in job]


@both
def test_scripts_exist_and_can_be_run(path: Path):
    named = set(re.findall(r"\bscripts/\w+", commands(path)))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).stat().st_mode & 0o100] == []


@both
def test_the_pythons_are_those_of_the_project(path: Path):
    prefix = "Programming Language :: Python :: "
    claimed = {line.removeprefix(prefix) for line in PROJECT["classifiers"] if line.startswith(f"{prefix}3.")}
    assert PROJECT["requires-python"] == f">={min(claimed, key=lambda text: int(text.partition('.')[2]))}"
    assert pythons(path) == [claimed | UNTRIED]


@both
def test_what_is_used_is_pinned_to_a_commit(path: Path):
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", line[0])] == []
    assert [line for line in used if not re.match(r" # v\d+\.\d+\.\d+", line[1])] == []
    commits = {line[0] for path in WORKFLOWS for line in re.findall(r"uses: (\S+)()", path.read_text())}
    assert len({commit.partition("@")[0] for commit in commits}) == len(commits), "two commits of one action"


@both
def test_there_is_no_secret_and_little_that_it_may_do(path: Path):
    assert not re.search(r"secrets\b|token:(?! write)|password", path.read_text())
    assert read(path)["permissions"] == {"contents": "read"}
    granted = {name: job.get("permissions", {}) for name, job in read(path)["jobs"].items()}
    more = {name: set(each) for name, each in granted.items() if each}
    assert more == ({"attest": {"attestations", "id-token"}, "publish": {"id-token"}} if path.stem == "release" else {})


def test_only_a_tag_is_published_and_only_after_its_packages_were_installed():
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    for name in ("attest", "publish"):
        assert jobs[name]["if"] == "github.ref_type == 'tag'"
        assert {"build", "install"} <= set(jobs[name]["needs"])
    assert jobs["publish"]["environment"] == "pypi"
    assert not any("run" in step or "checkout" in step.get("uses", "") for step in jobs["publish"]["steps"])


@both
def test_no_expression_is_pasted_into_a_shell(path: Path):
    assert "${{" not in commands(path)  # a branch's name can hold commands
