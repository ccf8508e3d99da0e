"""What the person in front of the terminal sees."""

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from kvharbor.demo.report import Served, Summary

MIB = 2**20


def progress(console: Console) -> Progress:
    """Returns a progress display with one line a task."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[stage]}"),
        console=console,
        transient=True,
    )


def show_served(console: Console, number: int, one: Served) -> None:
    """Prints one answered request."""
    kind = "[cyan]cold[/]" if not one.reused_tokens else "[green]warm[/]"
    console.print(
        f"[bold]{number}[/] {one.worker} {kind}  prompt {len(one.prompt_ids)}: {one.reused_tokens} reused,"
        f" {one.computed_tokens} computed; first token [bold]{one.ttft_s * 1000:.0f} ms[/]"
    )
    console.print(f"  Q {one.question}", style="dim", markup=False)
    console.print(f"  A {one.answer}", markup=False)


def show_summary(console: Console, summary: Summary) -> None:
    """Prints what the run has shown."""
    table = Table(title="one pool, three workers", show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right")
    reused = summary.reused_tokens / summary.prompt_tokens
    speedup = summary.ttft_cold_s / summary.ttft_warm_s
    table.add_row("prompt tokens reused", f"{summary.reused_tokens:,} of {summary.prompt_tokens:,} ({reused:.0%})")
    table.add_row("time to first token, cold", f"{summary.ttft_cold_s * 1000:.0f} ms")
    table.add_row("time to first token, warm", f"{summary.ttft_warm_s * 1000:.0f} ms ({speedup:.1f} times sooner)")
    table.add_row("KV memory, one shared pool", f"{summary.kv_bytes_shared / MIB:.0f} MiB")
    table.add_row(f"KV memory, {summary.workers} private caches", f"{summary.kv_bytes_private / MIB:.0f} MiB")
    table.add_row(
        "answers identical to the model without any cache",
        f"{summary.identical_answers} of {summary.requests}",
    )
    console.print(table)
