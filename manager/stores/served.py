"""One store for all ranks of an engine on one machine: the rank that has it serves it to the others.

They ask over a Unix socket without a file (Linux), which only processes of the same user are let in to. A question is a
line of JSON, and the bytes of blocks behind it; so is an answer. What all ranks are ordered, drops among it, reaches
each of them at a time of its own: a question carries the number of the step that the asking rank has reached, and how
often the store was emptied for it, and is answered when the rank that has the store has come as far.
"""

import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from manthan.manager.stores.cold_store import Buffer, ColdStore, ColdStoreError, Found, Landing
from manthan.manager.work import STORE_DOWN

logger = logging.getLogger("vllm.manthan")

BATCH = 8
"""Blocks in one question, at most."""
PATIENCE_S = 60.0
"""How long an answer may take, or a rank be behind another."""
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")


class ServedStoreError(ColdStoreError):
    """The rank that has the store does not answer, or could not do what it was asked."""

    def __init__(self, cause: str = STORE_DOWN) -> None:
        super().__init__("the rank that has the cold store does not answer" if cause == STORE_DOWN else cause)
        self.cause = cause


class StoreServer:
    """Answers other ranks from a store. name: of the socket, which nobody else on the machine has."""

    def __init__(self, store: ColdStore, name: str) -> None:
        self._store, self._step, self._emptied, self._is_closed = store, 0, 0, False
        self._moved = threading.Condition()
        """Of all above."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(name))
        self._socket.listen(socket.SOMAXCONN)
        self._thread = threading.Thread(target=self._accept, name="manthan-serve", daemon=True)
        self._thread.start()

    def reached(self, step: int) -> None:
        with self._moved:
            self._step = step
            self._moved.notify_all()

    def emptied(self, store: ColdStore) -> None:
        """An empty store is used from now on."""
        with self._moved:
            self._store, self._emptied = store, self._emptied + 1
            self._moved.notify_all()

    def close(self) -> None:
        """No question is answered any more, those included that wait."""
        with self._moved:
            self._is_closed = True
            self._moved.notify_all()
        self._socket.shutdown(socket.SHUT_RDWR)  # which ends accept
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), name="manthan-serve", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Until the other side goes away."""
        with link:
            _, user, _ = _PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != os.geteuid():
                logger.warning("Manthan: a process of user %d is not let in to the cold store", user)
                return
            try:
                while True:
                    question, bufs = _receive(link)
                    _send(link, *self._answered(question, bufs))
            except (OSError, ValueError, KeyError):  # it is gone, or is none of us
                return

    def _answered(self, question: dict[str, Any], bufs: list[Buffer]) -> tuple[dict[str, Any], list[Buffer]]:
        try:
            store = self._store_at(question["step"], question["emptied"])
            return self._answer(store, question, bufs)
        except ColdStoreError as error:
            return {"error": error.cause}, []
        except Exception as error:  # the other rank must get an answer, whatever happened
            logger.warning("Manthan: another rank's blocks are not kept: %s: %s", type(error).__name__, error)
            return {"error": "internal"}, []

    def _store_at(self, step: int, emptied: int) -> ColdStore:
        """The store, once this rank is as far. Raises ServedStoreError if it was emptied since, is closed, or stuck."""

        def is_settled() -> bool:
            return self._is_closed or (self._step >= step and self._emptied >= emptied)

        with self._moved:
            if not self._moved.wait_for(is_settled, PATIENCE_S) or self._is_closed:
                raise ServedStoreError
            if self._emptied > emptied:
                raise ServedStoreError("reset")
            return self._store

    def _answer(
        self, store: ColdStore, question: dict[str, Any], bufs: list[Buffer]
    ) -> tuple[dict[str, Any], list[Buffer]]:
        group, keys = question["group"], [bytes.fromhex(key) for key in question["keys"]]
        if question["what"] == "put":
            refused = store.put_all(group, dict(zip(keys, bufs, strict=True)), question["tenant"])
            return {"refused": {key.hex(): cause for key, cause in refused.items()}}, []
        if question["what"] == "absent":
            return {"keys": [key.hex() for key in store.absent(group, keys)]}, []
        found = dict(zip(keys, store.read(group, keys, question["tenant"]), strict=True))
        whole = {key: buf for key, buf in found.items() if isinstance(buf, np.ndarray)}
        causes = {key.hex(): cause for key, cause in found.items() if isinstance(cause, str)}
        return {"keys": [key.hex() for key in whole], "causes": causes}, list(whole.values())


class ServingStore(ColdStore):
    """The store of the rank that has it, which is served to the others."""

    def __init__(self, store: ColdStore, server: StoreServer) -> None:
        self.store, self._server = store, server

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return self.store.put_all(group, blocks, tenant)

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None) -> Iterator[Found]:
        return self.store.read(group, keys, tenant, into)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self.store.absent(group, keys)

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        self.store.drop(group, keys)

    def go_first(self, group: int, keys: Sequence[bytes], tier: int = 0) -> None:
        self.store.go_first(group, keys, tier)

    def reached(self, step: int) -> None:
        self.store.reached(step)
        self._server.reached(step)

    def cleared(self, place: str) -> "ServingStore":
        store = self.store.cleared(place)
        self._server.emptied(store)
        return ServingStore(store, self._server)

    def close(self) -> None:
        self._server.close()
        self.store.close()

    def room(self, nbytes: int) -> int:
        return self.store.room(nbytes)


class _Links:
    """Connections to a StoreServer, as many as there are threads that ask at once; and the step that is reached."""

    def __init__(self, name: str) -> None:
        self.step = 0
        self._name = name
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()

    def ask(self, question: dict[str, Any], bufs: Sequence[Buffer] = ()) -> tuple[dict[str, Any], list[Buffer]]:
        """Raises ServedStoreError."""
        link = None
        try:
            link = self._link()
            _send(link, question | {"step": self.step}, bufs)
            answer, found = _receive(link)
        except OSError as error:
            if link is not None:
                link.close()
            raise ServedStoreError from error
        self._idle.put(link)
        if "error" in answer:
            raise ServedStoreError(answer["error"])
        return answer, found

    def close(self) -> None:
        try:
            while True:
                self._idle.get_nowait().close()
        except Empty:
            pass

    def _link(self) -> socket.socket:
        try:
            return self._idle.get_nowait()
        except Empty:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(2 * PATIENCE_S)
            link.connect(_address(self._name))
            return link


class RemoteStore(ColdStore):
    """The store of another rank. That rank is ordered the same, so that drops are its affair.

    name: of the socket. room: what a block of so many bytes takes of the other's budget.
    """

    def __init__(self, name: str, room: Callable[[int], int]) -> None:
        self._links, self._room, self._emptied = _Links(name), room, 0

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused: dict[bytes, str] = {}
        for keys in _batches(list(blocks)):
            try:
                answer, _ = self._ask("put", group, keys, tenant, [blocks[key] for key in keys])
            except ServedStoreError as error:
                refused |= dict.fromkeys(keys, error.cause)
            else:
                refused |= {bytes.fromhex(key): cause for key, cause in answer["refused"].items()}
        return refused

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None) -> Iterator[Found]:
        """Raises ServedStoreError."""
        for some in _batches(keys):
            answer, bufs = self._ask("read", group, some, tenant)
            found: dict[str, Found] = dict(zip(answer["keys"], bufs, strict=True)) | answer["causes"]
            yield from (found.get(key.hex()) for key in some)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Raises ServedStoreError."""
        answer, _ = self._ask("absent", group, keys)
        return [bytes.fromhex(key) for key in answer["keys"]]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Nothing: see above."""

    def reached(self, step: int) -> None:
        self._links.step = step

    def cleared(self, place: str) -> "RemoteStore":
        """The store that the other rank uses from then on; what is being put goes nowhere."""
        other = copy(self)
        other._emptied += 1
        return other

    def close(self) -> None:
        self._links.close()

    def room(self, nbytes: int) -> int:
        return self._room(nbytes)

    def _ask(
        self, what: str, group: int, keys: Sequence[bytes], tenant: str = "", bufs: Sequence[Buffer] = ()
    ) -> tuple[dict[str, Any], list[Buffer]]:
        question = {"what": what, "group": group, "keys": [key.hex() for key in keys], "tenant": tenant}
        return self._links.ask(question | {"emptied": self._emptied}, bufs)


def _address(name: str) -> str:
    return f"\0manthan-{name}"


def _batches(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[at : at + BATCH] for at in range(0, len(keys), BATCH))


def _send(link: socket.socket, message: Mapping[str, Any], bufs: Sequence[Buffer]) -> None:
    """Raises OSError."""
    head = json.dumps({**message, "sizes": [buf.nbytes for buf in bufs]}).encode()
    link.sendall(_LENGTH.pack(len(head)) + head)
    for buf in bufs:
        link.sendall(buf.data)


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[Buffer]]:
    """Raises OSError, also where the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size).tobytes())
    message = json.loads(_exactly(link, length).tobytes())
    return message, [_exactly(link, size) for size in message["sizes"]]


def _exactly(link: socket.socket, nbytes: int) -> Buffer:
    buf, at = np.empty(nbytes, np.uint8), 0
    while at < nbytes:
        got = link.recv_into(buf[at:].data)
        if not got:
            raise ConnectionError("the other rank is gone")
        at += got
    return buf
