"""Files of keys for what is sealed at rest."""

import base64
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from manthan.manager.cli import app


def secret(name: str) -> str:
    """Of a key of this name, always the same."""
    return base64.b64encode(sha256(name.encode()).digest()).decode()


def ring(*ids: str, current: str | None = None, of: str = "") -> dict[str, Any]:
    """of: what makes these keys other ones than those that others call so."""
    return {"current": current or ids[-1], "keys": {id: secret(of + id) for id in ids}}


def write_keys(
    path: Path,
    *ids: str,
    current: str | None = None,
    tenants: Mapping[str, Sequence[str]] = {},
    of: str = "",
    names: str = "names",
) -> Path:
    """A file with these keys, the last of which is current if none is said; so of tenants."""
    said = {"names": secret(names), **ring(*ids, current=current, of=of)}
    if tenants:
        said["tenants"] = {name: ring(*own, of=name) if own else {"keys": {}} for name, own in tenants.items()}
    return write(path, said)


def write(path: Path, said: object) -> Path:
    made = path.with_suffix(".new")
    made.touch(0o600)
    made.write_text(said if isinstance(said, str) else yaml.safe_dump(said, sort_keys=False), encoding="utf-8")
    made.replace(path)
    return path


def manthan_keys(*words: object) -> None:
    result = CliRunner().invoke(app, ["keys", *map(str, words)])
    assert result.exit_code == 0, result.output
