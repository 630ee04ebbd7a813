"""Calibration of a rank by traffic: queries, keys and values of some prompts make a profile.

The model's thread copies the attention's arguments. A thread of low priority does the rest.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from manthan.codec.profile import Profile, ProfileInfo
from manthan.codec.rope import Rope
from manthan.manager.calibration.traffic import TrafficBuilder, output_energies
from manthan.manager.config.profiles import model_folder
from manthan.vllm_hooks.compat import wrap
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.engine import JobThreads, allowed_cpus

if TYPE_CHECKING:
    from manthan.vllm_hooks.groups import KvCacheGroup

logger = init_logger("vllm.manthan.worker")

LEAST, MOST = 128, 1024
"""Least and most tokens taken of a prompt."""
EVERY = 16
"""Tokens of traffic for each token taken."""
WANTED = 9_600
"""Tokens that make a profile, four fifths of those taken: of 192,000 tokens of traffic."""


class Calibrator:
    """Makes a single profile. offer: called with the profile, on the calibrator's thread."""

    def __init__(
        self, vllm_config: VllmConfig, group: "KvCacheGroup", rope: Rope | None, offer: Callable[[Profile], None]
    ) -> None:
        model, modules = vllm_config.model_config, vllm_config.compilation_config.static_forward_context
        heads, dim = group.spec.num_kv_heads, group.spec.head_size
        self.every, self.wanted, self._offer = EVERY, max(WANTED, 2 * heads * dim), offer
        self._attentions = [modules[name].impl for name in group.names]
        self._folder = model_folder(model.model, model.revision)
        self._info = ProfileInfo(model.model, len(group.names), heads, dim, rope, "attention")
        self._builder: TrafficBuilder | None = None
        self._threads = JobThreads(1, "manthan-calibrate", allowed_cpus())
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._wants = self._is_busy = self._is_done = False
        self._passed = self._taken = 0
        for layer, attention in enumerate(self._attentions):
            wrap("vllm.v1.attention.backend.AttentionImpl.forward", attention, partial(self._forward, layer))

    def begin_step(self, metadata: ManthanMetadata) -> None:
        self._is_done |= metadata.place is not None  # after a reset the weights may differ
        self._passed += metadata.tokens
        is_idle = not (self._is_busy or self._is_done)
        self._wants = is_idle and metadata.may_calibrate and self.every * self._taken <= self._passed
        self._parts = []

    def shutdown(self) -> None:
        """Wait for the work under way."""
        self._is_done = True
        self._threads.shutdown()

    def _forward(self, layer: int, forward: Any, module: Any, *args: Any, **more: Any) -> Any:
        query, key, value, _, told, *_ = args
        if self._wants and told is not None:
            self._try(self._note, layer, told, query, key, value)
        return forward(module, *args, **more)

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        """End calibration if `call` raises. Blocks are then encoded with the earlier codec."""
        try:
            call(*args)
        except Exception as error:
            self._wants, self._is_done = False, True
            logger.warning("Manthan: no profile is made from traffic: %s: %s", type(error).__name__, error)

    def _note(self, layer: int, told: Any, *rows: torch.Tensor) -> None:
        """Copy rows of the step's longest prompt, [tokens, heads, head_dim]. The last layer begins the work."""
        counts = told.query_start_loc.diff()
        at = int(counts.argmax())
        start, count = int(told.query_start_loc[at]), int(counts[at])
        self._wants = count >= LEAST and layer == len(self._parts) < len(self._attentions) - 1
        if count >= LEAST and layer == len(self._parts):
            self._parts.append(tuple(x[start : start + min(count, MOST)].clone() for x in rows))
        if len(self._parts) == len(self._attentions):
            self._is_busy = True
            self._taken += len(self._parts[0][0])
            self._threads.submit(self._try, self._add, int(told.seq_lens[at]) - count, self._parts)

    def _add(self, first: int, parts: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Add rows of all layers from position `first` on. Offer the profile after enough tokens."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        info, builder = self._info, self._builder
        if builder is None:
            outputs = output_energies(self._folder, info.layers, parts[0][0].shape[1], info.head_dim)
            builder = self._builder = TrafficBuilder(info, outputs)
        for layer, (part, attention) in enumerate(zip(parts, self._attentions, strict=True)):
            queries, keys, values = (x.float().numpy().swapaxes(0, 1) for x in part)
            builder.add(layer, np.arange(first, first + keys.shape[1]), keys, values)
            if first == 0:
                builder.ask(layer, queries * np.float32(attention.scale), keys, values)
        if builder.tokens >= self.wanted and not self._is_done:
            self._is_done, self._builder = True, None
            self._offer(builder.made())
        self._is_busy = False
