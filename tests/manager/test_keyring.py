"""Files of keys: what is refused, what is read again, and what `manthan keys` does to them."""

import base64
import stat
from pathlib import Path

import pytest
from key_files import ring, secret, write, write_keys
from logged import warnings
from typer.testing import CliRunner

from manthan.manager.cli import app
from manthan.manager.config.model import ConfigError
from manthan.manager.stores.keyring import PLAIN_NAMES, KeyFileError, KeyRing, Names, read_keys

RIGHT = {"names": secret("names"), **ring("k1", "k2")}
BASE64 = "must be 32 random bytes in base64, as `openssl rand -base64 32` prints them."
TENANTS = "must be a mapping of tenants' names to their current and keys."
NOT_THERE = " cannot be read: No such file or directory: `manthan keys new` makes one."
AN_ID = "must be a mapping of at least one id to 32 bytes in base64."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("{names", " is not valid YAML."),
        ("[1]", " must be a mapping with names, current, keys, tenants."),
        (RIGHT | {"key": {}}, ": unknown key 'key' (did you mean 'keys'?)."),
        (RIGHT | {"names": "c2hvcnQ="}, f": names {BASE64}"),
        ({name: RIGHT[name] for name in ("current", "keys")}, f": names {BASE64}"),
        (RIGHT | {"keys": {"k1": "no base64"}}, f": keys.k1 {BASE64}"),
        (RIGHT | {"keys": {}}, f": keys {AN_ID}"),
        (RIGHT | {"keys": secret("k1")}, f": keys {AN_ID}"),
        (RIGHT | {"current": "k3"}, ": current must be the id of a key, not 'k3' (did you mean 'k2'?)."),
        (RIGHT | {"tenants": ["acme"]}, f": tenants {TENANTS}"),
        (RIGHT | {"tenants": {"": ring("k1")}}, f": tenants {TENANTS}"),
        (RIGHT | {"tenants": {"acme": "k1"}}, ": tenants.acme must be a mapping with current and keys."),
        (RIGHT | {"tenants": {"acme": {"keys": "k1"}}}, f": tenants.acme.keys {AN_ID}"),
        (
            RIGHT | {"tenants": {"acme": ring("k1")}},
            ": tenants.acme.keys.k1 must be a key of its own, not that of keys.k1.",
        ),
        (
            RIGHT | {"tenants": {"acme": {"keys": {"a": secret("a")}}}},
            ": tenants.acme.current must be the id of a key, not None (valid: a).",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_without_a_secret(path: Path, said: object, sentence: str) -> None:
    write(path, said)
    with pytest.raises(KeyFileError) as error:
        read_keys(path)
    assert str(error.value) == f"{path}{sentence}"
    with pytest.raises(ConfigError) as refused:
        KeyRing(path)
    assert str(refused.value) == f"cold_store.encryption.key_file: {path}{sentence}"


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        KeyRing(path)
    assert str(error.value) == (f"cold_store.encryption.key_file: {path}{NOT_THERE}")


@pytest.mark.parametrize(
    ("mode", "is_fine"), [(0o600, True), (0o400, True), (0o440, True), (0o604, False), (0o660, False)]
)
def test_others_may_neither_read_nor_change_it(path: Path, mode: int, is_fine: bool) -> None:
    write_keys(path, "k1").chmod(mode)
    if is_fine:
        KeyRing(path)
        return
    with pytest.raises(
        ConfigError, match=f"has mode {mode:04o}, with which others than its owner may read or change it"
    ):
        KeyRing(path)


def test_ids_are_text_whatever_they_look_like(path: Path) -> None:
    lines = [
        f"names: {secret('names')}",
        "current: 2026-11-23",
        "keys:",
        f"  2026-11-23: {secret('a')}",
        f"  7: {secret('b')}",
    ]
    keys = read_keys(write(path, "\n".join(lines)))
    assert [key.id for key in keys.reading.values()] == ["2026-11-23", "7"]
    assert keys.of("anybody") is next(iter(keys.reading.values()))


def test_who_has_keys_of_their_own_has_no_others(path: Path) -> None:
    keys = read_keys(write_keys(path, "k1", tenants={"acme": ["a", "b"], "globex": []}))
    assert [key and (key.tenant, key.id) for key in map(keys.of, ("acme", "globex", "initech", ""))] == [
        ("acme", "b"),
        None,
        ("", "k1"),
        ("", "k1"),
    ]


def test_a_file_is_read_again_when_it_has_changed(path: Path) -> None:
    ring = KeyRing(write_keys(path, "k1"))
    first = ring.keys
    assert ring.keys is first
    write_keys(path, "k1", "k2")
    assert [key.id for key in ring.keys.reading.values()] == ["k1", "k2"]
    second = ring.keys
    with warnings() as said:
        for wrong in ("{", RIGHT | {"names": secret("others")}):
            write(path, wrong)
            assert ring.keys is second
        path.unlink()
        assert ring.keys is second
    assert [message.partition(":")[2] for message in said if "stay what they were" in message] == [
        f" the keys stay what they were: {path} is not valid YAML.",
        f" the keys stay what they were: {path}: names is another; start again.",
        f" the keys stay what they were: {path}{NOT_THERE}",
    ]
    write_keys(path, "k3")
    assert [key.id for key in ring.keys.reading.values()] == ["k3"]


def test_no_secret_is_shown(path: Path) -> None:
    keys = read_keys(write_keys(path, "k1"))
    for name in ("names", "k1"):
        raw = base64.b64decode(secret(name))
        assert repr(raw)[2:-1] not in repr(keys)


def test_names_are_the_same_always_and_tell_the_block_to_who_has_the_key() -> None:
    names, others = Names(b"n" * 32), Names(b"o" * 32)
    for key in (b"k" * 32, b"k" * 16, b"k"):
        called = names.block(key)
        assert called == Names(b"n" * 32).block(key)
        assert called != others.block(key)
        assert names.key(called) == key
        assert others.key(called) is None
    assert names.key(b"short") is names.key(b"k" * 48) is None
    assert names.session("alice") == Names(b"n" * 32).session("alice") != others.session("alice")
    assert names.session("anonymous-1").startswith("anonymous-")
    assert (PLAIN_NAMES.block(b"k"), PLAIN_NAMES.key(b"k"), PLAIN_NAMES.session("alice")) == (b"k", b"k", "alice")
    assert len({names.mark, others.mark, PLAIN_NAMES.mark}) == 3


# -- manthan keys -------------------------------------------------------------------------------------


def keys(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", *words])
    assert result.exit_code == status, result.output
    return result.output


def test_a_new_file_is_for_its_owner_alone_and_right(path: Path) -> None:
    assert keys("new", str(path)) == f"{path} has a key, k1.\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path).of("").id == "k1"
    assert "is there already" in keys("new", str(path), status=1)


def test_keys_are_rotated_and_removed(path: Path) -> None:
    keys("new", str(path))
    path.chmod(0o440)
    first = read_keys(path)
    assert keys("rotate", str(path)) == f"k2 is current in {path}; still read: k1.\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
    assert first.reading.items() < read_keys(path).reading.items()
    assert first.names == read_keys(path).names
    assert keys("add", str(path)) == f"{path} has another key, k3; k2 is current.\n"
    assert keys("rotate", str(path)) == f"k3 is current in {path}; still read: k1, k2.\n"
    assert keys("remove", str(path), "k1") == f"k1 is removed from {path}.\n"
    assert [key.id for key in read_keys(path).reading.values()] == ["k2", "k3"]
    assert "k3 is current" in keys("remove", str(path), "k3", status=1)
    assert "has no key 'k9' (did you mean 'k3'?)" in keys("remove", str(path), "k9", status=1)


def test_a_tenant_s_keys_are_made_rotated_and_forgotten(path: Path) -> None:
    keys("new", str(path))
    assert keys("rotate", str(path), "--tenant", "acme") == f"k1 is current of tenant 'acme' in {path}.\n"
    keys("rotate", str(path), "--tenant", "acme")
    assert read_keys(path).of("acme").id == "k2"
    assert read_keys(path).of("").id == "k1"
    rows = [line.split() for line in keys("show", str(path)).splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows] == [("k1", "current"), ("acme", rows[1][2]), ("acme", "current")]
    assert "has no keys of tenant 'acne' (did you mean 'acme'?)" in keys("forget", str(path), "acne", status=1)
    assert keys("forget", str(path), "acme").startswith(f"{path} has no key of tenant 'acme' any more.")
    assert read_keys(path).of("acme") is None
    assert "nothing is stored" in keys("show", str(path))
    keys("add", str(path), "--tenant", "acme")
    assert read_keys(path).of("acme").id == "k1"


def test_what_is_wrong_with_a_file_is_said(path: Path) -> None:
    for command in (["show"], ["rotate"], ["add"], ["forget", "acme"], ["remove", "k1"]):
        assert "cannot be read: No such file" in keys(command[0], str(path), *command[1:], status=1)
    assert "cannot be written: No such file" in keys("new", str(path.parent / "none" / "keys.yaml"), status=1)
