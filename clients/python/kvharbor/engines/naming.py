"""What an engine is called in the service's statistics."""

import os
from importlib import metadata

from kvharbor.client import Engine


def running_engine(name: str, version: str, instance: str) -> Engine:
    """Returns an engine; without an instance it is this process that tells it from others."""
    return Engine(name, version, instance or f"pid {os.getpid()}")


def installed_version(distribution: str) -> str:
    """Returns the version of an installed package, empty where it is not known."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
