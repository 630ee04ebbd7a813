"""How `WhtPagedCodec` divides a load among launches. No kernel runs: what they would be told is looked at."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from manthan.codec.block import BlockFormat
from manthan.codec.gpu import wht_codec
from manthan.codec.gpu.cuda_codec import addresses
from manthan.codec.gpu.paged import Batch, PagedCodec, PagedLayout
from manthan.codec.gpu.wht_codec import Wht, WhtPagedCodec
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 3, 2, 16, 64, 7
BOOKS = ("sizes", "places", "doublings", "starts")


class Told:
    """In place of compiled kernels: what they were started with."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Any]] = []

    def launch(self, name: str, argument: ctypes.Structure, warps: int, **_: int) -> None:
        assert warps > 0
        self.launches.append((name, type(argument).from_buffer_copy(argument)))


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> WhtPagedCodec:
    monkeypatch.setattr(wht_codec, "_module", lambda *_: Told())
    monkeypatch.setattr(wht_codec, "properties_of", lambda _: _Properties)
    caches = tuple(torch.zeros(BLOCKS, TOKENS * HEADS * 2 * DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
    size = TOKENS * HEADS * 2 * DIM
    layout = PagedLayout(caches, HEADS, TOKENS, DIM, size, 2 * DIM, HEADS * 2 * DIM, key_at=0, value_at=DIM)
    facts = ModelFacts(rope=Rope(tuple(10000.0 ** (-i / 32) for i in range(32))))
    return WhtPagedCodec(layout, BlockFormat("wht-5x", layout.shape, bytes(16), 0, facts))


class _Properties:
    shared_memory_per_block_optin = 227 * 1024


def batch_of(codec: PagedCodec, exact: int) -> tuple[Batch, torch.Tensor]:
    nbytes = codec.form(exact).nbytes
    keys = [bytes([n]) * 32 for n in range(BLOCKS)]
    places, offsets = TOKENS * np.arange(BLOCKS), nbytes * np.arange(BLOCKS)
    return codec.batch(exact, keys, range(BLOCKS), places, offsets), torch.zeros(nbytes * BLOCKS, dtype=torch.uint8)


def fields(job: ctypes.Structure, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, *_ in job._fields_:  # type: ignore[misc]
        value = getattr(job, name)
        if isinstance(value, ctypes.Structure):
            yield from fields(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value[:] if isinstance(value, ctypes.Array) else value


@pytest.mark.parametrize("exact", [0, 4])
def test_a_part_of_a_job_is_that_of_its_blocks(codec: WhtPagedCodec, exact: int) -> None:
    batch, codes = batch_of(codec, exact)
    plan = Wht.plan(codec.layout, codec.format, addresses(codec.layout), codec.form(exact), exact, codec._rope)
    whole = plan.of(batch, codes)
    for at, name in enumerate(BOOKS):
        setattr(whole.all, name, 1_000_000 * (at + 1))
    found = dict(fields(whole.part(range(2, 5), batch.turns[:1].nbytes)))
    wanted = dict(fields(plan.of(batch, codes, slice(2, 5))))
    rows = 2 * LAYERS
    for at, (name, each) in enumerate(zip(BOOKS, (4 * rows, 4 * rows, 8, 8), strict=True)):
        wanted[f"all.{name}"] = 1_000_000 * (at + 1) + 2 * each
    assert found == wanted


def test_a_load_is_decoded_group_by_group_and_all_else_is_done_once(
    codec: WhtPagedCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, codes = batch_of(codec, 0)
    numbers = 2 * LAYERS * HEADS * DIM * TOKENS
    monkeypatch.setattr(wht_codec, "SCRATCH_BYTES", 3 * 2 * numbers)
    codec.decode(batch, codes)
    told = codec._kernels.launches
    middle = [name for _ in range(3) for name in ("decode_words", "restore_rows")]
    assert [name for name, _ in told] == ["find_rows", "check_fronts", *middle]
    groups = [job for name, job in told if name == "decode_words"]
    first = batch.block_ids.data_ptr()
    covered = [
        n
        for job in groups
        for n in range((job.all.block_ids - first) // 8, (job.all.block_ids - first) // 8 + job.all.n)
    ]
    assert covered == list(range(BLOCKS))
    assert max(job.all.n for job in groups) == 3
    assert len({job.rounded for job in groups}) == 1  # one after the other on a stream
    assert told[0][1].n == told[1][1].all.n == BLOCKS
