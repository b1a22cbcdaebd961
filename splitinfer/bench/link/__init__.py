"""``splitinfer bench --mode link``: links, beside the bare sockets below them."""
