"""What our logger was given, whether vLLM has set up logging in this process or not."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def warnings() -> AbstractContextManager[list[str]]:
    """The messages of warnings and worse, as they come."""
    return said(logging.WARNING)


@contextmanager
def said(level: int) -> Iterator[list[str]]:
    """The messages of this level and worse, as they come."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.manthan")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
