"""What the loops leave of a device's time."""
