"""A process that opens watches and reads them for ever: `python watchers.py SOCKET TOKEN POOL_ID COUNT`.

It prints a line once all are open.
"""

import sys
import threading
from collections.abc import Iterable

import grpc

from kvharbor.v1 import cache_service_pb2, cache_service_pb2_grpc


def main() -> None:
    """Opens them on one channel."""
    socket, token, pool_id, count = sys.argv[1:]
    channel = grpc.insecure_channel(f"unix:{socket}")
    stub = cache_service_pb2_grpc.CacheServiceStub(channel)
    request = cache_service_pb2.WatchRequest(pool_id=pool_id)
    watches = [stub.Watch(request, metadata=(("kvharbor-session", token),)) for _ in range(int(count))]
    for watch in watches:
        next(watch)

    def read(watch: Iterable[object]) -> None:
        try:
            for _ in watch:
                pass
        except grpc.RpcError:
            return

    readers = [threading.Thread(target=read, args=(watch,)) for watch in watches]
    for reader in readers:
        reader.start()
    sys.stdout.write("open\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
