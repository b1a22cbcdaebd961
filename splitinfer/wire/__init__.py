"""What crosses a link, as values and as bytes. Pure: no sockets, no arrays, no clock.

``messages`` are the words, ``codec`` turns them into frame headers and back, ``session`` says which
word may follow which.
"""
