"""The table of what was found, as a file: ``scripts/matrix`` says what changed, ``--write`` writes it anew."""

# ruff: noqa: T201

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import compare
import configs
import mlx.core as mx
import vlm_configs

FILE = Path(__file__).parents[2] / "splitinfer" / "models" / "SUPPORT.md"

_TEXT = """\
# Which models can be cut

{num_right} of {num_all} architectures are right at every cut (mlx-lm {mlx_lm}); {some} at some cuts, {none} at none.
The name is the `model_type` of a model's `config.json`; a cut that would be wrong is refused, with the reason,
before anything is loaded.

`scripts/matrix --write` makes this page, and `tests/matrix` verifies it. Every architecture is built small, with random
weights. Plain mlx-lm runs it whole, and splitinfer runs it cut into two stages at every layer, and into three. A cut is
right if its logits are the same to the last bit.

- **any chunking**: the logits are the same to the last bit however the prompt is cut into chunks; otherwise they differ
  by rounding.
- **rollback**: how many tokens a stage can take back after a wrong draft. *drafts*: the drafts that are not verified
  yet, from projections that are kept; *drafts, again*: the stage also runs its layers once more for the right rows.
  Neither costs a step.
- **many sequences**: how a step with many sequences runs. *rows*: all together; *modules*: modules with a cache run for
  each sequence, the others for all; *rows and modules*: it depends on the kind of layer; *sequences*: one sequence
  after the other.
- **kept KV**: where a request can continue from the KV of an earlier one with the same beginning: *anywhere*, at *block
  ends*, or *no*where.

A name after `/` is a variant of the configuration. Brackets show the cuts that are right and those tried, where these
are not 3 and 3.

{rows}
"""

_VLM_TITLE = "## Language models of mlx-vlm\n"
_VLM_TEXT = """\
{num_right} of the {num_all} that were examined are right at every cut (mlx-vlm {mlx_vlm}); {some} at some cuts,
{none} at none. They are used where mlx-lm has no class (`pip install mlx-vlm`), and compared with plain
mlx-vlm in the same way. Three kinds are refused, with a sentence: models that fill in masked tokens (`llada2_moe`,
`diffusion_gemma`), models with an encoder (`florence2`, `nemotron_parse`), and models that mlx-vlm itself does not run
on text alone (`minicpmo`).

{rows}
"""

_GROUPS = "| any chunking | rollback | many sequences | kept KV | architectures |\n|---|---|---|---|---|\n"
_NOTES = "| architecture | note |\n|---|---|\n"
_USUAL = "3 / 3"  # cuts that are right, of those tried

Rows = Mapping[str, str]


def row(name: str, finding: compare.Finding) -> str:
    chunking = "yes" if finding.any_chunking else "no"
    cuts = f"{finding.num_right} / {finding.num_cuts}"
    notes = "; ".join([*_refusals(finding), *finding.notes])
    return f"| {name} | {cuts} | {chunking} | {finding.rollback} | {finding.together} | {finding.kept} | {notes} |"


def _refusals(finding: compare.Finding) -> list[str]:
    return [
        f"refused at {', '.join(str(k) for k, _ in cuts)}: {reason}"
        for reason, cuts in groupby(finding.refused.items(), key=lambda item: item[1])
    ]


def _parts() -> tuple[str, str]:
    first, _, second = (FILE.read_text() if FILE.exists() else "").partition(_VLM_TITLE)
    return first, second


def written(library: str = "mlx-lm") -> tuple[str, Rows]:
    """The library's version and its rows of the file."""
    text = _parts()[library == "mlx-vlm"]
    known = text.partition(f"({library} ")[2].partition(")")[0]
    return known, _ungrouped(text)


def _grouped(rows: Rows) -> str:
    """Rows as the file has them: the names of each kind together, and what is to be said of some."""
    kinds: dict[str, list[str]] = {}
    notes = []
    for name in sorted(rows, key=str.lower):
        _, _, cuts, *kind, note, _ = (cell.strip() for cell in rows[name].split("|"))
        if any(kind):
            shown = name if cuts == _USUAL else f"{name} ({cuts})"
            kinds.setdefault(" | ".join(kind).replace("layers again", "again"), []).append(shown)
        if note:
            notes.append(f"| {name} | {note} |\n")
    ordered = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"| {kind} | {', '.join(names)} |\n" for kind, names in ordered]
    return f"{_GROUPS}{''.join(lines)}\n{_NOTES}{''.join(notes)}".rstrip()


def _ungrouped(text: str) -> Rows:
    """The rows of which ``_grouped`` made a part of the file."""
    groups, _, noted = text.partition(_GROUPS)[2].partition(_NOTES)
    notes = dict(_cells(line) for line in noted.splitlines() if line.startswith("| "))
    rows = {name: f"| {name} | not run | | | | | {notes[name]} |" for name in notes if name in configs.LEFT_OUT}
    for line in groups.splitlines():
        if line.startswith("| "):
            *kind, names = _cells(line)
            columns = " | ".join(kind).replace("drafts, again", "drafts, layers again")
            for shown in names.split(", "):
                name, _, cuts = shown.partition(" (")
                rows[name] = f"| {name} | {cuts.rstrip(')') or _USUAL} | {columns} | {notes.get(name, '')} |"
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def comparable(line: str) -> str:
    """A row without what another backend may find otherwise."""
    if sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu:
        return line
    cells = line.split("|")
    return "|".join([*cells[:3], "", *cells[4:]])


def _count(rows: Rows, group: Callable[[str], str]) -> dict[str, int]:
    """How many groups of rows are right everywhere, somewhere, nowhere."""
    grouped: dict[str, list[tuple[int, int]]] = {}
    for name, line in rows.items():
        right, slash, cuts = line.split("|")[2].partition("/")
        grouped.setdefault(group(name), []).append((int(right), int(cuts)) if slash else (0, 1))
    num_right = sum(all(a == b for a, b in found) for found in grouped.values())
    num_some, num_all = sum(any(a > 0 for a, _ in found) for found in grouped.values()), len(grouped)
    return {"num_right": num_right, "num_all": num_all, "some": num_some - num_right, "none": num_all - num_some}


def _render(library: str, rows: Rows) -> str:
    first, second = _parts()
    lines = _grouped(rows)
    if library == "mlx-vlm":
        second = "\n" + _VLM_TEXT.format(rows=lines, mlx_vlm=version(library), **_count(rows, str))
    else:
        first = _TEXT.format(rows=lines, mlx_lm=version(library), **_count(rows, configs.architecture))
    return f"{first.rstrip()}\n" + (f"\n{_VLM_TITLE}{second}" if second else "")


def main(arguments: Sequence[str]) -> int:
    """Examine everything, or some of mlx-vlm's models; 1 if the file is not what was found, or a cut is wrong."""
    library = "mlx-vlm" if "--vlm" in arguments else "mlx-lm"
    known, before = written(library)
    if library == "mlx-vlm":
        named = [name for name in arguments if not name.startswith("--")] or list(vlm_configs.CONFIGS)
        findings, wrong = _examine_all({n: vlm_configs.CONFIGS[n] for n in named}, compare.mlx_vlms)
        others = {name: before[name] for name in vlm_configs.CONFIGS if name in before and name not in named}
        installed = [configs.architecture(name) for name in vlm_configs.CONFIGS]
    else:
        findings, wrong = _examine_all(configs.configurations())
        others = {name: f"| {name} | not run | | | | | {why} |" for name, why in configs.LEFT_OUT.items()}
        installed = configs.architectures()
    now = others | {name: row(name, finding) for name, finding in findings.items()}
    changes = _changes(before, now, installed)
    print(f"\n{library} {known or 'unknown'} in the table, {version(library)} installed")
    print("\n".join([*wrong, *changes]) or "nothing changed")
    if "--write" in arguments and not wrong:
        FILE.write_text(_render(library, now))
        print(f"wrote {FILE.name}")
        return 0
    return 1 if wrong or changes else 0


def _examine_all(
    described: Mapping[str, configs.Config], make: compare.Make | None = None
) -> tuple[dict[str, compare.Finding], list[str]]:
    findings, wrong = {}, []
    for name, config in described.items():
        try:
            findings[name] = compare.examine(config, each_alone=make is None, make=make)
        except Exception as error:  # noqa: BLE001 - whatever a new release does, the others are examined too
            wrong.append(f"WRONG    {name}: {type(error).__name__}: {error}")
            print(wrong[-1], flush=True)
        else:
            print(f"{name:32} {findings[name].num_right} of {findings[name].num_cuts} cuts right", flush=True)
    return findings, wrong


def _changes(before: Rows, now: Rows, installed: Sequence[str]) -> list[str]:
    described = {configs.architecture(name) for name in now}
    lines = [f"NEW      {name}: not in tests/matrix/configs.py yet" for name in installed if name not in described]
    lines += [f"REMOVED  {name}: no longer in mlx-lm" for name in sorted(described - set(installed))]
    lines += [f"ADDED    {now[name]}" for name in now if name not in before]
    lines += [f"DROPPED  {before[name]}" for name in before if name not in now]
    for name in now:
        if name in before and comparable(now[name]) != comparable(before[name]):
            lines += [f"CHANGED  {before[name]}", f"      -> {now[name]}"]
    return lines


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
