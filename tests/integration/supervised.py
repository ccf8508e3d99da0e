"""What tests ask of a supervised service."""

from kvharbor.v1 import pool_service_pb2 as pools
from process_tree import children_of
from raw_caller import RawCaller
from service_process import DEADLINE_S, ServiceProcess
from waiting import until


def server_info(service: ServiceProcess) -> pools.GetServerInfoResponse:
    """Asks the service about itself."""
    with RawCaller(str(service.socket)) as caller:
        return caller.pools.GetServerInfo(pools.GetServerInfoRequest(), timeout=DEADLINE_S)


def standby_of(service: ServiceProcess) -> int:
    """Waits for the child that waits for its turn, and returns its pid."""
    return until(lambda: set(children_of(service.process.pid)) - {service.child_pid}).pop()
