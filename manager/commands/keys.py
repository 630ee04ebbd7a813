"""`manthan keys`: makes and changes the file of keys that codes and books are sealed with at rest."""

import base64
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.console import make_console
from manthan.manager.config.sentences import nearest
from manthan.manager.stores.keyring import SECRET_NBYTES, KeyFileError, read_key_file, read_keys

HEAD = "# Keys of Manthan's cold store: `manthan keys` changes them. What they have sealed is lost without them.\n"

File = Annotated[Path, typer.Argument(metavar="FILE", help="Of keys, as cold_store.encryption.key_file.")]
Tenant = Annotated[str, typer.Option(help="Of this tenant's own keys; empty for those of everybody else.")]


def new(file: File) -> None:
    """Make a file with one key, for its owner alone."""
    ring = {"names": _secret(), "current": "k1", "keys": {"k1": _secret()}}
    if file.exists():
        _end(f"{file} is there already: `manthan keys rotate` changes it.")
    _write(file, ring, None)
    typer.echo(f"{file} has a key, k1.")


def add(file: File, tenant: Tenant = "") -> None:
    """Add a key, and go on writing with the current one: every engine should know a key before one writes with it."""
    said, ring = _read(file, tenant)
    added = _add(ring)
    if ring.get("current") not in ring["keys"]:
        ring["current"] = added  # a tenant's first
    _write(file, said, file.stat())
    typer.echo(f"{file} has another key{_of(tenant)}, {added}; {ring['current']} is current.")


def rotate(file: File, tenant: Tenant = "") -> None:
    """Write with another key from now on: the last one that was added, or else a new one. All are still read."""
    said, ring = _read(file, tenant)
    last = next(reversed(ring["keys"]), None)
    ring["current"] = last if last is not None and last != ring.get("current") else _add(ring)
    _write(file, said, file.stat())
    others = ", ".join(id for id in ring["keys"] if id != ring["current"])
    typer.echo(f"{ring['current']} is current{_of(tenant)} in {file}{f'; still read: {others}' if others else ''}.")


def remove(
    file: File,
    id: Annotated[str, typer.Argument(metavar="ID", help="Of the key, as `show` lists it.")],
    tenant: Tenant = "",
) -> None:
    """Remove a key that is not current: what it has sealed is lost."""
    said, ring = _read(file, tenant)
    if id not in ring["keys"]:
        _end(f"{file} has no key{_of(tenant)} '{id}'{nearest(id, ring['keys'])}")
    if id == ring.get("current"):
        _end(f"{id} is current{_of(tenant)} in {file}: rotate first, or forget the tenant.")
    del ring["keys"][id]
    _write(file, said, file.stat())
    typer.echo(f"{id}{_of(tenant)} is removed from {file}.")


def forget(
    file: File, tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Who has keys of their own.")]
) -> None:
    """Remove all keys of a tenant: nothing of theirs can be read any more, and nothing is stored again."""
    said, _ = _read(file, "")
    if tenant not in (tenants := said.get("tenants") or {}):
        _end(f"{file} has no keys of tenant '{tenant}'{nearest(tenant, tenants)}")
    tenants[tenant] = {"keys": {}}
    _write(file, said, file.stat())
    typer.echo(f"{file} has no key of tenant '{tenant}' any more. Copies of it still have.")


def show(file: File) -> None:
    """List the keys by id, without themselves."""
    try:
        keys = read_keys(file)
    except KeyFileError as error:
        _end(str(error))
    table = Table("tenant", "key", "mark", "", box=None)
    current = [key for key in keys.writing.values() if key is not None]
    for key in keys.reading.values():
        table.add_row(*map(Text, (key.tenant, key.id, key.mark.hex(), "current" if key in current else "")))
    for tenant in [tenant for tenant, key in keys.writing.items() if key is None]:
        table.add_row(Text(tenant), "none", "", "nothing is stored")
    make_console().print(table)


def _secret() -> str:
    return base64.b64encode(secrets.token_bytes(SECRET_NBYTES)).decode()


def _of(tenant: str) -> str:
    return f" of tenant '{tenant}'" if tenant else ""


def _read(file: Path, tenant: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file says that is right, and the part of it that has the tenant's keys."""
    try:
        read_keys(file)
        said = read_key_file(file)
    except KeyFileError as error:
        _end(str(error))
    if not tenant:
        return said, said
    said["tenants"] = said.get("tenants") or {}
    ring = said["tenants"].setdefault(tenant, {})
    ring["keys"] = ring.get("keys") or {}
    return said, ring


def _add(ring: dict[str, Any]) -> str:
    numbers = [int(found[1]) for id in ring["keys"] if (found := re.fullmatch(r"k(\d+)", id))]
    id = f"k{max(numbers, default=0) + 1}"
    ring["keys"][id] = _secret()
    return id


def _write(file: Path, said: dict[str, Any], like: os.stat_result | None) -> None:
    """All or nothing: a server may be reading it. like: whose mode and owner it gets."""
    made = Path()
    try:
        fd, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.absolute().parent)  # mode 0600
        made = Path(name)
        with os.fdopen(fd, "w", encoding="utf-8") as text:
            text.write(HEAD + yaml.safe_dump(said, sort_keys=False))
            text.flush()
            os.fsync(fd)
            if like is not None:
                os.fchmod(fd, like.st_mode & 0o777)
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(fd, like.st_uid, like.st_gid)
        made.replace(file.resolve())
    except OSError as error:
        if made.is_file():
            made.unlink()
        _end(f"{file} cannot be written: {error.strerror}.")


def _end(sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(1)


app = typer.Typer(no_args_is_help=True, help="Make and change the keys that codes are sealed with at rest.")
for command in (new, add, rotate, remove, forget, show):
    app.command(command.__name__)(command)
