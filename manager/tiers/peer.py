"""Tier of a rank that needs the same blocks as another rank of this host, the keeper. Only the keeper stores blocks.

Blocks are read over a Unix socket. A connection serves one `read`. The reader sends a line of JSON: KV cache group,
tenant, and block hashes in hexadecimal digits. For each block, the keeper sends a line of JSON: the number of the
block's bytes, which follow the line; or the cause of a failure; or null for an absent block. The socket has an abstract
name, which is no file and ends with the process. Each end checks that the other runs as the same user.
"""

import json
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from manthan.manager.config.model import ConfigError
from manthan.manager.tiers.tier import Buffer, Found, Tier
from manthan.manager.transfer import STORE_DOWN

logger = logging.getLogger("vllm.manthan.peer")

TIMEOUT_S = 15.0  # most seconds to wait for the other end; longer than the keeper waits for its disk


class PeerTier(Tier):
    """Tier that reads the blocks that a PeerServer offers under `name`. Only the keeper stores and drops blocks."""

    def __init__(self, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self._name, self._timeout_s = name, timeout_s

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        left = len(keys)
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(self._timeout_s)
                link.connect(f"\0{self._name}")
                _check(link)
                link.sendall(json.dumps([group, tenant, [key.hex() for key in keys]]).encode() + b"\n")
                with link.makefile("rb") as answers:
                    while left:
                        found = json.loads(answers.readline())
                        if isinstance(found, int):
                            found = np.frombuffer(answers.read(found), np.uint8, found)  # ValueError if bytes are short
                        left -= 1
                        yield found
        except (OSError, ValueError) as error:
            logger.warning("Manthan: the rank that keeps this rank's blocks does not answer: %r", error)
            yield from [STORE_DOWN] * left

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return {}

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return no hash. The keeper loads the same blocks, and reports the absent blocks."""
        return []

    def drop(self, group: int, keys: Iterable[bytes]) -> None: ...

    def cleared(self, place: str) -> "PeerTier":
        return self

    def close(self) -> None: ...

    def room(self, nbytes: int) -> int:
        return 0


class PeerServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Server that offers this process's blocks to PeerTiers, on threads of its own.

    Raises ConfigError if another process has the name, because two engines have the same engine_id. read: see
    `Tier.read`. cpus: CPUs that the threads may run on; empty for the caller's CPUs.
    """

    daemon_threads, request_queue_size = True, 128

    def __init__(
        self, name: str, read: Callable[[int, Sequence[bytes], str], Iterator[Found]], cpus: Collection[int] = ()
    ) -> None:
        try:
            super().__init__(f"\0{name}", _Request)
        except OSError as error:
            raise ConfigError(
                f"the socket {name} cannot be opened ({error.strerror}): give each engine of this host an engine_id of "
                "its own in --kv-transfer-config, or none."
            ) from None
        self.read = read
        self._thread = threading.Thread(target=self._serve, args=(cpus,), name="manthan-peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server. No more blocks are offered."""
        self.shutdown()
        self.server_close()

    def _serve(self, cpus: Collection[int]) -> None:
        with suppress(OSError):
            if cpus:
                os.sched_setaffinity(0, cpus)
        self.serve_forever()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("Manthan: a rank has given up reading, or its blocks cannot be read", exc_info=True)


class _Request(socketserver.StreamRequestHandler):
    timeout = TIMEOUT_S
    server: PeerServer

    def handle(self) -> None:
        _check(self.connection)
        group, tenant, keys = json.loads(self.rfile.readline())
        for found in self.server.read(group, list(map(bytes.fromhex, keys)), tenant):
            said = found.nbytes if isinstance(found, np.ndarray) else found
            self.wfile.write(json.dumps(said).encode() + b"\n")
            if isinstance(found, np.ndarray):
                self.wfile.write(found.data)


def _check(link: socket.socket) -> None:
    """Raise PermissionError if the process at the other end has another user."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        raise PermissionError(f"user {user} is at the other end")
