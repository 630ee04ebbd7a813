"""`manthan config check`: what a configuration amounts to, alone and for a model."""

from typing import Annotated

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.codec.base import Dtype
from manthan.codec.cpu.fp8 import FORMS as FP8_FORMS
from manthan.manager.commands.console import make_console
from manthan.manager.config.model import FIELDS, CodecConfig
from manthan.manager.config.model_shape import ModelShape, cold_nbytes
from manthan.manager.config.profiles import check_profile, choose_codec
from manthan.manager.config.registered import check_registered, choose_policy
from manthan.manager.config.resolve import DEFAULT, ConfigError, ManthanConfig, Resolved, resolve_config

SESSION_TOKENS = "2048,8192,32768"
NAMES = {Dtype.BFLOAT16: "bf16", Dtype.FLOAT16: "fp16", Dtype.FLOAT32: "fp32"} | dict.fromkeys(FP8_FORMS, "fp8")


def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, see configs/.")],
    model: Annotated[str, typer.Option(help="Say also what it means for this model: a folder, or a name.")] = "",
    block_size: Annotated[int, typer.Option(min=1, help="As vLLM's --block-size, for --model.")] = 16,
    ranks: Annotated[
        int, typer.Option("--tensor-parallel-size", min=1, help="As vLLM's --tensor-parallel-size, for --model.")
    ] = 1,
    cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="As vLLM's, for --model.")] = "auto",
    session_tokens: Annotated[str, typer.Option(help="Lengths of sessions, by comma, for --model.")] = SESSION_TOKENS,
) -> None:
    """Print what FILE and the environment amount to, or what is wrong with them."""
    try:
        resolved = resolve_config(file)
        check_registered(resolved)
        lengths = _lengths(session_tokens)
        shape = ModelShape.of(model, cache_dtype) if model else None
        of_model = _model_table(resolved.config, model, shape, block_size, ranks, lengths) if shape else None
    except ConfigError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    console = make_console()
    console.print(_table(resolved))
    if of_model:
        console.print()
        console.print(of_model)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(one) for one in text.split(",")]
        if min(lengths) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--session-tokens must be numbers of tokens, such as {SESSION_TOKENS}, not {text!r}"
        ) from None
    return lengths


def _table(resolved: Resolved) -> Table:
    table = Table("key", "value", "source", box=None)
    for key in FIELDS:
        table.add_row(key, Text(_value(resolved.config, key)), Text(resolved.sources[key]))
        if key == "policy.name":
            for option, value in choose_policy(resolved.config.policy).options:
                source = resolved.sources.get(f"policy.{option}", DEFAULT)
                table.add_row(f"policy.{option}", Text(str(value)), Text(source))
    return table


def _value(config: ManthanConfig, key: str) -> str:
    value: object = config
    for name in key.split(".", 1):
        value = getattr(value, name)
    return value.human_readable() if isinstance(value, ByteSize) else str(value)


def _model_table(
    config: ManthanConfig, model: str, shape: ModelShape, block_tokens: int, ranks: int, lengths: list[int]
) -> Table:
    """What the configuration means for a model. Raises ConfigError."""
    codec = config.codec
    chosen = choose_codec(codec, model, ranks, has_latents=bool(shape.latent))
    check_profile(chosen, model, shape.layers, shape.heads, shape.head_dim)
    sizes = {
        exact: shape.block_nbytes(chosen.name, block_tokens, ranks, exact, chosen.facts(0, ranks))
        for exact in (0, codec.sink_tokens % block_tokens, block_tokens)
    }
    copies = shape.copies(ranks)
    hot, cold = copies * shape.token_nbytes * block_tokens, sizes[0] * ranks
    usable = cold_nbytes(config, max(sizes.values()), ranks)
    table = Table("for the model", model, box=None)
    if shape.latent:
        table.add_row("layers, latent, RoPE's part", f"{shape.layers}, {shape.latent}, {shape.head_dim}")
    else:
        table.add_row("layers, KV heads, head size", f"{shape.layers}, {shape.heads}, {shape.head_dim}")
    table.add_row("blocks of", f"{block_tokens} tokens, {'one rank' if ranks == 1 else f'{ranks} ranks'}")
    each = "" if copies == 1 else f", {shape.token_nbytes} on each rank"
    table.add_row(f"KV of a token in {NAMES[shape.dtype]}", f"{copies * shape.token_nbytes} bytes{each}")
    if chosen.profile is not None:
        table.add_row("profile", str(chosen.path))
        table.add_row("… of", f"{chosen.profile.info.tokens} tokens, metric {chosen.profile.info.metric}")
    table.add_row(f"the same as codes of {chosen.name}", f"{cold / block_tokens:.0f} bytes, headers included")
    table.add_row("ratio", f"{hot / cold:.2f}x")
    table.add_row("the cold store holds", f"{usable // sizes[0] * block_tokens} tokens")
    for tokens in lengths:
        blocks = [sizes[count] for count in _exact(codec, tokens // block_tokens, block_tokens)]
        table.add_row(f"sessions of {tokens} tokens", _sessions(config, tokens, usable, blocks, block_tokens))
    return table


def _exact(codec: CodecConfig, blocks: int, block_tokens: int) -> list[int]:
    """How many tokens are kept exact in each block of a session."""
    window = -(-codec.window_tokens // block_tokens)
    sink = [min(max(codec.sink_tokens - depth * block_tokens, 0), block_tokens) for depth in range(blocks)]
    return [block_tokens if depth >= blocks - window else sink[depth] for depth in range(blocks)]


def _sessions(config: ManthanConfig, tokens: int, usable: int, sizes: list[int], block_tokens: int) -> str:
    """How many sessions fit whose blocks take so many bytes each."""
    if tokens < config.min_tokens:
        return f"none is kept: min_tokens is {config.min_tokens}"
    return f"{usable // sum(sizes)}" if sizes else f"none is kept: a block has {block_tokens} tokens"
