"""`manthan config check`: what a configuration amounts to, alone and for a model."""

from typing import Annotated

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.codec.base import Dtype
from manthan.codec.cpu.fp8 import FORMS as FP8_FORMS
from manthan.codec.registry import DEFAULT as DEFAULT_CODEC
from manthan.codec.registry import needs_profile
from manthan.manager.commands.console import make_console
from manthan.manager.config.model import FIELDS, CodecConfig
from manthan.manager.config.model_shape import ModelShape, cold_nbytes
from manthan.manager.config.profiles import ChosenCodec, check_profile, choose_codec
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
    for name in key.split("."):
        value = getattr(value, name)
    return value.human_readable() if isinstance(value, ByteSize) else str(value)


def _model_table(
    config: ManthanConfig, model: str, shape: ModelShape, block_tokens: int, ranks: int, lengths: list[int]
) -> Table:
    """What the configuration means for a model. Raises ConfigError."""
    codec = config.codec
    chosen = choose_codec(codec, model, ranks, has_latents=bool(shape.latent))
    check_profile(chosen, model, shape.layers, shape.heads, shape.head_dim)
    cold = ColdSession(shape, codec, chosen, block_tokens, ranks)
    usable = cold_nbytes(config, max((*cold.chain.values(), *cold.window.values())), cold.ranks)
    table = Table("for the model", model, box=None)
    _add_layers(table, shape)
    table.add_row("blocks of", f"{block_tokens} tokens, {'one rank' if ranks == 1 else f'{ranks} ranks'}")
    if chosen.profile is not None:
        table.add_row("profile", str(chosen.path))
        table.add_row("… of", f"{chosen.profile.info.tokens} tokens, metric {chosen.profile.info.metric}")
    if shape.layers:
        copies, coded = shape.copies(ranks), cold.chain[0] * cold.ranks / block_tokens
        each = "" if copies == 1 else f", {shape.token_nbytes} on each rank"
        table.add_row(f"KV of a token in {NAMES[shape.dtype]}", f"{copies * shape.token_nbytes} bytes{each}")
        table.add_row(f"the same as codes of {chosen.name}", f"{coded:.0f} bytes, headers included")
        table.add_row("ratio", f"{copies * shape.token_nbytes / coded:.2f}x")
        table.add_row("the cold store holds", f"{usable // cold.chain[0] * block_tokens} tokens")
    for tokens in lengths:
        table.add_row(f"sessions of {tokens} tokens", _sessions(config, tokens, usable, cold))
        if tokens >= max(block_tokens, config.min_tokens):
            table.add_row("each", _each(shape, tokens, cold))
    return table


def _add_layers(table: Table, shape: ModelShape) -> None:
    """What the layers keep."""
    if shape.latent:
        table.add_row("layers, latent, RoPE's part", f"{shape.layers}, {shape.latent}, {shape.head_dim}")
    elif shape.layers:
        table.add_row("layers, KV heads, head size", f"{shape.layers}, {shape.heads}, {shape.head_dim}")
    if (windows := shape.windows) is not None:
        name = f"… with windows of {windows.tokens}" if shape.layers else f"layers with windows of {windows.tokens}, …"
        table.add_row(name, f"{windows.layers}, {windows.heads}, {windows.head_dim}")
    if (states := shape.states) is not None:
        table.add_row("layers with states", f"{states.layers}, of {states.nbytes // states.layers} bytes each")


class ColdSession:
    """About what a session takes as codes on one rank. chain, window: a block's bytes in
    the layers with full attention, and in those with windows, by how many of its first tokens are exact; of nothing 0.
    """

    def __init__(
        self, shape: ModelShape, codec: CodecConfig, chosen: ChosenCodec, block_tokens: int, ranks: int
    ) -> None:
        self._shape, self._codec, self.block_tokens, self.ranks = shape, codec, block_tokens, ranks
        exacts = (0, codec.sink_tokens % block_tokens, block_tokens)
        facts, name = chosen.facts(0, ranks), chosen.name
        self.chain, self.window = dict.fromkeys(exacts, 0), dict.fromkeys(exacts, 0)
        if shape.layers:
            self.chain = {each: shape.block_nbytes(name, block_tokens, ranks, each, facts) for each in exacts}
        if shape.windows is not None:
            beside, of = (
                DEFAULT_CODEC if needs_profile(name) else name,
                shape.window_shape,
            )  # profiles are of the others
            self.window = {each: of.block_nbytes(beside, block_tokens, ranks, each) for each in exacts}

    def nbytes(self, tokens: int) -> int:
        """Of a session of so many tokens."""
        exact = _exact(self._codec, tokens // self.block_tokens, self.block_tokens)
        seen = self._shape.windows.tokens if self._shape.windows is not None else 1
        first = max(0, len(exact) * self.block_tokens - seen + 1) // self.block_tokens
        states = self._shape.states.cold_nbytes(self._codec.state) // self.ranks if self._shape.states else 0
        return sum(self.chain[each] for each in exact) + sum(self.window[each] for each in exact[first:]) + states


def _each(shape: ModelShape, tokens: int, cold: ColdSession) -> str:
    """What a session of so many tokens takes on all ranks."""
    ranks = cold.ranks
    hot = shape.session_nbytes(tokens) + (shape.copies(ranks) - 1) * shape.token_nbytes * tokens
    beside = shape.session_nbytes(tokens) - shape.token_nbytes * tokens if shape.layers else 0
    kept = f", {ByteSize(beside).human_readable()} of them beside" if beside else ""
    coded = cold.nbytes(tokens) * cold.ranks
    return (
        f"{ByteSize(hot).human_readable()} in the cache{kept}; {ByteSize(coded).human_readable()} as codes, "
        f"{hot / coded:.2f}x"
    )


def _exact(codec: CodecConfig, blocks: int, block_tokens: int) -> list[int]:
    """How many tokens are kept exact in each block of a session."""
    window = -(-codec.window_tokens // block_tokens)
    sink = [min(max(codec.sink_tokens - depth * block_tokens, 0), block_tokens) for depth in range(blocks)]
    return [block_tokens if depth >= blocks - window else sink[depth] for depth in range(blocks)]


def _sessions(config: ManthanConfig, tokens: int, usable: int, cold: ColdSession) -> str:
    """How many sessions of so many tokens fit."""
    if tokens < config.min_tokens:
        return f"none is kept: min_tokens is {config.min_tokens}"
    nbytes = cold.nbytes(tokens) if tokens >= cold.block_tokens else 0
    return f"{usable // nbytes}" if nbytes else f"none is kept: a block has {cold.block_tokens} tokens"
