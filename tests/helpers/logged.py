"""What our logger was given, whether vLLM has set up logging in this process or not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The messages of warnings and worse, as they come."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.manthan")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
