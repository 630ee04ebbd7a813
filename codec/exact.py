"""An exact copy of a KV block, in parts that stores keep as if they were encoded blocks.

The copy is the block's numbers as the cache has them, keys and then values, each in the order [layers, heads, tokens,
head_dim]. It is cut into runs as long as the payloads of an encoded block (`manthan.codec.wire`), the last one filled
up with zeros; each gets the block's own header, but for the key, and a checksum.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manthan.codec.base import Codes
from manthan.codec.errors import SizeError
from manthan.codec.wire import HEADER, BlockHeader, block_nbytes, open_block, parse


def exact_nbytes(header: BlockHeader, itemsize: int) -> int:
    """Bytes of a block's keys and values, at `itemsize` bytes a number."""
    return 2 * header.vectors * header.head_dim * itemsize


def exact_parts(header: BlockHeader, itemsize: int) -> int:
    """How many parts a copy has: each is as large as an encoded block. Raises HeaderError."""
    return -(-exact_nbytes(header, itemsize) // (block_nbytes(header) - HEADER.size))


def part_keys(key: bytes, parts: int) -> list[bytes]:
    """The keys of a copy's parts. All block keys are of one length, so none is another block's key."""
    return [b"%b/exact%03d" % (key, part) for part in range(parts)]


def split(header: BlockHeader, numbers: Codes) -> list[Codes]:
    """The parts of a copy, uint8 [block_nbytes(header)] each. header: the block's, with its key. numbers: its bytes.

    Raises HeaderError.
    """
    size = block_nbytes(header) - HEADER.size
    runs = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    keys = part_keys(header.key, len(runs))
    return [_part(replace(header, key=key), run) for key, run in zip(keys, runs, strict=True)]


def join(header: BlockHeader, parts: Sequence[Codes], nbytes: int) -> Codes:
    """The numbers whose copy these parts are, uint8 [nbytes]; raises the WireError of a part that is not as it was."""
    runs = []
    for key, part in zip(part_keys(header.key, len(parts)), parts, strict=True):
        if parse(part, key=key, fingerprint=header.fingerprint).header != replace(header, key=key):
            raise SizeError("the part is of a block of another shape.")
        runs.append(part[HEADER.size :])
    return np.concatenate(runs)[:nbytes]


def _part(header: BlockHeader, run: Codes) -> Codes:
    block = open_block(header)
    payload = block.buffer[HEADER.size :]
    payload[: len(run)] = run
    payload[len(run) :] = 0
    return block.seal()
