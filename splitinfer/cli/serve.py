"""`splitinfer serve`: serves the pipeline to clients that speak OpenAI's, Anthropic's or Ollama's API."""

import threading

from splitinfer.cli.options import check_named, with_options
from splitinfer.cli.running import set_up
from splitinfer.cli.serve_options import ServeOptions
from splitinfer.errors import ConfigError


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
