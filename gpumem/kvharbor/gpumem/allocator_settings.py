"""Settings in the environment that change how libraries allocate device memory.

Only plain allocations can be exported: those of stream-ordered pools and expandable segments cannot. kvharbor makes
its arenas apart from every library's allocator, so none of these settings matters to it; but where an export fails,
they and the libraries that are loaded before all others (which may replace the driver's calls) are the first to be
doubted.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

_SUSPECT: Final = {
    "PYTORCH_CUDA_ALLOC_CONF": re.compile("expandable_segments:true|backend:cudamallocasync", re.IGNORECASE),
    "PYTORCH_ALLOC_CONF": re.compile("expandable_segments:true|backend:cudamallocasync", re.IGNORECASE),
    "TF_GPU_ALLOCATOR": re.compile("cuda_malloc_async", re.IGNORECASE),
    "XLA_PYTHON_CLIENT_ALLOCATOR": re.compile("cuda_async|vmm", re.IGNORECASE),
    "LD_PRELOAD": re.compile("."),
}
"""What value of which variable puts memory of somebody's beyond export."""


def allocator_settings(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the settings in question that are there, each as NAME=value."""
    return tuple(
        f"{name}={environment[name]}"
        for name, suspect in _SUSPECT.items()
        if name in environment and suspect.search(environment[name])
    )
