"""Redis server for benchmarks: a running server, or one started on a free port and ended with the benchmark."""

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import typer
from pydantic import ValidationError

from manthan.benchmarks.ports import hold_port, port_of
from manthan.manager.config.model import FIELDS, ConfigError, RedisConfig
from manthan.manager.tiers.redis import check, connect

START_S = 20.0


@contextlib.contextmanager
def redis_at(url: str, flag: str = "--redis-url") -> Iterator[str]:
    """Yield the URL of a server: the given URL, or else that of a server started here and ended with this context.

    flag: option to name in errors. Raises BadParameter if the given server is unusable, or a needed redis-server is
    missing.
    """
    if url:
        _check(url, flag)
        yield url
        return
    program = shutil.which("redis-server")
    if program is None:
        raise typer.BadParameter(f"redis-server is not installed: install it, or name a running server with {flag}")
    holder = hold_port()
    port = port_of(holder)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait_until_up(process, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
        holder.close()


@contextlib.contextmanager
def redis_for_arms(url: str) -> Iterator[dict[str, str]]:
    """Yield the settings `url` and `prefix` of Manthan's Redis tier, for a server as in `redis_at`.

    At the end delete all Redis keys with this prefix, which the measured systems (arms) have written.
    """
    with redis_at(url) as found:
        redis = {"url": found, "prefix": f"manthan-bench-{secrets.token_hex(4)}:"}
        try:
            yield redis
        finally:
            with contextlib.closing(connect(RedisConfig(url=found))) as client:
                for name in client.scan_iter(f"{redis['prefix']}*", count=1000):
                    client.unlink(name)


def _check(url: str, flag: str) -> None:
    try:
        config = RedisConfig(url=url)
        client = connect(config)
        check(client, config)
    except ValidationError:
        raise typer.BadParameter(f"{flag} must be {FIELDS['tiers.redis.url'].description}") from None
    except ConfigError as error:
        raise typer.BadParameter(f"{flag}: {error}") from None
    client.close()


def _wait_until_up(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"redis-server did not come up on port {port}")
