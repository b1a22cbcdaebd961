"""`splitinfer serve`: the pipeline for clients that speak OpenAI's, Anthropic's or Ollama's API."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from splitinfer.cli.opening import DRAIN_SECONDS
from splitinfer.cli.options import PipelineOptions, check_named, finite, with_options
from splitinfer.cli.running import finish
from splitinfer.errors import ConfigError

DEFAULT_PORT = 8080
_ACCESS = "Access: who may use the server"
_MODELS = "Several models"


@with_options
def serve(
    options: PipelineOptions,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Address to listen on: 127.0.0.1, only this machine; 0.0.0.0, all networks.",
            rich_help_panel=_ACCESS,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Name of the model for clients; its folder's if not given.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="SPLITINFER_API_KEY",
            show_default=False,
            rich_help_panel=_ACCESS,
            help="A key that clients must show; may be repeated. Safer in the variable SPLITINFER_API_KEY: other users "
            "can see command lines.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", help="A file of keys, see `splitinfer keys`.", rich_help_panel=_ACCESS),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option(
            "--no-auth", help="Let everyone who can reach the server use it without a key.", rich_help_panel=_ACCESS
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            rich_help_panel=_ACCESS,
            help="A further name under which clients address this server, as behind a proxy; may be repeated.",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            rich_help_panel=_ACCESS,
            help="A site whose pages may use the server, as https://chat.example; '*' for all; may be repeated.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="Certificate, for https.", rich_help_panel=_ACCESS)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its key.", rich_help_panel=_ACCESS)] = None,
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Connections at a time.", rich_help_panel=_ACCESS)
    ] = 4096,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            rich_help_panel=_MODELS,
            help=r"A further model that clients may name: \[NAME=]MODEL, or a layout's file; may be repeated. It is "
            "loaded when it is asked for, in place of others where memory does not suffice.",
        ),
    ] = None,
    max_loaded: Annotated[
        int | None,
        typer.Option(
            "--max-loaded", min=1, help="Models in memory at a time. Default: as many as fit.", rich_help_panel=_MODELS
        ),
    ] = None,
    ttl: Annotated[
        float | None,
        typer.Option(
            "--ttl",
            min=1,
            callback=finite,
            rich_help_panel=_MODELS,
            help="Seconds after which a model that nobody asks for is unloaded. Default: it stays.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", min=0, callback=finite, help="Seconds that answers may take after SIGTERM."),
    ] = DRAIN_SECONDS,
    otlp: Annotated[
        str | None,
        typer.Option(
            "--otlp", help="A collector of OpenTelemetry, as http://127.0.0.1:4318, for a span of each answer."
        ),
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Also write prompts to the log.")] = False,
) -> None:
    """Serve models over HTTP, for clients of OpenAI's, Anthropic's and Ollama's APIs."""
    check_named(options)

    def run() -> int:
        from splitinfer.cli.serving import Access, Served, serving, serving_several, stay_open

        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        access = Access(
            host, tuple(api_key or ()), api_keys, no_auth, tuple(allow_host or ()), tuple(cors or ()), tls_cert, tls_key
        )
        how = Served(access, port, model_name, max_connections, drain_seconds, log_prompts, otlp)
        if also or max_loaded is not None or ttl is not None:
            from splitinfer.core.residents import Bounds
            from splitinfer.models.memory import free_bytes

            with serving_several(options, how, also or (), Bounds(free_bytes(), max_loaded, ttl)):
                threading.Event().wait()
        with serving(options, how) as llm:
            stay_open(llm)

    finish(run, options.verbose, info=True)
