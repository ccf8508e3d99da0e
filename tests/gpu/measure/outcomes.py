"""What becomes of calls that may fail."""

from collections.abc import Callable

from kvharbor.gpumem import CudaUnavailable, DeviceFailed


class Outcomes:
    """The outcome of each call by its name: "ok", or the code of the call of CUDA that failed."""

    def __init__(self) -> None:
        self.codes: dict[str, str] = {}

    def call(self, name: str, action: Callable[[], object]) -> None:
        """Makes a call and notes what becomes of it. What is no failure of CUDA comes through."""
        try:
            action()
        except DeviceFailed as failure:
            self.codes[name] = failure.code
        except CudaUnavailable as failure:
            self.codes[name] = str(failure)
        else:
            self.codes[name] = "ok"
