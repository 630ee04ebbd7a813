"""Whether Manthan serves a model: vLLM's own configuration of it, against what stops a server at start."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from manthan.manager.config.model import ConfigError
from manthan.manager.doctor.finding import Finding, Mark

MODEL, LEVEL = "model", "VLLM_LOGGING_LEVEL"


@contextmanager
def _quietly() -> Iterator[None]:
    """vLLM, whether it is imported already or not, logs errors alone."""
    logger, before = logging.getLogger("vllm"), os.environ.get(LEVEL)
    level = logger.level
    os.environ[LEVEL] = "ERROR"
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        del os.environ[LEVEL]
        if before is not None:
            os.environ[LEVEL] = before


def check_model(model: str, config_file: str | None) -> Finding:
    """Of a model that is served with vLLM's defaults otherwise."""
    with _quietly():
        return _check(model, config_file)


def _check(model: str, config_file: str | None) -> Finding:
    from vllm import EngineArgs

    from manthan.vllm_hooks.settled import settle_codec
    from manthan.vllm_hooks.support import check_supported
    from manthan.vllm_hooks.transfer_config import from_vllm_config, kv_transfer_config

    try:
        made = EngineArgs(model).create_engine_config()
        made.kv_transfer_config = kv_transfer_config(config_file)
        check_supported(made)
        settle_codec(made)
    except ConfigError as error:
        return Finding(MODEL, Mark.WRONG, str(error))
    except (ValueError, OSError, RuntimeError) as error:  # what vLLM says of a model that it does not serve
        why = next(iter(str(error).splitlines()), type(error).__name__)
        return Finding(MODEL, Mark.WRONG, f"vLLM does not serve {model}: {why}")
    codec, block = from_vllm_config(made).codec.name, made.cache_config.block_size
    return Finding(MODEL, Mark.OK, f"{model} is served with codec {codec}, in blocks of {block} tokens.")
