"""Everything that decides: pure, standard library only, tested in milliseconds.

No arrays, no sockets, no threads, no clock and no chance live here; time and random numbers are
arguments. ``lint-imports`` holds this.
"""
