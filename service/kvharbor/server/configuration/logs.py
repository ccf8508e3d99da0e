"""Structured logs on stderr, one event a line. Never token ids, salts or secrets [S11]."""

import logging
import sys

import structlog


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Drops what grpc.aio logs, with a traceback, for each answer whose caller has left: that is no error here."""
    is_unsent_answer = record.getMessage().startswith("ExecuteBatchError raised in core")
    return not is_unsent_answer or logging.getLogger().isEnabledFor(logging.DEBUG)


def configure(level: str, line_format: str) -> None:
    """Sends every log, of libraries too, to stderr as JSON or as text for people."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if line_format == "json":
        renderer: structlog.typing.Processor = structlog.processors.JSONRenderer(default=str)
        shared.append(structlog.processors.format_exc_info)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
