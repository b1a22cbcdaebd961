"""`splitinfer serve`: serves the pipeline to clients that speak OpenAI's, Anthropic's or Ollama's API."""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from splitinfer.cli.opening import DRAIN_SECONDS
from splitinfer.cli.options import PipelineOptions, check_named, finite, with_options
from splitinfer.cli.running import set_up
from splitinfer.errors import ConfigError

DEFAULT_PORT = 8080
_access = partial(typer.Option, rich_help_panel="Access: who may use the server")
_models = partial(typer.Option, rich_help_panel="Several models")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(PipelineOptions):
    """The options of a server. ``api_key``: keys themselves. ``api_keys``: a file with digests of further keys."""

    host: Annotated[
        str,
        _access("--host", help="Address to listen on: 127.0.0.1, only this machine; 0.0.0.0, all networks."),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Name of the model for clients; its folder's if not given.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        _access(
            "--api-key",
            envvar="SPLITINFER_API_KEY",
            show_default=False,
            help="A key that clients must show; may be repeated. Safer in the variable SPLITINFER_API_KEY: other users "
            "can see command lines.",
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        _access("--api-keys", help="A file of keys, see `splitinfer keys`."),
    ] = None
    no_auth: Annotated[
        bool,
        _access("--no-auth", help="Let everyone who can reach the server use it without a key."),
    ] = False
    allow_host: Annotated[
        list[str] | None,
        _access(
            "--allow-host",
            help="A further name under which clients address this server, as behind a proxy; may be repeated.",
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        _access(
            "--cors",
            help="A site whose pages may use the server, as https://chat.example; '*' for all; may be repeated.",
        ),
    ] = None
    tls_cert: Annotated[Path | None, _access("--tls-cert", help="Certificate, for https.")] = None
    tls_key: Annotated[Path | None, _access("--tls-key", help="Its key.")] = None
    max_connections: Annotated[int, _access("--max-connections", min=1, help="Connections at a time.")] = 4096
    also: Annotated[
        list[str] | None,
        _models(
            "--also",
            help=r"A further model that clients may name: \[NAME=]MODEL, or a layout's file; may be repeated. It is "
            "loaded on its first request, in place of other models if memory does not suffice.",
        ),
    ] = None
    max_loaded: Annotated[
        int | None,
        _models("--max-loaded", min=1, help="Models in memory at a time. Default: as many as fit."),
    ] = None
    ttl: Annotated[
        float | None,
        _models(
            "--ttl",
            min=1,
            callback=finite,
            help="Seconds after which a model that nobody asks for is unloaded. Default: it stays.",
        ),
    ] = None
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", min=0, callback=finite, help="Seconds that answers may take after SIGTERM."),
    ] = DRAIN_SECONDS
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Also write prompts to the log.")] = False


@with_options
def serve(options: ServeOptions) -> None:
    """Serve models over HTTP, for clients of OpenAI's, Anthropic's and Ollama's APIs."""
    check_named(options)
    set_up(options.verbose, info=True)
    from splitinfer.cli.serving import serving, serving_several, stay_open

    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    if options.also or options.max_loaded is not None or options.ttl is not None:
        with serving_several(options):
            threading.Event().wait()
    with serving(options) as llm:
        stay_open(llm)
