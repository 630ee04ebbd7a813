"""Exact copies of paged blocks beside their codes, where the codec runs on the CPU's cores."""

from collections.abc import Iterable

from vllm.logger import init_logger

from manthan.codec import exact
from manthan.codec.errors import WireError
from manthan.manager.stores.cold_store import ColdStore, ColdStoreError
from manthan.vllm_hooks.worker.block_codec import BlockCodec

logger = init_logger("vllm.manthan.worker")


def parts_of(keys: Iterable[bytes], parts: int) -> list[bytes]:
    """The keys of all parts of the exact copies that these blocks may have."""
    return [part for key in keys for part in exact.part_keys(key, parts)]


class ExactBlocks:
    """Makes copies of blocks, puts them into a store, and writes them back. Safe to call from several threads.

    parts: of one copy; each takes as many bytes as an encoded block.
    """

    def __init__(self, blocks: BlockCodec, parts: int) -> None:
        self._blocks, self.parts = blocks, parts
        self.nbytes = parts * blocks.nbytes

    def keep(self, key: bytes, block_id: int, store: ColdStore) -> str | None:
        """Put a block's copy into the store; the cause, a metric label, if it is not there then."""
        try:
            store.reserve(self.nbytes)
        except ColdStoreError as error:
            return error.cause
        left = self.parts
        try:
            parts = exact.split(self._blocks.header_of(key), self._blocks.numbers(block_id))
            refused = store.put_all(dict(zip(exact.part_keys(key, self.parts), parts, strict=True)))
            left = len(refused)
            return next(iter(refused.values()), None)
        finally:
            store.unreserve(left * self._blocks.nbytes)

    def restore(self, key: bytes, block_id: int, store: ColdStore) -> str | None:
        """Write a block's copy into the paged block; the cause, a metric label, if that cannot be done.

        The paged block is written to only after every check has passed.
        """
        try:
            parts = [part for part in store.read(exact.part_keys(key, self.parts)) if part is not None]
            if len(parts) < self.parts:
                return "missing"
            self._blocks.write(block_id, exact.join(self._blocks.header_of(key), parts, self._blocks.exact_nbytes))
            return None
        except (WireError, ColdStoreError) as error:
            return error.cause
        except Exception as error:  # the codes will do
            logger.warning("Manthan: an exact copy is not restored: %s: %s", type(error).__name__, error)
            return "internal"
