"""Profiles of machines and links, measured for one model, from which layouts are planned (``machine.profile``)."""
