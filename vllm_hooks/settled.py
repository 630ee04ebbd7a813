"""Choice of an engine's codec, made before vLLM starts processes, so that all processes have the same codec.

Calibrated codecs need a profile: a file of transforms and tables for one model, made by `manthan calibrate` or from the
prompts of a running server.
"""

import logging
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from manthan.codec.block import piece_dim
from manthan.codec.cpu.exact import EXACT
from manthan.codec.errors import ProfileError
from manthan.codec.profile import Profile
from manthan.codec.registry import needs_profile
from manthan.manager.config.model import CodecConfig, ConfigError
from manthan.manager.config.profiles import AUTO, PLAIN, check_profile, choose_codec, has_weights, profile_path
from manthan.vllm_hooks.support import Latents, has_draft, is_packed
from manthan.vllm_hooks.transfer_config import EXTRA_KEY, is_on_gpu, settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.manthan")

ASKED, DIGEST, FAULT = "manthan_codec_asked", "manthan_profile_digest", "manthan_kernel_fault"
CALIBRATES, APPROVED = "manthan_profile_to_make", "manthan_codec_approved"
"""Keys in the settings that vLLM hands to its processes. Values: the codec as configured; the digest of the chosen
codec's profile; why kernels are not used; the path of a profile to make from prompts; and, after a guard's choice of
the codec on these weights, true. All but the first may be empty.
"""
PROBE_S = 60.0  # most seconds to compile a kernel, to see if the compiler works
SHARED = "this GPU shares the CPU's memory"  # reason to encode on the CPU, so that the model has the GPU alone
PROBE = f"""
import sys
try:
    from manthan.codec.gpu.nvrtc import cubin, torch
    if torch.cuda.is_available() and torch.cuda.get_device_properties(0).is_integrated:
        sys.exit({SHARED!r})
    cubin('extern "C" __global__ void nothing() {{}}', sys.argv[1])
except Exception as error:
    sys.exit(str(error))
"""
"""Program that compiles an empty kernel. Its error, or SHARED, goes to standard error."""
AS_THEY_ARE = {"name": EXACT, "profile": "", "sink_tokens": 0, "guard": False}  # for blocks kept bit for bit


def settle_codec(vllm_config: "VllmConfig") -> None:
    """Choose codec and profile from the configured codec, and write them into the settings. Raises ConfigError."""
    extra, model, parallel = settings(vllm_config), vllm_config.model_config, vllm_config.parallel_config
    asked = CodecConfig.model_validate(extra.setdefault(ASKED, extra[EXTRA_KEY]["codec"]))
    if FAULT not in extra:
        is_probed = is_on_gpu(vllm_config) and extra[EXTRA_KEY]["codec"]["backend"] == "auto"
        extra[FAULT] = kernel_fault() if is_probed else ""
    fault = extra[FAULT]
    is_shared = fault.endswith(SHARED)
    if fault and extra[EXTRA_KEY]["tiers"]["kind"] == "device":
        why = SHARED if is_shared else f"this GPU's kernels cannot be compiled ({fault})"
        raise ConfigError(f"tiers.kind is device, but {why}: use host")
    if is_shared:
        fault, asked = "", asked.model_copy(update={"backend": "numpy"})
    if fault:
        logger.warning("Manthan: codec exact is used, on the CPU, because kernels cannot be compiled: %s", fault)
    if fault or is_packed(vllm_config.cache_config):
        kept = asked.model_copy(update=AS_THEY_ARE | ({"backend": "numpy"} if fault else {}))
        extra[EXTRA_KEY] = extra[EXTRA_KEY] | {"codec": kept.model_dump(mode="json")}
        extra[DIGEST] = ""
        return
    if has_draft(vllm_config):
        why = ", but --speculative-config has a draft, whose layers a profile does not know: use"
        asked = without_profile(asked, why)
    if (stages := parallel.pipeline_parallel_size) > 1:
        why = f", but --pipeline-parallel-size is {stages}, and a profile has all layers: use"
        asked = without_profile(asked, why)
    ranks = parallel.tensor_parallel_size
    chosen = choose_codec(asked, model.model, ranks, has_latents=model.use_mla, revision=model.revision)
    latent = Latents.of(vllm_config).numbers
    heads, head_dim = model.get_total_num_kv_heads(), model.get_head_size()
    if latent and chosen.profile is not None:
        heads, head_dim = latent // piece_dim(latent), piece_dim(latent)
    check_profile(chosen, model.model, model.get_num_layers(parallel), heads, head_dim, latent)
    extra[CALIBRATES] = _calibrates(vllm_config, asked) if chosen.name == PLAIN and asked.name == AUTO else ""
    extra[APPROVED] = chosen.is_approved
    settled = asked.model_copy(update={"name": chosen.name, "profile": str(chosen.path or "")})
    extra[EXTRA_KEY] = extra[EXTRA_KEY] | {"codec": settled.model_dump(mode="json")}
    extra[DIGEST] = "" if chosen.profile is None else chosen.profile.digest


def _calibrates(vllm_config: "VllmConfig", codec: CodecConfig) -> str:
    """Return the path of a profile to make from traffic; if none can be made, log why and return an empty path."""
    from vllm.platforms import current_platform

    extra, model, parallel = settings(vllm_config)[EXTRA_KEY], vllm_config.model_config, vllm_config.parallel_config
    cache = vllm_config.cache_config.cache_dtype
    reasons = {
        "codec.guard is false": not codec.guard,
        "vLLM runs on neither CPU nor CUDA": not (current_platform.is_cpu() or current_platform.is_cuda()),
        "attention may quantize queries for an fp8 cache on a GPU": current_platform.is_cuda()
        and cache.startswith("fp8"),
        "there are several ranks": parallel.world_size > 1,
        "other engines on the same Redis would lack the profile": extra["tiers"]["kind"] == "redis",
        "the model has latents (MLA) or recurrent states": model.use_mla or model.is_hybrid,
        "sealing.key_file is set, and a profile would not be sealed": bool(extra["sealing"]["key_file"]),
        "no files with the model's weights were found": not has_weights(model.model, model.revision),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        logger.info("Manthan: no profile is made from traffic, because %s", why)
        return ""
    return str(profile_path(model.model, 1, model.revision))


@cache
def kernel_fault() -> str:
    """Return why this machine's first GPU is not to encode, ending in SHARED if it shares RAM; empty if it may."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None or capability.major < 8:
        known = "not known" if capability is None else f"{capability.as_version_str()}, below 8.0"
        return f"its compute capability is {known}"
    return _compiled(f"sm_{capability.major}{capability.minor}")


def _compiled(architecture: str) -> str:
    """Compile an empty kernel in a separate process. Return the reason for a failure; empty for none.

    vLLM may fork its processes from this one, and a process that is forked after a compilation cannot use CUDA.
    """
    command = [sys.executable, "-c", PROBE, architecture]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return f"the compiler did not end in {PROBE_S:g} s"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if not done.returncode:
        return ""
    return " ".join(done.stderr.split()) or f"the compiler's exit status is {done.returncode}"


def without_profile(asked: CodecConfig, why: str) -> CodecConfig:
    """Return the codec to use when no profile can be used. Raises ConfigError if the configuration requires one.

    why: part of the message "codec.name is X, but …: use auto or wht-5x", from the comma to "use".
    """
    if needs_profile(asked.name) or asked.profile:
        what = f"codec.profile is {asked.profile}" if asked.profile else f"codec.name is {asked.name}"
        raise ConfigError(f"{what}{why} {'no profile, and codec.name ' if asked.profile else ''}{AUTO} or {PLAIN}")
    return asked.model_copy(update={"name": PLAIN if asked.name == AUTO else asked.name})


def settled_profile(vllm_config: "VllmConfig") -> Profile | None:
    """Return the codec's profile, if any. Raises ConfigError for a bad file, or one changed since `settle_codec`."""
    extra = settings(vllm_config)
    if not (digest := extra.get(DIGEST)):
        return None
    path = Path(extra[EXTRA_KEY]["codec"]["profile"])
    try:
        profile = Profile.load(path)
    except ProfileError as error:
        raise ConfigError(str(error)) from None
    if profile.digest != digest:
        raise ConfigError(f"the profile {path} was changed while the engine started: start the engine again.")
    return profile
