"""The protocol between coordinator and workers, as values and as bytes. Pure: no sockets, no arrays, no clock.

messages   the messages, as frozen dataclasses
headers    messages to frame headers and back; one end of a link, with the messages allowed in each of its four phases
steps      the two messages of each step, Rows and Result, and the figures in them
"""
