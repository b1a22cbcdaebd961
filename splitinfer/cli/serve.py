"""`splitinfer serve`: the pipeline for clients that speak OpenAI's or Anthropic's API."""

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from splitinfer.cli.automatic import layout_of
from splitinfer.cli.options import PipelineOptions, finite, settings_of, with_pipeline_options
from splitinfer.cli.running import finish, set_up
from splitinfer.errors import ConfigError, SplitinferError
from splitinfer.shutdown import shutdown

if TYPE_CHECKING:
    from splitinfer.cli.draining import Draining
    from splitinfer.llm import LLM

log = logging.getLogger(__name__)

DEFAULT_PORT = 8080
_LOOK_EVERY = 1.0  # seconds between looks whether the pipeline still lives
_ACCESS = "Access: who may use the server"


@with_pipeline_options
def serve(
    options: PipelineOptions,
    host: Annotated[
        str, typer.Option("--host", help="Interface to listen on; 0.0.0.0 for all.", rich_help_panel=_ACCESS)
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
            help="A key that clients must show; may be repeated. Better in the variable: other users see options.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", help="A file of keys, see `splitinfer keys`.", rich_help_panel=_ACCESS),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Need no key, also beyond this machine.", rich_help_panel=_ACCESS)
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
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", min=0, callback=finite, help="Seconds that answers may take after SIGTERM."),
    ] = 5.0,
    otlp: Annotated[
        str | None,
        typer.Option(
            "--otlp", help="A collector of OpenTelemetry, as http://127.0.0.1:4318, for a span of each answer."
        ),
    ] = None,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write what is asked to the log, which has nothing of it otherwise.")
    ] = False,
) -> None:
    """Serve the model over HTTP, for clients of OpenAI's and Anthropic's APIs."""
    set_up(options.verbose, info=True)

    def run() -> int:
        from splitinfer.cli.serving import Access, opened_server, service_settings, spans_to

        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        access = Access(
            host, tuple(api_key or ()), api_keys, no_auth, tuple(allow_host or ()), tuple(cors or ()), tls_cert, tls_key
        )
        gate, spans = access.gate_at(port), spans_to(otlp)  # before minutes of loading
        settings = service_settings(settings_of(options))
        from splitinfer.cli.draining import open_llm

        servers: list[Draining] = []
        with (
            open_llm(layout_of(options, settings), options.model, settings, shutdown, servers, drain_seconds) as llm,
            opened_server(
                llm, access, gate, servers, port, model_name, max_connections, logs_prompts=log_prompts, spans=spans
            ) as said,
        ):
            log.info("%s", said)
            stay_open(llm)

    finish(run, options.verbose)


def stay_open(llm: "LLM") -> NoReturn:
    """Stay while a pipeline lives; a signal ends the process. Raises SplitinferError: the pipeline failed."""
    while (failure := llm.health().failure) is None or shutdown.has_begun:
        threading.Event().wait(_LOOK_EVERY)
    raise SplitinferError(f"{failure}; start it again with the same command")
