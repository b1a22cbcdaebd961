"""JSON Schema against the forms of answers, by the built-in model, whose answers nothing but the mask makes JSON.

    python -m tests.campaigns json_schemas --minutes 20 --seed 1
    python -m tests.campaigns json_schemas --suites FOLDER          # what pip would fetch otherwise (see below)

Schemas come from two sources, by turns: JSON Schema's official suite, which has every keyword alone and is in the
source of the package jsonschema (pip fetches it); and compositions to a depth of three, with references, drawn by the
seed, which remain without a network.

    answers    at temperature 1: each that ended is compared with its schema by jsonschema
    suite      each document of the official suite whose schema it breaks must not be an answer in the form. One that
               the schema admits may be refused, for a form has one spelling; these are counted

It counts what was refused by the first words of the reason, and what was cut off.
"""

import argparse
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import jsonschema
from constrained import admits, composed, open_forms, rules
from referencing.exceptions import Unresolvable
from stages import pipeline

from splitinfer import SamplingParams
from splitinfer.core.grammar import Grammar
from splitinfer.demo import TARGET
from splitinfer.errors import RequestError
from splitinfer.llm import LLM
from splitinfer.llm.forms import AnswerForms

from .report import Report

Schema = dict[str, Any]

_AT_ONCE = 40  # answers
_MOST_TOKENS = 400  # of an answer
_DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
_ELSEWHERE = re.compile(r'"\$(?:ref|dynamicRef|schema)": "(?!https?://json-schema\.org/draft)[a-z]+:')


# -- schemas ---------------------------------------------------------------------------------------


def fetch(folder: Path) -> str:
    """Let pip fetch what holds the official suite; why that failed, or ""."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*pip, f"jsonschema=={jsonschema.__version__}"], capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2][:200] or "pip failed"
    with tarfile.open(next(folder.glob("*.gz"))) as packed:
        packed.extractall(folder, filter="data")
    return ""


def official(folder: Path) -> list[dict[str, Any]]:
    """The suite's groups, a schema with documents each, that need no other documents."""
    found = list[dict[str, Any]]()
    for draft, dialect in _DRAFTS.items():
        for file in sorted(folder.rglob(f"tests/{draft}/*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict) and not _ELSEWHERE.search(json.dumps(schema)):
                    found.append({**group, "schema": {"$schema": dialect, **schema}})
    return found


# -- what a form admits ----------------------------------------------------------------------------


def _spelt(data: Any, schema: Schema) -> set[str]:
    """A document as a form may spell it: its keys as they come, and in the schema's order."""
    texts = {json.dumps(data, separators=(",", ":"), ensure_ascii=False)}
    if isinstance(data, dict):
        order = {name: i for i, name in enumerate(schema.get("properties", {}))}
        sorted_ = dict(sorted(data.items(), key=lambda item: order.get(item[0], len(order))))
        texts.add(json.dumps(sorted_, separators=(",", ":"), ensure_ascii=False))
    return texts


# -- the campaign ----------------------------------------------------------------------------------


class Campaign:
    def __init__(self, report: Report) -> None:
        self._report = report
        self.refused, self.counts = Counter[str](), Counter[str]()

    def compare(self, forms: AnswerForms, group: dict[str, Any]) -> None:
        try:
            rules(forms, SamplingParams(grammar=group["schema"]))
        except RequestError as error:
            self.refused[f"{error}"[:90]] += 1
            self.counts["groups_refused"] += 1
            return
        for test in group["tests"]:
            texts = _spelt(test["data"], group["schema"])
            is_admitted = any(admits(forms, Grammar.json(group["schema"]), text) for text in texts)
            kind = f"documents_{'valid' if test['valid'] else 'broken'}_{'taken' if is_admitted else 'refused'}"
            self.counts[kind] += 1
            is_right = test["valid"] or not is_admitted
            self._report.check(is_right, f"{test['data']!r:.200} is an answer of {json.dumps(group['schema'])}")

    def answer(self, llm: LLM, number: int, schemas: Sequence[Schema]) -> None:
        requests = []
        for seed, schema in enumerate(schemas, number):
            params = SamplingParams(grammar=schema, temperature=1.0, seed=seed, max_tokens=_MOST_TOKENS)
            try:
                requests.append((schema, llm.submit("The record of the king: ", params)))
            except RequestError as error:
                self.refused[f"{error}"[:90]] += 1
                self.counts["schemas_refused"] += 1
        for schema, request in requests:
            output = request.result()
            if output.finish_reason != "stop":
                self.counts[f"answers_cut_by_{output.finish_reason}"] += 1
                self.refused.update([f"while it ran: {output.error}"[:90]] if output.error else [])
            else:
                self.counts["answers_ended"] += 1
                problem = _problem(output.text, schema)
                self._report.check(problem is None, f"{problem}: {json.dumps(schema)[:1000]}: {output.text[:400]!r}")
        self.counts["schemas"] += len(schemas)


def _problem(text: str, schema: Schema) -> str | None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except Unresolvable:
        return None  # it names another document, and nobody can say
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}".split("\n", 1)[0][:120]
    return None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suites", type=Path, help="a folder with the package's source; without, pip fetches it")


def campaign(report: Report, given: argparse.Namespace) -> None:
    lacking = "" if given.suites else fetch(report.folder)
    groups = official(given.suites or report.folder)
    report.say(f"{len(groups)} groups of the suite{lacking and f'; pip: {lacking}'}")
    found = Campaign(report)
    with open_forms() as forms:
        report.begin(0.5)
        for group in report.chance("suite").sample(groups, len(groups)):
            if report.is_over:
                break
            found.compare(forms, group)
    known = [group["schema"] for group in report.chance("schemas").sample(groups, len(groups))]
    chance = report.chance("compositions")
    drawn = (composed(chance) for _ in repeat(None))
    schemas = chain(chain.from_iterable((one, next(drawn)) for one in known), drawn)
    with pipeline(TARGET, [6, 6], max_running=_AT_ONCE) as llm:
        report.begin(0.5)
        for number in report.numbers():
            found.answer(llm, number * _AT_ONCE, [*islice(schemas, _AT_ONCE)])
    report.figures |= {
        **found.counts, "refused": dict(found.refused.most_common()),
        "suite": len(groups), "not_fetched": lacking,
    }  # fmt: skip
