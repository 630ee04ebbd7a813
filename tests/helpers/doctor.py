"""What the tests of `manthan doctor` look at, and what is done to it in other processes."""

import os
import subprocess
import sys
from pathlib import Path

from manthan.manager.config.model import ManthanConfig
from manthan.manager.config.resolve import load_config


def config(**options: object) -> ManthanConfig:
    """`cold_store__kind` stands for `cold_store.kind`."""
    return load_config(env={}, flags={key.replace("__", "."): value for key, value in options.items()})


def on_disk(path: Path, **options: object) -> ManthanConfig:
    return config(cold_store__kind="disk", disk__path=str(path), **options)


def elsewhere(code: str, *args: object) -> str:
    """What this code prints in a process that is not a child of ours."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = ["sh", "-c", '"$0" -c "$@"; true', sys.executable, code, *map(str, args)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout
