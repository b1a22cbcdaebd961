"""The worker: its loop, the handshake on its port, access control by keys."""
