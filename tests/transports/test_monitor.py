"""Events of a socket's monitor."""

import pytest
import zmq
import zmq.utils.monitor

from transports.monitor import parse_event


def test_events_are_read_as_pyzmq_reads_them() -> None:
    events = zmq.Event.LISTENING | zmq.Event.CLOSED
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as socket,
        socket.get_monitor_socket(events) as monitor,
    ):
        monitor.setsockopt(zmq.RCVTIMEO, 10_000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        socket.unbind(f"tcp://127.0.0.1:{port}")
        messages = [monitor.recv_multipart(), monitor.recv_multipart()]
    known = [zmq.utils.monitor.parse_monitor_message(message) for message in messages]
    assert [parse_event(message) for message in messages] == [(each["event"], each["value"]) for each in known]
    assert [event for event, _ in map(parse_event, messages)] == [zmq.Event.LISTENING, zmq.Event.CLOSED]


@pytest.mark.parametrize("message", [[], [b"\x01\x00\x00\x00\x00\x00"], [b"\x01\x00", b"tcp://"]])
def test_what_is_no_event_is_refused(message: list[bytes]) -> None:
    with pytest.raises(ValueError, match="not an event"):
        parse_event(message)
