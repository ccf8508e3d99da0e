"""Releases by request_id or group."""

from kvharbor.client import refusals
from kvharbor.client.calls import request
from kvharbor.client.errors import InvalidField
from kvharbor.v1 import cache_service_pb2 as cache


def item(request_id: str | None, group: str | None) -> cache.ReleaseItem:
    """Names what to end; exactly one of the two is given."""
    if (request_id is None) == (group is None):
        raise InvalidField.of(
            "release", (request_id, group), limit="a request_id or a group", remedy="name exactly one"
        )
    if request_id is not None:
        return request(cache.ReleaseItem, request_id=request_id)
    return request(cache.ReleaseItem, group=group)


def sequence_count(reply: cache.ReleaseResponse) -> int:
    """Returns how many sequences the one item of a release has ended, or raises its refusal."""
    (result,) = reply.results
    if result.status.code:
        raise refusals.from_item(result.status)
    return result.released_sequence_count
