"""``splitinfer bench --mode link``: links beside the sockets that carry them."""
