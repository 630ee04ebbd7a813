"""A profile out of a server's traffic: blocks of its KV cache as they go cold, read in a process of its own, which runs
when nobody else wants to.

    python -m manthan.manager.calibration.traffic

On standard input comes a job, JSON in a line; then blocks, each with the place of its first token in its chain, 8
bytes, and keys and values [layers, heads, tokens, head_dim] in the cache's numbers. Each block is answered by a byte:
MORE, or ENOUGH. Then a line of JSON comes: `path`, empty while other ranks are not as far, or `error`.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from manthan.codec.base import Dtype
from manthan.codec.calibration import ProfileBuilder
from manthan.codec.errors import ProfileError
from manthan.codec.model import ModelFacts
from manthan.codec.profile import PRESETS, Profile, ProfileInfo
from manthan.codec.registry import get_codec

MORE, ENOUGH = b".", b"!"
TOKENS = 8192
"""At least so many make a profile ..."""
TOKENS_A_NUMBER = 8
"""... and so many for each number of a rank's key."""
ALLOWANCE = 1.02
"""A preset is made so much smaller than its name says: later sessions take more than the first."""


@dataclass(frozen=True)
class Job:
    """One rank's part. info: its heads are the rank's. block_tokens, dtype: of the blocks that come. preset: the codec
    that the profile is for. path: where the profile goes. heads: of all ranks. run: a name that the ranks share, and no
    other engine has."""

    info: ProfileInfo
    block_tokens: int
    dtype: int
    preset: str
    path: str
    heads: int
    rank: int = 0
    ranks: int = 1
    run: str = ""
    tokens: int = TOKENS

    @property
    def enough(self) -> int:
        """Tokens that the profile is made of, at least."""
        return max(self.tokens, TOKENS_A_NUMBER * self.info.heads * self.info.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a block: keys, and then values."""
        return (2, self.info.layers, self.info.heads, self.block_tokens, self.info.head_dim)

    def to_json(self) -> bytes:
        """In one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of_json(cls, line: bytes) -> Self:
        told = json.loads(line)
        return cls(**told | {"info": ProfileInfo.of_json(told["info"])})


def gathered(job: Job, blocks: IO[bytes], answers: IO[bytes]) -> ProfileBuilder | None:
    """What came; None where it ended before there was enough."""
    builder, dtype = ProfileBuilder(job.info), Dtype(job.dtype)
    nbytes = 8 + dtype.numpy.itemsize * math.prod(job.shape)
    while builder.tokens < job.enough:
        block = blocks.read(nbytes)
        if len(block) < nbytes:
            return None
        first = int.from_bytes(block[:8], "little")
        positions = np.arange(first, first + job.block_tokens)
        keys, values = np.frombuffer(block, dtype.numpy, offset=8).reshape(job.shape)
        for layer in range(job.info.layers):
            builder.add(layer, keys[layer], values[layer], positions, dtype)
        answers.write(MORE if builder.tokens < job.enough else ENOUGH)
        answers.flush()
    return builder


def made(job: Job, builder: ProfileBuilder) -> Path | None:
    """Where the profile is now, or None while other ranks are not as far. Raises ProfileError, OSError."""
    profile = builder.finish(presets={job.preset: ALLOWANCE * PRESETS[job.preset]})
    codec = get_codec(job.preset, job.info.head_dim, ModelFacts(job.info.rope, profile))
    codec.warm_up()  # what it compiles, the server finds compiled
    path = Path(job.path)
    if job.ranks > 1:
        parts = [path.with_name(f".{path.stem}-{job.run}-{rank}") for rank in range(job.ranks)]
        profile.save(parts[job.rank])
        if not all(part.exists() for part in parts):
            return None
        try:
            profile = joined([Profile.load(part) for part in parts], job.heads)
        except ProfileError:  # another rank has joined them, and taken them away
            return path
        for part in parts:
            part.unlink(missing_ok=True)
    profile.save(path)
    return path


def joined(parts: Sequence[Profile], heads: int) -> Profile:
    """The profiles of all ranks, each made by itself, as one. heads: of the model."""
    infos = [part.info for part in parts]
    ratios = {preset: len(infos) / sum(1 / info.ratios[preset] for info in infos) for preset in parts[0].info.ratios}
    info = replace(infos[0], heads=heads, tokens=min(info.tokens for info in infos), ratios=ratios)
    return Profile.of(info, parts[0].frequencies, [part.layers for part in parts])


def main() -> None:
    os.nice(19)
    blocks, answers = sys.stdin.buffer, sys.stdout.buffer
    job = Job.of_json(blocks.readline())
    builder = gathered(job, blocks, answers)
    if builder is None:
        return
    said: dict[str, Any]
    try:
        said = {"path": str(made(job, builder) or "")}
    except (ProfileError, OSError) as error:
        said = {"error": str(error)}
    answers.write(json.dumps(said).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
