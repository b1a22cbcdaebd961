"""The protocol between coordinator and workers, as values and as bytes. Pure: no sockets, no arrays, no clock.

messages   the messages, as frozen dataclasses
codec      messages to frame headers and back, and one end of a link: what may be sent and received in its four phases
"""
