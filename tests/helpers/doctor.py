"""What the tests of `manthan doctor` look at, and what is done to it in other processes."""

import os
import subprocess
import sys
from pathlib import Path

from loaded import load_config
from redis_server import RedisServer

from manthan.manager.config.model import ManthanConfig

PASSWORD = "not-for-the-log"
REDIS_MD = Path(__file__).parents[2] / "docs" / "redis.md"


def config(**options: object) -> ManthanConfig:
    """`tiers__kind` stands for `tiers.kind`."""
    return load_config(env={}, flags={key.replace("__", "."): value for key, value in options.items()})


def on_disk(path: Path, **options: object) -> ManthanConfig:
    return config(tiers__kind="disk", tiers__disk__path=str(path), **options)


def elsewhere(code: str, *args: object) -> str:
    """What this code prints in a process that is not a child of ours."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = ["sh", "-c", '"$0" -c "$@"; true', sys.executable, code, *map(str, args)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout


def engine_acl() -> list[str]:
    """The words of the ACL for engines, as the document has it."""
    lines = REDIS_MD.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("ACL SETUSER")).split()


def allow(server: RedisServer, without: str = "", keys: str = "~manthan:*") -> str:
    """Make the user of that line, less one command; returns its name."""
    words = [keys if word.startswith("~") else word.replace("PASSWORD", PASSWORD) for word in engine_acl()]
    assert f"+{without}" in words or not without
    with server.client as client:
        client.execute_command("ACL", "DELUSER", words[2])
        client.execute_command(*(word for word in words if word != f"+{without}"))
    return words[2]
