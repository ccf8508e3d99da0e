"""What an engine says of its steps, as `Pool.blocks.computing` takes it in."""


class FakeComputing:
    """Whether a step is under way."""

    def __init__(self) -> None:
        self.is_under_way = False

    def begin(self) -> None:
        """A step has begun."""
        self.is_under_way = True

    def end(self) -> None:
        """None is under way."""
        self.is_under_way = False

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()
