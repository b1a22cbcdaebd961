"""Chooses a layout where none is given: measures the machines, plans, and says what was chosen and why.

    model, workers ──survey──▶ profiles ──placement──▶ the best cut for one aim ──▶ a layout, and a paragraph

What was measured is remembered (``engine.profiling.measure``), so that the second time takes as long as measuring
the links does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from splitinfer.common.endpoint import WORKER_PORT, Endpoint, free_name
from splitinfer.common.plain_text import rate, size
from splitinfer.core.kv.format import EXACT, format_of
from splitinfer.core.layout import LOCAL, Layout, StageSpec, lay_out
from splitinfer.discovery.discover import best_addresses
from splitinfer.discovery.workers import is_same_name
from splitinfer.engine.drafts.drafters import has_heads
from splitinfer.engine.fleet.fleet import Notice
from splitinfer.engine.fleet.local_workers import LocalWorker, give_back, started
from splitinfer.engine.fleet.ranks import halves_of
from splitinfer.engine.profiling.drafts import describe_heads, measure_draft
from splitinfer.engine.profiling.measure import READS_OF_TOKEN, Question, remembered
from splitinfer.engine.profiling.survey import Surveyor
from splitinfer.engine.versions import machine_name
from splitinfer.errors import CannotFit, ConfigError, LayoutError, WorkerUnreachable
from splitinfer.keyring import Keyring
from splitinfer.llm.setup import trained_drafter
from splitinfer.machine.profile import MachineProfile, ModelProfile, Profiles
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import open_model
from splitinfer.models.load.layer_kinds import DescribedModel, describe, with_half
from splitinfer.models.load.loader import resolve_dtype
from splitinfer.models.load.trained import is_heads
from splitinfer.models.memory import free_bytes
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.comparison import Comparison, beside, held_in_words
from splitinfer.placement.document import compared, layout_of, name_in_words, shortage
from splitinfer.placement.plan import plan
from splitinfer.places import caches
from splitinfer.settings import NO_DRAFT, Settings
from splitinfer.system.disk import read_speed

ACCEPTANCE = 0.7  # share of drafts that are taken to be right before any was made
_WORKER = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<address>[^#=]+)(?:#(?P<key>[0-9a-fA-F]{64}))?")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A layout with its explanation in words. ``profiles``: the machines' measurements. ``beside``: a comparison of the
    layout with this machine alone."""

    layout: Layout
    text: str
    profiles: Profiles | None = None
    beside: Comparison | None = None


def choose_layout(
    model: str,
    workers: Sequence[str | Mapping[str, Any]],
    settings: Settings,
    notice: Notice,
    *,
    aim: Aim = Aim.CHAT,
    again: bool = False,
    uses_all: bool = False,
) -> Chosen:
    """Measure this machine and ``workers``, and choose the best cut of ``model``; of those in which every machine has
    layers, if it ``uses_all``.

    Raises:
        ConfigError: a worker's address cannot be read.
        CannotFit: no cut fits; the text says by how much, and what would.
        PeerError, ModelError: a machine cannot be used, or the model.
    """
    if not workers:  # there is nothing to choose
        return alone(model, settings)
    specs = found_workers(workers)
    profiles = measured_profiles(model, specs, settings, notice, again=again)
    return chosen_from(profiles, settings, aim, uses_all=uses_all)


def alone(model: str, settings: Settings) -> Chosen:
    """Return all layers on this machine, and what another one would bring: the speed, if this machine was measured for
    the model before; else the memory.

    Raises:
        CannotFit: the weights take more memory than is free.
        ModelError: there is no such model.
    """
    checkpoint = open_model(model)
    weights, free = sum(each.nbytes for each in checkpoint.tensors.values()), free_bytes()
    here, question = _own_name(set()), Question(model, checkpoint, "auto", settings.kv_format or EXACT)
    described = _described(question).profile
    experts, chosen = described.experts(0, described.num_layers)
    if weights - max(0, experts - 2 * chosen) > free:
        raise _too_large(model, weights, free)
    only = Layout((StageSpec(here, 0, described.num_layers),), model, name="(planned)")
    machine = remembered(here, question)
    if machine is None:
        on_disk = _on_disk(model, experts, chosen, weights - free) if weights > free else ""
        return Chosen(only, " ".join(filter(None, [on_disk, held_in_words(described)])))
    asked = Asked(context=settings.context_of(described.context_length), token_budget=settings.token_budget)
    shown = beside(plan(Profiles(described, (machine,)), asked, [Aim.CHAT]), Aim.CHAT)
    return Chosen(only, shown.sentence, beside=shown)


def _on_disk(model: str, experts: int, chosen: int, missing: int) -> str:
    """Return sentences about a model that fits only without ``missing`` bytes of its experts, with the speed that this
    machine's disk allows. ``chosen``: bytes of experts for each token."""
    share = missing / experts
    speed = read_speed(caches(), chosen // READS_OF_TOKEN)
    said = f"{model} fits with {1 - share:.0%} of its experts in memory; the others are read from disk"
    if speed is None:
        return f"{said}."
    return f"{said}: at {size(round(speed))} a second, at most {rate(speed / (share * chosen))} tokens/s."


def _too_large(model: str, weights: int, free: int) -> CannotFit:
    return CannotFit(
        f"{model} has {size(weights)} of weights, and {size(free)} are free here. A second machine with "
        f"{size(weights - free)} free can hold the rest, and needs some more for conversations: "
        f"`splitinfer up HOST --model {model}` uses one that ssh reaches, `splitinfer init` pairs any other"
    )


def _described(question: Question) -> DescribedModel:
    dtype, kv_format = resolve_dtype(question.dtype), format_of(question.kv_format)
    return describe(question.checkpoint, dtype, question.name, kv_format=kv_format)


def chosen_from(profiles: Profiles, settings: Settings, aim: Aim, *, uses_all: bool = False) -> Chosen:
    """Return the best cut of measured machines.

    Raises:
        CannotFit: no cut fits.
    """
    context = settings.context_of(profiles.model.context_length)
    asked = Asked(
        context=context,
        acceptance=None if profiles.model.draft is None else ACCEPTANCE,
        token_budget=settings.token_budget,
        uses_all=uses_all,
    )
    found = plan(profiles, asked, [aim])
    best = found.best.get(aim)
    if best is None:
        raise CannotFit(shortage(profiles, asked, aim))
    layout = replace(layout_of(found, best), name="(planned)")
    shown = beside(found, aim)
    sums = compared(found, best) if found.ways[aim].tensor_parallel is not None else ()
    named, sentences = name_in_words(found.profiles, best.cut), " ".join([shown.sentence, *sums])
    return Chosen(layout, f"Planned for {aim}: {named}. {sentences}", profiles, shown)


def measured_profiles(
    model: str,
    workers: Sequence[StageSpec],
    settings: Settings,
    notice: Notice,
    dtype: str = "auto",
    *,
    again: bool = False,
) -> Profiles:
    """Measure this machine, ``workers`` and the links between them; what a machine remembers is measured ``again`` only
    on demand.

    Raises:
        PeerError, ModelError, ConfigError: one cannot be measured.
    """
    checkpoint = open_model(model)
    here = _own_name({spec.name for spec in workers})
    with ExitStack() as stack:

        def take_local(name: str) -> LocalWorker:
            worker = started(name, settings.disk)
            stack.push(lambda kind, *_: (LocalWorker.kill if kind else give_back)(worker))
            return worker

        question = Question(model, checkpoint, dtype, settings.kv_format or EXACT)
        own_key, timeout = Keyring().own, settings.connect_timeout
        found = _described(question)
        surveyor = Surveyor(
            question, here, workers, own_key, timeout, notice, again=again, take_local=take_local,
            row=found.profile.hidden_row,
        )  # fmt: skip
        (own, *others), links = surveyor.run()
    own_dtype = resolve_dtype(dtype)
    described = with_drafter(found, checkpoint, settings.draft, own_dtype)
    described = with_half(described, found, format_of(question.kv_format))
    if described.draft is None and settings.draft not in (None, NO_DRAFT):
        draft, seconds, more = measure_draft(str(settings.draft), dtype, checkpoint.vocab_size or 2)
        own = replace(own, draft=seconds, draft_more=more)
        described = replace(described, draft=draft)
    others = [replace(each, is_exposed=_is_exposed(each, settings)) for each in others]
    return Profiles(described, (own, *others), tuple(links))


def _is_exposed(machine: MachineProfile, settings: Settings) -> bool:
    """Return whether a stage across this machine and another would be refused, because of the way of its sums."""
    both = StageSpec("both", 0, 1, across=(LOCAL, str(machine.address)))
    try:
        halves_of(both, insecure=settings.insecure_sums)
    except (ConfigError, WorkerUnreachable):
        return True
    return False


def with_drafter(found: DescribedModel, checkpoint: Checkpoint, draft: str | None, dtype: str | None) -> ModelProfile:
    """Return a model's profile, with its drafter if that is on the last stage. Its taps double what a link carries."""
    named = None if draft == NO_DRAFT else draft
    trained = checkpoint if has_heads(named) else trained_drafter(named)
    if trained is None:
        return found.profile
    row = found.profile.hidden_row * (1 if trained is checkpoint or is_heads(trained) else 2)
    return replace(found.profile, draft=describe_heads(str(named), trained, found, dtype), hidden_row=row)


def profile_of(layout: Layout, checkpoint: Checkpoint) -> tuple[ModelProfile, int]:
    """Return the profile of a layout's model and drafter, and the bytes of unfused attention for each token of context.
    Call it on the engine's thread: graphs are read without MLX's compiler, which the whole process shares."""
    dtype = resolve_dtype(layout.dtype)
    found = describe(checkpoint, dtype, str(layout.model), kv_format=format_of(layout.kv_format))
    return with_drafter(found, checkpoint, layout.draft, dtype), found.scores


def found_workers(workers: Iterable[str | Mapping[str, Any]]) -> tuple[StageSpec, ...]:
    """Return ``workers`` as stages, with the keys of this machine's keyring.

    A worker that is named only as the keyring names it gets the address that it announces; without an announcement, its
    name is taken for its address.

    Raises:
        ConfigError: as ``as_workers``.
    """
    specs = as_workers(workers, [(each.key, each.name) for each in Keyring().known()])
    bare = [  # their address is a machine's name and nothing else
        (each.name, each.key, str(each.address))
        for each in specs
        if each.key and "." not in each.name and each.address == f"tcp://{each.name}:{WORKER_PORT}"
    ]
    at = best_addresses(bare) if bare else {}
    return tuple(replace(each, address=at.get(each.name, each.address)) for each in specs)


def as_workers(
    workers: Iterable[str | Mapping[str, Any]], known: Sequence[tuple[str, str]] = ()
) -> tuple[StageSpec, ...]:
    """Return the workers by their addresses: ``[NAME=]ADDRESS[#KEY]``, where an address is ``local`` or an
    ``Endpoint``; or mappings with the keys ``address``, ``name`` and ``key``. ``known``: keys and their names; a worker
    of another machine without a key has the one that is known by its name.

    Raises:
        ConfigError: one cannot be read, two are alike, or several keys are known by one's name.

    >>> [(each.name, each.address) for each in as_workers(["mini.local", "air=tcp://10.0.0.3:7000", "local"])]
    [('mini', 'tcp://mini.local:5577'), ('air', 'tcp://10.0.0.3:7000'), ('local', 'local')]
    """
    parts, names = [], set[str]()
    for worker in workers:
        name, address, key = _parts_of(worker)
        name = free_name(name or _name_of(address), names)
        names.add(name)
        if key is None and not _is_here(address):
            key = _key_of(name, known)
        parts.append((name, 1, address, {"key": key}))
    specs = lay_out([("(coordinator)", 1, None), *parts])
    return Layout(specs, name="of --workers").stages[1:]


def named(workers: str) -> list[str]:
    """Return the workers of a command line, with commas between them."""
    return [each.strip() for each in workers.split(",") if each.strip()]


def _parts_of(worker: str | Mapping[str, Any]) -> tuple[str, str, str | None]:
    if isinstance(worker, Mapping):
        unknown = sorted(set(worker) - {"name", "address", "key"})
        if unknown or not worker.get("address"):
            raise LayoutError(f"a worker has an address, and perhaps a name and a key, but this is {dict(worker)}")
        return str(worker.get("name") or ""), str(worker["address"]), worker.get("key")
    match = _WORKER.fullmatch(worker.strip())
    if match is None:
        raise LayoutError(
            f"{worker!r:.100} is not a worker's address; write [NAME=]ADDRESS[#KEY], such as mini=mini.local:5577"
        )
    return match["name"] or "", match["address"], match["key"]


def _key_of(name: str, known: Sequence[tuple[str, str]]) -> str | None:
    keys = sorted({key for key, whose in known if whose and is_same_name(whose, name)})
    if len(keys) > 1:
        raise LayoutError(f"{len(keys)} keys are known here under the name {name!r}; write {name}=ADDRESS#KEY")
    return keys[0] if keys else None


def _is_here(address: str) -> bool:
    return address == LOCAL or address.startswith("inproc://")


def _name_of(address: str) -> str:
    """Return a name for the machine at an address."""
    if _is_here(address):
        return address if address == LOCAL else "worker"
    at = Endpoint.parse(address)
    return at.name or ("worker" if ":" in at.host else at.host)


def _own_name(others: set[str]) -> str:
    return free_name(Endpoint(machine_name()).name or "worker", others)
