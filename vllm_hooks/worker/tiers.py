"""Memory that holds codes beside a GPU: pinned RAM, and a region of the GPU's own."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

from manthan.manager.config.resolve import ConfigError
from manthan.manager.stores.slots import SlotTable
from manthan.vllm_hooks.telemetry.log import human_bytes

logger = init_logger("vllm.manthan.worker")


class Tier:
    """One tier of one rank: encoded blocks in the rows of a tensor, and which block is in which row.

    codes: uint8 [slots, nbytes]. Never more than `max_bytes`.
    """

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes
        self.slots = SlotTable(len(codes))

    @classmethod
    def on_device(cls, max_bytes: int, nbytes: int, device: torch.device) -> "Tier":
        """GPU memory, allocated now; raises ConfigError if there is not so much."""
        try:
            return cls(torch.empty(max_bytes // nbytes, nbytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(device)
            raise ConfigError(
                f"cold_store.max_bytes asks for {human_bytes(max_bytes)} of memory on {device}, of which "
                f"{human_bytes(free)} are free: lower it, or leave more free with --gpu-memory-utilization."
            ) from None

    @classmethod
    def pinned(cls, max_bytes: int, nbytes: int) -> "Tier":
        """RAM that the GPU reads and writes itself, pinned once, now.

        PyTorch's own pinned allocator would round the size up to a power of two. Raises ConfigError.
        """
        slots = max_bytes // nbytes
        size = human_bytes(slots * nbytes)
        logger.info("Manthan: pinning %s of RAM for codes", size)
        began = time.monotonic()
        try:
            codes = torch.empty(slots, nbytes, dtype=torch.uint8)
            if slots:
                pin_tensor(codes)
        except RuntimeError as error:
            raise ConfigError(
                f"the cold store's {size} of RAM cannot be pinned ({error}): lower "
                "cold_store.max_bytes or host_bytes, or raise the memlock limit (ulimit -l)."
            ) from None
        logger.info("Manthan: pinned in %.1f s", time.monotonic() - began)
        return cls(codes)

    def release(self) -> None:
        """Unpin RAM; the tier is of no use afterwards."""
        if self.codes.device.type == "cpu" and self.codes.nbytes:
            torch.cuda.cudart().cudaHostUnregister(self.codes.data_ptr())
        self.codes = self.codes[:0]

    def addresses(self, slots: list[int]) -> torch.Tensor:
        """int64: where these rows begin."""
        return torch.tensor(slots, dtype=torch.int64) * self.codes.stride(0) + self.codes.data_ptr()


class Demotion(NamedTuple):
    """A block that moves from the device to the host to make room; its codes are yet to be copied."""

    device_slot: int
    host_slot: int


class Taken(NamedTuple):
    """A slot for a new block, and what must be copied out of it before."""

    tier: Tier
    slot: int
    demotion: Demotion | None = None


class Tiers:
    """The tiers of one rank, fastest first: the device, the host, or the device spilling to the host.

    New codes go to the first tier. When the device is full, codes in it move to the host: those that the policy chose,
    or else that were not used for longest. Where all of it is still being written to, new codes go to the host at once.
    The manager sees to it that both together never have to hold more than fits.
    """

    def __init__(self, device: Tier | None, host: Tier | None) -> None:
        self.device, self.host = device, host
        self._all = [tier for tier in (device, host) if tier is not None]
        self.first = self._all[0]

    def take(self) -> Taken | None:
        """A slot for a new block; None if all is full."""
        slot = self.first.slots.take()
        if slot is not None:
            return Taken(self.first, slot)
        below = self.host.slots.take() if self.host is not None and self.first is not self.host else None
        if self.host is None or below is None:
            return None
        oldest = self.first.slots.pop_oldest()
        if oldest is None:
            return Taken(self.host, below)
        key, slot = oldest
        self.host.slots.put(key, below)
        return Taken(self.first, slot, Demotion(slot, below))

    def find(self, keys: Sequence[bytes]) -> tuple[Tier, list[int]] | None:
        """The tier that has the first of these blocks, and the slots of its run of them; None if no tier has it."""
        for tier in self._all:
            if slots := tier.slots.get(keys):
                if len(self._all) > 1:  # where nothing moves down, the order does not matter
                    tier.slots.used(keys[: len(slots)])
                return tier, slots
        return None

    def go_first(self, keys: list[bytes]) -> None:
        """These blocks move down before all others, in this order."""
        self.first.slots.go_first(keys)

    def drop(self, keys: list[bytes]) -> None:
        for tier in self._all:
            tier.slots.drop(keys)

    def clear(self) -> None:
        for tier in self._all:
            tier.slots.clear()

    @property
    def used(self) -> int:
        """Bytes of the blocks in all tiers."""
        return sum(len(tier.slots) * tier.codes.stride(0) for tier in self._all)

    def release(self) -> None:
        for tier in self._all:
            tier.release()
