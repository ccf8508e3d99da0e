"""The asyncio client: the names of `kvharbor.client`, with calls to await.

Errors, results, namespaces and batches are those of `kvharbor.client`.
"""

from kvharbor.client.aio.connecting import connect
from kvharbor.client.aio.harbor import Harbor
from kvharbor.client.aio.link import Watch
from kvharbor.client.aio.pool import Pool, PoolHandle
from kvharbor.client.aio.recording import Recording
from kvharbor.client.aio.sequence import Sequence

__all__ = ["Harbor", "Pool", "PoolHandle", "Recording", "Sequence", "Watch", "connect"]
