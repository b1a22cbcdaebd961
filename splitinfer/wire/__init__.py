"""The protocol between coordinator and workers, as values and as bytes. Pure: no sockets, no arrays, no clock.

messages   the messages, as frozen dataclasses
codec      messages to frame headers and back
session    the state machine of a link: which message may follow which
"""
