"""The worker's side: its loop, the handshake on its port, and which keys may use it."""
