"""The lack of file descriptors: the kernel's word for it as a refusal that names the limit and the remedy."""

import contextlib
import errno
import resource
from collections.abc import Iterator

from kvharbor.server.errors import DescriptorsExhausted

_OWN = "set a higher one (ulimit -Hn, LimitNOFILE= of the unit) and restart the service, or let sessions end"
_SYSTEM = "raise fs.file-max of the host"


def is_exhausted(failure: OSError) -> bool:
    """Tells whether this process, or the system, can have no more descriptors now."""
    return failure.errno in (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def needing_descriptors() -> Iterator[None]:
    """Raises DescriptorsExhausted for what fails within for want of a descriptor."""
    try:
        yield
    except OSError as failure:
        if not is_exhausted(failure):
            raise
        if failure.errno == errno.ENFILE:
            raise DescriptorsExhausted(limit="that of the whole system", remedy=_SYSTEM) from None
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise DescriptorsExhausted(limit=f"{soft} open files", remedy=_OWN) from None
