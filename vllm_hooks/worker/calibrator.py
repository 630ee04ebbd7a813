"""Calibration by traffic: makes a profile, a codec's tables for one model, from prompts' queries, keys and values."""

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from manthan.codec.profile import Profile, ProfileInfo
from manthan.codec.rope import Rope
from manthan.manager.calibration.traffic import TrafficBuilder, output_energies
from manthan.manager.config.profiles import TRAFFIC, model_folder
from manthan.vllm_hooks.compat import wrap
from manthan.vllm_hooks.groups import KvCacheGroup
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.engine import JobThreads, allowed_cpus, behind, model_event

logger = init_logger("vllm.manthan.worker")

LEAST, MOST = 128, 1024  # least and most tokens taken from a step, only from its request with most tokens
EVERY = 16  # least tokens of traffic for each token taken, so that calibration costs little
WANTED = 9_600
"""Least tokens that make a profile: four fifths of the 12,000 taken from 192,000 tokens of traffic."""
Rows: TypeAlias = tuple[torch.Tensor, ...]
"""Some rows of a layer's queries, keys and values, [tokens, heads, head_dim] each."""


class Calibrator:
    """Makes a single profile. group: of the attention layers. offer: called with the profile, on another thread.

    The model's thread copies arguments of the attention layers, and does not wait for the GPU. A thread of low priority
    does the rest.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        group: KvCacheGroup,
        rope: Rope | None,
        device: torch.device,
        offer: Callable[[Profile], None],
    ) -> None:
        model, modules = vllm_config.model_config, vllm_config.compilation_config.static_forward_context
        heads, dim = group.spec.num_kv_heads, group.spec.head_size
        self.every, self.wanted = EVERY, max(WANTED, 2 * heads * dim)
        self._offer, self._device = offer, device
        self._attentions = [modules[name].impl for name in group.names]
        self._folder = model_folder(model.model, model.revision)
        self._info = ProfileInfo(model.model, len(group.names), heads, dim, rope, TRAFFIC)
        self._builder: list[TrafficBuilder] = []  # empty until rows are added. Each reset begins a new list
        self._threads = JobThreads(1, "manthan-calibrate", allowed_cpus() if device.type == "cpu" else ())
        self._parts: list[Rows] = []  # by layer, copies of the step's rows
        self._wants = self._is_busy = self._is_done = False
        self._passed = self._taken = 0
        for layer, attention in enumerate(self._attentions):
            wrap("vllm.v1.attention.backend.AttentionImpl.forward", attention, partial(self._forward, layer))

    def begin_step(self, metadata: ManthanMetadata) -> None:
        self._is_done |= metadata.has_new_weights  # a profile is for the weights in the model's files
        if metadata.place is not None:  # what was taken before the cold store was emptied shapes no profile
            self._passed, self._taken, self._builder = 0, 0, []
        self._passed += metadata.tokens
        is_idle = not (self._is_busy or self._is_done)
        self._wants = is_idle and metadata.may_calibrate and self.every * self._taken <= self._passed
        self._parts = []

    def shutdown(self) -> None:
        self._is_done = True
        self._threads.shutdown()

    def _forward(self, layer: int, forward: Any, module: Any, *args: Any, **more: Any) -> Any:
        query, key, value, _, told, *_ = args
        if self._wants and told is not None:
            self._try(self._take, layer, told, query, key, value)
        return forward(module, *args, **more)

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        """End calibration if `call` raises. Blocks are then still encoded as they are now."""
        try:
            call(*args)
        except Exception as error:
            self._wants, self._is_done = False, True
            logger.warning("Manthan: no profile is made from traffic: %s: %s", type(error).__name__, error)

    def _take(self, layer: int, told: Any, *rows: torch.Tensor) -> None:
        """Copy rows of the request with most rows. After the last layer, begin the work on the thread.

        The prompt is found by kernels, so that the model's thread does not wait for the GPU. Nothing is copied if
        `max_query_len` is too low, or the GPU lacks memory for it. told: metadata of the attention backend. Raises
        NotImplementedError for metadata without `query_start_loc` (FlashInfer), and for fp8 queries.
        """
        if not hasattr(told, "query_start_loc") or rows[0].element_size() == 1:
            raise NotImplementedError(f"{type(told).__name__} with queries in {rows[0].dtype}")
        count = min(told.max_query_len, MOST)
        self._wants = layer == len(self._parts) and count >= LEAST
        if self._wants and layer == 0:
            at = told.query_start_loc.diff().argmax()
            start, end = told.query_start_loc.take(at), told.query_start_loc.take(at + 1)
            self._place = torch.stack([told.seq_lens.take(at), end - start])
            places = start + torch.arange(count, device=self._device)
            self._rows = places.clamp(max=len(rows[0]) - 1)  # `max_query_len` may be too high
            if self._device.type == "cuda":
                nbytes = len(self._attentions) * count * sum(x[0].nbytes for x in rows)
                self._wants = torch.cuda.mem_get_info(self._device)[0] > 2 * nbytes
        if not self._wants:
            return
        self._parts.append(tuple(x.index_select(0, self._rows) for x in rows))
        if len(self._parts) == len(self._attentions):
            self._wants, self._is_busy = False, True
            self._taken += count
            copied = model_event(self._device)
            self._threads.submit(self._try, self._add, self._builder, self._place, self._parts, copied)

    def _add(
        self, built: list[TrafficBuilder], place: torch.Tensor, parts: list[Rows], copied: torch.cuda.Event | None
    ) -> None:
        """Add rows of all layers to the profile. After enough tokens, offer the profile.

        built: `_builder` when the rows were taken. place: counts of the prompt's tokens: all by the step's end; in
        the step. parts: by layer. copied: event after the copies.
        """
        if copied is not None:
            torch.cuda.set_device(self._device)
        with behind(copied, self._device):  # each layer's GPU memory is freed after its copy
            end, count = place.tolist()
            parts = [tuple(x[:count].cpu() for x in parts.pop(0)) for _ in self._attentions]
        if count < LEAST:
            self._is_busy = False
            return
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        positions = np.arange(end - count, end)[:MOST]
        if not built:
            outputs = output_energies(self._folder, self._info.layers, parts[0][0].shape[1], self._info.head_dim)
            built.append(TrafficBuilder(self._info, outputs))
        for layer, (part, attention) in enumerate(zip(parts, self._attentions, strict=True)):
            queries, keys, values = (x.float().numpy().swapaxes(0, 1) for x in part)
            built[0].add(layer, positions, keys, values)
            if positions[0] == 0:
                built[0].ask(layer, queries * np.float32(attention.scale), keys, values)
        if built[0].tokens >= self.wanted and built is self._builder and not self._is_done:
            profile = built.pop().made()
            if built is self._builder and not self._is_done:  # `made` takes minutes for a large model
                self._is_done = True
                self._offer(profile)
        self._is_busy = False
