"""What gRPC health says: whether the process lives, and whether its pools can be used."""

from collections.abc import Iterable
from typing import Final

from grpc_health.v1 import health, health_pb2

LIVENESS: Final = "liveness"
"""The health service name that is SERVING as long as the process answers."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Readiness:
    """The health service. "" and the API's services tell readiness; LIVENESS holds all along [S19]."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", *service_names)

    async def starting(self) -> None:
        """Alive, and not ready: memory is still being reserved."""
        await self.servicer.set(LIVENESS, _SERVING)
        await self._set(_NOT_SERVING)

    async def ready(self) -> None:
        """Every declared pool can be used."""
        await self._set(_SERVING)

    async def draining(self) -> None:
        """No new calls; those under way go on."""
        await self._set(_NOT_SERVING)

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for name in self._names:
            await self.servicer.set(name, status)
