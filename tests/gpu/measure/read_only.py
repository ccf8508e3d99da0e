"""A store past a read-only map: what breaks, and who goes on."""

import contextlib

from gpu.actor import outcome_of
from gpu.measure.question import Answer, Figures
from gpu.rig import Rig, closed_after

SIZE_BYTES = 4 << 20
KEPT = b"kept"


def ask(rig: Rig) -> Answer:
    """Lets one process store into what it may only read, by a kernel and by the driver's memset."""
    figures: Figures = {by: _broken(rig, by) for by in ("store_by_kernel", "store")}
    said = [
        f"{by}: the process that stores gets {seen['outcome']} and its device afterwards "
        f"{seen['own_device_afterwards']}; a reader {seen['reader_afterwards']}, the writer "
        f"{seen['writer_afterwards']}, a later process {seen['attach_afterwards']}; the content is "
        f"{'kept' if seen['content_kept'] else 'NOT kept'}"
        for by, seen in figures.items()
    ]
    return Answer("; ".join(said), figures)


def _broken(rig: Rig, by: str) -> Figures:
    kind_name = rig.kind_name("cuda_vmm")
    with contextlib.ExitStack() as stack:
        owner, writer, reader, culprit, later = (stack.enter_context(rig.actor()) for _ in range(5))
        with closed_after(owner.create(kind_name, SIZE_BYTES)) as export:
            writer.attach(kind_name, export)
            writer.ask("write", 0, KEPT)
            for process in (reader, culprit):
                process.attach(kind_name, export, writable=False)
            return {
                "outcome": culprit.outcome(by),
                "own_device_afterwards": culprit.outcome("use_device") if culprit.process.poll() is None else "none",
                "content_kept": reader.ask("read", 0, len(KEPT)) == KEPT,
                "reader_afterwards": reader.outcome("use_device"),
                "writer_afterwards": writer.outcome("store_by_kernel"),
                "attach_afterwards": outcome_of(later.attach(kind_name, export)),
            }
