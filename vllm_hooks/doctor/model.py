"""Check of a model: findings about its KV caches, and how each is stored. vLLM builds the model without weights."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manthan.codec.cpu.exact import EXACT
from manthan.manager.config.model import ConfigError
from manthan.manager.doctor import Finding, Grade
from manthan.vllm_hooks.doctor.families import families, stored
from manthan.vllm_hooks.groups import config_for, groups_for
from manthan.vllm_hooks.memory import Shards, codec_of_other, memory_shapes
from manthan.vllm_hooks.settled import settle_codec, settled_profile
from manthan.vllm_hooks.support import RELEASES, check_supported
from manthan.vllm_hooks.transfer_config import kv_transfer_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

STATE = "MambaSpec"  # class of the spec of recurrent states
LONG = 512
"""Most tokens between two resume points without a warning. A resume point is a length at which a session can go on."""
WAYS = {"coded": "compressed", "bytes": "as bytes", "refused": "refused", "": "not needed"}
MARKS = {"coded": Grade.OK, "partly": Grade.WARNING, "bytes": Grade.WARNING, "refused": Grade.WRONG}


def check_model(model: str, file: str | None = None, block_size: int | None = None) -> Iterator[Finding]:
    """Yield findings about a model: the form in which each KV cache group is stored, and the resume points.

    model: a folder, or a name in Hugging Face's cache. A model that cannot be built is looked up by its class.
    file: the YAML file of --manthan-config. block_size: vLLM's --block-size; None for vLLM's default.
    """
    try:
        names = _architectures(model)
    except (OSError, ValueError, ImportError) as error:
        yield Finding("model", Grade.WRONG, f"config.json of {model} cannot be read: {_sentence(error)}.")
        return
    try:
        vllm_config, kv_cache_config = planned(model, names, block_size)
    except Exception as error:  # model classes raise anything
        why = f"it cannot be built here ({_sentence(error)}), so its class is looked up."
        yield Finding("model", Grade.WARNING, why)
        yield from map(_by_class, names)
        return
    name = vllm_config.model_config.architecture
    yield Finding("model", Grade.OK, f"{name} was built without weights.")
    vllm_config.kv_transfer_config = kv_transfer_config(file)
    refusals = []
    if name in families() and (uncached := families()[name].uncached):
        refusals.append(f"vLLM finds no prefixes of such a model: {uncached}.")
    try:
        check_supported(vllm_config)
    except ConfigError as error:
        refusals.append(str(error))
    shapes: dict[int, tuple[str, str, float]] = {}
    distance = 0
    try:
        shapes, distance = _stored(vllm_config, kv_cache_config)
    except ConfigError as error:
        refusals.append(str(error))
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, check, how = group.kv_cache_spec, f"KV cache {index}", shapes.get(index)
        what = _described(spec, len(group.layer_names))
        if how is not None:
            codec, form, ratio = how
            is_small = codec != EXACT or type(spec).__name__ == STATE
            yield Finding(check, Grade.OK if is_small else Grade.WARNING, f"{what}{form}, {ratio:.1f} times smaller.")
        elif not spec.prefix_cacheable:
            yield Finding(check, Grade.OK, f"{what}not stored, because vLLM needs none of it for a prefix.")
        else:
            why = ", because Manthan is refused for this model: see below" if refusals else ""
            yield Finding(check, Grade.WARNING, f"{what}not stored{why}.")
    if shapes:
        yield _resumed(distance, vllm_config.model_config.max_model_len)
    yield from (Finding("Manthan", Grade.WRONG, said) for said in dict.fromkeys(refusals))


def planned(model: str, names: Iterable[str] = (), block_size: int | None = None) -> "tuple[VllmConfig, KVCacheConfig]":
    """Have vLLM build a model on the meta device and plan its KV cache. Raises exceptions of any class.

    names: names of the model's classes, to import first.
    """
    import torch
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from manthan.vllm_hooks.compat import plan_kv_cache

    for name in names:
        known = ModelRegistry.models.get(name)
        if known is not None:
            known.load_model_cls()  # if an import fails here, the error names the missing package
    more: Any = {} if current_platform.is_cuda_alike() else {"hf_overrides": _without_quantization}
    if block_size is not None:
        more["block_size"] = block_size
    vllm_config = EngineArgs(model=model, load_format="dummy", enforce_eager=True, **more).create_engine_config()
    with set_current_vllm_config(vllm_config), _one_rank():
        dtype: Any = vllm_config.model_config.dtype
        with set_default_torch_dtype(dtype), torch.device("meta"):
            initialize_model(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        return vllm_config, plan_kv_cache(vllm_config)


@contextmanager
def _one_rank() -> Iterator[None]:
    """Set up vLLM's distributed state with this process as the only rank, while a model is built."""
    import torch
    from vllm.distributed import parallel_state as state
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    with tempfile.TemporaryDirectory() as folder:
        state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            state.ensure_model_parallel_initialized(1, 1)
            init_workspace_manager(torch.device(current_platform.device_type))
            yield
        finally:
            reset_workspace_manager()
            state.destroy_model_parallel()
            state.destroy_distributed_environment()


def _without_quantization(config: Any) -> Any:
    """Return a model's configuration without its quantization, because few kinds of quantization run without a GPU."""
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for each in parts:
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return config


def _resumed(distance: int, longest: int) -> Finding:
    """Return the finding about resume points, `distance` tokens apart. longest: most tokens of a session."""
    mark, rest = Grade.OK, ""
    if distance >= longest:
        mark, rest = Grade.WRONG, f", but has at most {longest:,}: nothing of it is ever found again"
    elif distance > LONG:
        mark = Grade.WARNING
        rest = ": a shorter one is never found again, and a shorter turn is computed again in the next"
    return Finding("resume points", mark, f"a session can be resumed every {distance:,} tokens{rest}.")


def _stored(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> tuple[dict[int, tuple[str, str, float]], int]:
    """Return codec, form in words and ratio of each stored group, by index; and the tokens between resume points.

    Raises ConfigError.
    """
    settle_codec(vllm_config)
    groups = groups_for(vllm_config, kv_cache_config)
    codec = config_for(vllm_config, groups).codec
    profile = None if groups.main.is_packed else settled_profile(vllm_config)
    sizes = memory_shapes(codec, groups, Shards(1, lambda nbytes: nbytes), profile)[0].groups
    stores = {}
    for group in groups.stored:
        name = codec.name if group is groups.main else codec_of_other(codec.name, group, codec.state)
        as_bytes = len({*group.opaque.names} - {*group.names}) if group.opaque else 0
        raw = f", {as_bytes} of the layers as bytes" if as_bytes else ""
        form = "kept as it is" if name == EXACT else f"codec {name}{raw}"
        stores[group.index] = name, form, sizes[group.index].pool_nbytes / sizes[group.index].cold_nbytes
    return stores, groups.resume_tokens


def _described(spec: Any, layers: int) -> str:
    """Return the first part of the sentence about a KV cache group: kind, size and blocks."""
    # A spec made of several specs already counts the bytes of all layers.
    nbytes = spec.page_size_bytes * (1 if hasattr(spec, "kv_cache_specs") else layers)
    kind, window = type(spec).__name__, getattr(spec, "sliding_window", None)
    window = window or getattr(spec, "attention_chunk_size", None)
    size = f"a state of {nbytes:,} bytes" if kind == STATE else f"{nbytes // spec.block_size:,} bytes a token"
    of = f" of the last {window:,}" if window else ""
    return f"{layers} layers of {kind}, {size}{of}, in blocks of {spec.block_size:,}: "


def _by_class(name: str) -> Finding:
    """Return the finding about a model class, from `families.yaml`, for a model that cannot be built."""
    family = families().get(name)
    if family is None:
        why = f"{name} is no class that generates text in vLLM {' or '.join(RELEASES)}."
        return Finding("KV cache", Grade.WRONG, why)
    caches = ", ".join(f"{each} ({WAYS[stored(each)]})" for each in family.caches)
    why = f"; {family.uncached}" if family.uncached else ""
    return Finding("KV cache", MARKS[family.outcome], f"models of {name} have {caches}{why}.")


def _architectures(model: str) -> list[str]:
    """Return `architectures` of a model's config.json: names of model classes. Raises OSError and ValueError."""
    found: Any = Path(model) / "config.json"
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(model, "config.json")
        except ValueError:  # not a valid name
            found = None
        if not isinstance(found, str):
            raise FileNotFoundError("it is neither a folder nor in Hugging Face's cache")
    return json.loads(Path(found).read_text(encoding="utf-8")).get("architectures") or []


def _sentence(error: BaseException) -> str:
    """Return the line of an error's text that says what is wrong, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The first line of a pydantic error only counts the errors.
    said = lines[1] if "validation error" in lines[0] and len(lines) > 1 else lines[0]
    return said.removeprefix("Value error, ").split(" [type=")[0].rstrip(".")[:200]
