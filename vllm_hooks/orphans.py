"""Engines whose server was killed: vLLM leaves them behind, and what they hold nobody else can have."""

import multiprocessing
import os
import signal
import threading

from vllm.logger import init_logger

logger = init_logger("vllm.manthan")


def end_with_parent() -> None:
    """End this process in order when the one that it was started for has ended; nothing if that is nobody."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        logger.warning("Manthan: the server has ended, and so does its engine.")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="manthan-parent", daemon=True).start()
