"""The worker: its loop, the handshake on its port, and access control by keys."""
