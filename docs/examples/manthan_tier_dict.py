"""The least that a tier is: a dict with a budget. Reading returns copies, so that dropped bytes can be erased."""

import threading

from manthan.manager.tiers.tier import STORE_FULL, Tier


class DictTier(Tier):
    """Compressed blocks in a dict, by KV cache group and block hash."""

    def __init__(self, max_bytes):
        self.max_bytes, self.blocks, self.lock = max_bytes, {}, threading.Lock()

    def put_all(self, group, blocks, tenant=""):
        with self.lock:
            return {key: STORE_FULL for key, buf in blocks.items() if not self._put((group, key), buf)}

    def _put(self, name, buf):
        self._remove(name)
        if sum(kept.nbytes for kept in self.blocks.values()) + buf.nbytes > self.max_bytes:
            return False
        self.blocks[name] = buf.copy()
        return True

    def _remove(self, name):
        if name in self.blocks:
            self.blocks.pop(name)[:] = 0

    def read(self, group, keys, tenant=""):
        for key in keys:
            with self.lock:
                buf = self.blocks.get((group, key))
                found = None if buf is None else buf.copy()
            yield found

    def absent(self, group, keys):
        return [key for key in keys if (group, key) not in self.blocks]

    def drop(self, group, keys):
        with self.lock:
            for key in keys:
                self._remove((group, key))

    def cleared(self, place):
        for group, key in list(self.blocks):
            self.drop(group, [key])
        return self

    def close(self):
        self.cleared("")

    def room(self, nbytes):
        return nbytes
