"""Durations of the protocol."""

from google.protobuf.duration_pb2 import Duration


def seconds(duration: Duration) -> float:
    """Returns a Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9
