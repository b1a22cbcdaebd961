"""``--mode server``: what a client over HTTP loses to one of the library."""
