"""What `kvharbor stats` calls a worker with this engine, when its session is opened with it."""

from kvharbor.client import Engine
from kvharbor.engines.naming import installed_version


def this_engine(instance: str = "") -> Engine:
    """Returns the engine for `connect(engine=...)`; without an instance it is told by `client_name` or pid."""
    return Engine("transformers", installed_version("transformers"), instance)
