"""Keys, values and states of sequences: how they are stored, grow, are rolled back, and attended to by rows."""
