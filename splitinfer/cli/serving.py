"""Opens a pipeline with an HTTP server, for `serve` and for `chat --serve`; or one server with several models, each
with its planned or named layout (`serve --also`)."""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

from splitinfer.cli.opening import closing_of, layout_of, open_llm
from splitinfer.cli.options import PipelineOptions
from splitinfer.cli.running import say
from splitinfer.cli.serve import ServeOptions
from splitinfer.common.endpoint import Endpoint, is_loopback
from splitinfer.config import find_layout
from splitinfer.console import load_llm
from splitinfer.core.kv.budget import STAGE_MARGIN
from splitinfer.errors import ConfigError, SplitinferError
from splitinfer.launch.own import own_names
from splitinfer.llm import LLM
from splitinfer.llm.automatic import Chosen, named
from splitinfer.llm.setup import model_of
from splitinfer.models.folder.hub import open_model
from splitinfer.models.memory import free_bytes
from splitinfer.server.connections import Limits
from splitinfer.server.gate import EVERYWHERE, Gate, check_exposure, names_of
from splitinfer.server.keys import SHORT, ApiKey, ApiKeys, digest
from splitinfer.server.residents import Bounds, num_together
from splitinfer.server.running import Listen, Server, check_port, check_tls, router_of
from splitinfer.server.service import Service
from splitinfer.server.several import Entry, Several, Unloaded
from splitinfer.shutdown import shutdown
from splitinfer.system.interface_kind import address_for_others
from splitinfer.system.interfaces import local_interfaces
from splitinfer.system.open_files import make_room

log = logging.getLogger(__name__)

_OTHER_FILES = 256  # open files besides connections: links, models, KV on disk, and clients that are being refused
_MANY = 1024  # connections; a lower limit is worth a warning
_LOOK_EVERY = 1.0  # seconds between checks that the pipeline still runs


# -- who may use it ----------------------------------------------------------------------------------------------------


def gate_of(options: ServeOptions) -> Gate:
    """Return the rules of access to the server.

    Raises:
        ConfigError: they would admit more clients than the options allow, or the file of keys or the certificate cannot
            be used.
    """
    if options.tls_cert is not None and options.tls_key is not None:
        check_tls(options.tls_cert, options.tls_key)
    keys, origins = _keys(options), tuple(options.cors or ())
    check_exposure(options.host, has_keys=keys is not None, no_auth=options.no_auth, origins=origins)
    hosts = names_of(options.host, own_names(), options.allow_host or ())
    return Gate(hosts, frozenset(origin.rstrip("/") for origin in origins), keys)


def _keys(options: ServeOptions) -> ApiKeys | None:
    secrets = options.api_key or ()
    if not all(secret.strip() for secret in secrets):
        raise ConfigError("an API key is empty")
    if not is_loopback(options.host) and (short := min(map(len, secrets), default=SHORT)) < SHORT:
        log.warning("a key of %d characters can be found by trying; `splitinfer keys add` makes one that cannot", short)
    given = [ApiKey(f"given-{i}", digest(secret)) for i, secret in enumerate(secrets, 1)]
    return ApiKeys(given, options.api_keys) if given or options.api_keys is not None else None


# -- one model ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(options: ServeOptions, chosen: Chosen | None = None) -> Iterator[LLM]:
    """Open an LLM with a server, and print the server's address on standard error.

    Raises:
        ConfigError: the server cannot listen there, or the certificate cannot be used.
        SplitinferError: as ``open_llm``.
    """
    gate, servers = _checked(options), list[Server]()
    with open_llm(options, chosen, servers=servers, drain_seconds=options.drain_seconds) as llm, ExitStack() as stack:
        name = options.model_name or Path(llm.layout.model or "model").resolve().name
        service = Service(llm, name, gate, logs_prompts=options.log_prompts)
        _serve(options, service, llm, name, servers, stack)
        yield llm


@contextmanager
def serving_several(options: ServeOptions) -> Iterator[None]:
    """Open a server of several models, and load the first of them.

    Raises:
        ConfigError, SplitinferError: as ``serving``, and as ``entries_of``.
    """
    gate, servers = _checked(options), list[Server]()
    bounds = Bounds(free_bytes(), options.max_loaded, options.ttl)
    entries = entries_of(options, bounds)
    front = Service(cast(LLM, Unloaded()), "", gate, logs_prompts=options.log_prompts)
    several, first = Several(entries, bounds, front, router_of), entries[0]
    closing = closing_of(several, threading.Event(), servers, options.drain_seconds, options.settings)
    with shutdown.closed_by(closing), ExitStack() as stack:
        stack.callback(several.close)
        several.put(first.name, llm := first.open())
        _serve(options, front, llm, first.name, servers, stack, several)
        if others := ", ".join(each.name for each in entries[1:]):
            say(f"also served, and loaded when asked for: {others}")
        yield


def _checked(options: ServeOptions) -> Gate:
    """Return the rules of access. Check first that the server can listen, before anything is loaded."""
    gate = gate_of(options)
    check_port(options.host, options.port)
    return gate


def _serve(
    options: ServeOptions,
    service: Service,
    llm: LLM,
    name: str,
    servers: list[Server],
    stack: ExitStack,
    several: Several | None = None,
) -> None:
    """Open a server until ``stack`` closes, print its address, and add it to ``servers``."""
    limits = Limits(most=_room_for(options.max_connections))
    listen = Listen(options.host, options.port, options.tls_cert, options.tls_key, limits)
    server = Server(service, listen, several)
    servers.append(server)
    stack.callback(server.close)
    scheme = "http" if options.tls_cert is None else "https"
    host = address_for_others(local_interfaces()) if options.host in EVERYWHERE else None
    url = f"{scheme}://{Endpoint(host or options.host, server.port).authority}"
    say(_sentence(llm, name, url, service.gate))


def stay_open(llm: LLM) -> NoReturn:
    """Wait while a pipeline runs; a signal ends the process. Raises SplitinferError once the pipeline has failed."""
    while (failure := llm.health().failure) is None or shutdown.has_begun:
        threading.Event().wait(_LOOK_EVERY)
    raise SplitinferError(f"{failure}; start it again with the same command")


def _room_for(num_connections: int) -> int:
    """Return the number of connections that this process can have, at most ``num_connections``."""
    room = make_room(num_connections + _OTHER_FILES)
    if room >= num_connections + _OTHER_FILES:
        return num_connections
    most = max(1, room - _OTHER_FILES)
    level = logging.WARNING if most < _MANY else logging.DEBUG
    log.log(
        level, "%s connections at a time: this process may have %s open files (ulimit -n)", f"{most:,}", f"{room:,}"
    )
    return most


def _sentence(llm: LLM, name: str, url: str, gate: Gate) -> str:
    who = "no key is needed" if gate.keys is None else f"a key is needed ({len(gate.keys)} known)"
    context = f"context {llm.context_length:,} tokens"
    if llm.context_length < llm.model_context_length:
        context += f" of the model's {llm.model_context_length:,}"
    return f"serving {name} at {url}/v1, {context}, {who}; a page at {url}/"


# -- several models behind one server ----------------------------------------------------------------------------------

_NAMED = re.compile(r"(?:(?P<name>[\w.:-]+)=)?(?P<what>.+)")
_PAIRED = frozenset({"(paired)"})  # the workers of --auto, which are found when a model is loaded


def entries_of(options: ServeOptions, bounds: Bounds) -> list[Entry]:
    """Return the models of the options, then the models of ``also``: ``[NAME=]MODEL``, or a layout's file in place of a
    model.

    Raises:
        ConfigError: two models have one name.
        SplitinferError: a layout or a model cannot be used.
    """
    wanted = [(options.model_name, options), *(_also(options, each) for each in options.also or ())]
    found = [_entry(own, one) for own, one in wanted]
    names = [each.name for each in found]
    if (twice := next((one for one in names if names.count(one) > 1), None)) is not None:
        raise ConfigError(f"two models are called {twice!r}; give one another name: --also NAME=MODEL")
    sharing = num_together([each.needs for each in found], bounds)
    return [replace(each, open=partial(_load, one, sharing)) for each, (_, one) in zip(found, wanted, strict=True)]


def _also(options: ServeOptions, text: str) -> tuple[str | None, ServeOptions]:
    match = _NAMED.fullmatch(text)
    if match is None:
        raise ConfigError(f"--also {text!r:.80} names no model; write [NAME=]MODEL, or a layout's file")
    what = match["what"]
    if what.endswith((".yaml", ".yml")):
        return match["name"], replace(options, layout=what, model=None, workers=None, auto=False)
    return match["name"], replace(options, layout=None, model=what)


def _entry(name: str | None, options: PipelineOptions) -> Entry:
    layout = None if options.layout is None else find_layout(options.layout)
    model = options.model or ("" if layout is None else model_of(layout))
    checkpoint = open_model(model)
    weights = sum(each.nbytes for each in checkpoint.tensors.values())
    if layout is None:
        workers = frozenset(named(options.workers or "")) or (_PAIRED if options.auto else frozenset())
        share, num_here = 1 / (1 + len(workers)), 1  # it is planned when it is loaded
    else:
        parts = [(part, stage.num_layers / len(stage.ranks)) for stage in layout.stages for part in stage.ranks]
        workers = frozenset(str(part.address or part.key) for part, _ in parts if part not in layout.here)
        share = sum(layers for part, layers in parts if part in layout.here) / layout.num_layers
        num_here = len(layout.here)
    needs = int(weights * share) + num_here * STAGE_MARGIN
    return Entry(
        name or Path(model).resolve().name, model, checkpoint.context_length, needs, workers, partial(_load, options, 1)
    )


def _load(options: PipelineOptions, sharing: int) -> LLM:
    """Load the model that the options name. ``sharing``: the number of models that share this machine's memory."""
    chosen, settings = layout_of(options), replace(options.settings, grows_context=True, models_here=sharing)
    return load_llm(chosen, options.model if isinstance(chosen, str) else None, settings)
