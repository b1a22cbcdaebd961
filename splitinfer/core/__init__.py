"""Everything that decides: pure, standard library only, tested in milliseconds.

This package has no arrays, no sockets, no threads, no clock and no random numbers; time and random draws are
arguments. ``lint-imports`` enforces this.
"""
