"""The run as a person reads it."""

from collections.abc import Sequence

from rich.console import Console

from kvharbor.demo.vllm.outcome import Answered, Claim

_SHOWN = 96


class Teller:
    """Prints the story as it goes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def scene(self, title: str) -> None:
        """Begins a scene."""
        self._console.print(f"\n[bold]{title}[/]")

    def answered(self, one: Answered) -> None:
        """Prints one answered prompt."""
        reused = f"[green]{one.reused_tokens}[/]" if one.reused_tokens else "[cyan]0[/]"
        self._console.print(
            f"  {one.engine}  prompt {len(one.prompt_ids)}: {reused} reused; first token after {one.ttft_s:.2f} s"
        )
        self._console.print(f"    Q {one.question}", style="dim", markup=False, highlight=False)
        answer = " ".join(one.answer.split())
        self._console.print(f"    A {answer[:_SHOWN]}", markup=False, highlight=False)

    def claims(self, claims: Sequence[Claim]) -> None:
        """Prints what was claimed, and whether it was so."""
        self.scene("What this shows")
        for claim in claims:
            sign = "[green]yes[/]" if claim.held else "[red]NO [/]"
            self._console.print(f"  {sign} {claim.claim}")
            self._console.print(f"      {claim.seen}", style="dim", markup=False, highlight=False)
