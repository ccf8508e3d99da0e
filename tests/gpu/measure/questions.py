"""All questions, in the order in which they are asked."""

from gpu.measure import (
    attention,
    block_copies,
    error_codes,
    exporter_killed,
    fork_latency,
    open_times,
    read_only,
    second_open,
    worker_killed,
)
from gpu.measure.question import Question

QUESTIONS = {
    question.name: question
    for question in (
        Question("exporter_killed", "What do importers see after the exporter's SIGKILL?", exporter_killed.ask),
        Question(
            "worker_killed",
            "How long after a worker's SIGKILL do its socket end, its pidfd become readable, and its kernels store?",
            worker_killed.ask,
        ),
        Question("second_open", "Does a second opening in a process return the same address?", second_open.ask),
        Question("error_codes", "Which codes do wrong uses of IPC handles get?", error_codes.ask),
        Question("read_only", "What does a store past a read-only map break, and in which processes?", read_only.ask),
        Question("open_times", "How long does opening an arena take?", open_times.ask),
        Question("block_copies", "How near to the card's ceiling are copies of blocks?", block_copies.ask),
        Question("fork_latency", "How long does a fork with a copied tail take, by the service?", fork_latency.ask),
        Question(
            "attention",
            "What does attention over blocks cost, against contiguous K and V?",
            attention.ask,
            needs_hardware=True,
        ),
    )
}
