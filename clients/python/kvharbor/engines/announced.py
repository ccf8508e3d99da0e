"""Prompts that others were told this engine computes, and that it does not compute any more [E18]."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvharbor.client import Chain

R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class _Ended:
    chain: Chain
    step: object
    is_complete: bool


class Announced(Generic[R]):
    """Chains by request, or by admission of one, from their acquire on; `abandon` tells others of those given up."""

    def __init__(self, abandon: Callable[[Sequence[Chain]], object]) -> None:
        self.chains: dict[R, Chain] = {}
        self._abandon = abandon
        self.ended: list[_Ended] = []
        """What is still to be told."""

    def add(self, request: R, chain: Chain) -> None:
        """A request computes what is missing of a chain; of that, only what names its contents is to be set."""
        if self.chains.get(request) != chain:
            self.end(request)
        self.chains[request] = chain

    def end(self, request: R, step: object = None, *, is_complete: bool = False) -> None:
        """A request computes no more of its chain than `step` does, which is under way: all of it if `is_complete`."""
        chain = self.chains.pop(request, None)
        if chain is not None:
            self.ended.append(_Ended(chain, step, is_complete))

    def tell(self, under_way: Collection[object] = ()) -> None:
        """Abandons what has ended, but for what steps under way go on with or another request computes just as well."""
        if not self.ended:
            return
        going_on = [each for each in self.ended if any(each.step is step for step in under_way)]
        computed = [*self.chains.values(), *(each.chain for each in going_on if each.is_complete)]
        due = [each for each in self.ended if not each.is_complete and each not in going_on]
        self.ended = going_on
        if left := [each.chain for each in due if each.chain not in computed]:
            self._abandon(left)

    def abandon_all(self) -> None:
        """Nothing of all this is published any more, not even what is under way."""
        left = [*self.chains.values(), *(each.chain for each in self.ended)]
        self.forget()
        if left:
            self._abandon(left)

    def forget(self) -> None:
        """Takes in that the epoch has ended, and with it what others were told."""
        self.chains.clear()
        self.ended.clear()
