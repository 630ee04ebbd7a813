"""`manthan codecs`: which codecs there are, what they keep of a number and what that takes."""

from rich.table import Table
from rich.text import Text

from manthan.codec import Codec, CodecSpec, Section, SectionKind, codec_names, get_codec, section_codec
from manthan.codec.profile import PRESETS
from manthan.codec.registry import CENTRED, TILED
from manthan.codec.wht import PRESETS as STEPPED
from manthan.manager.commands.console import make_console

HEAD_DIM = 128
"""The head size of most models."""
BLOCK_TOKENS = 16
"""vLLM's block on GPUs."""
TILE_TOKENS = 128
"""Its block on CPUs, and as large as tiles should be."""
PURPOSE = {
    "k3v3": "3 bits for each number: fast, but loses much of a real model, and biased keys break it",
    "k4v2": "the same size, more exact for keys; encoding takes longer",
    "wht-5x": "the default, auto, without a profile: rotated, rounded to steps and entropy-coded",
    "wht-4x": "the same with finer steps: what the guard falls back to last",
    "k4v2c": "keys less their block's mean before RoPE: more exact, and biased keys do it no harm",
    "klt-5x": "takes a profile of the model (manthan calibrate): the most exact",
    "klt-6x": "the same, a little smaller: the default, auto, with a profile",
    "klt-8x": "the same, smaller",
    "klt-12x": "the same: the smallest, which loses most",
    "k4v4c": "k4v2c with finer values",
    "k4v2-tiles": "KVarN's variance-normalized tiles, to compare with: blocks of 128 tokens, on the CPU",
    "lloyd3": "k3v3 with the least-squares scale: loses more",
    "lloyd4": "more exact, four times less",
    "k4v3": "more exact keys: most of what lloyd4 gains, for less",
    "lloyd3-unrotated": "only to compare with: loses much more at the same size",
}


def codecs() -> None:
    """List the codecs there are, with their bits, and their sizes for vectors of 128 numbers in blocks of 16 tokens.

    Of tiles, in blocks of 128.
    """
    table = Table(box=None)
    for heading in ("codec", "bits, keys / values", "bytes of a key, a value", "ratio to bf16", "for"):
        table.add_column(heading)
    for name in codec_names():
        try:
            row = _row_of(name)
        except Exception as error:  # whatever another package's module does
            said = " ".join(str(error).split())
            table.add_row(Text(name), "", "", "", Text(f"cannot be used: {type(error).__name__}: {said}", style="red"))
            continue
        table.add_row(*map(Text, row))
    for name, ratio in PRESETS.items():
        table.add_row(*map(Text, _row_of_preset(name, ratio)))
    make_console().print(table)


def _row_of(name: str) -> tuple[str, ...]:
    if name in TILED:
        return _row_of_sections(TILED[name], TILE_TOKENS)
    if name in CENTRED:
        return _row_of_sections(CENTRED[name], BLOCK_TOKENS)
    if name in STEPPED:
        return _row_of_expected(name)
    return _row(name, get_codec(name, HEAD_DIM, "numpy"))


def _row(name: str, codec: Codec) -> tuple[str, ...]:
    if not isinstance(codec, Codec):
        raise TypeError(f"it must give a manthan.codec.Codec, not {codec!r}")
    key, value = (_vector_nbytes(codec, kind) for kind in ("key", "value"))
    lines = (type(codec).__doc__ or "").strip().splitlines() or [""]
    bits = f"{codec.bits('key')} / {codec.bits('value')}"
    return name, bits, f"{key:g}, {value:g}", f"{codec.ratio:.2f}x", PURPOSE.get(name, lines[0])


def _row_of_sections(spec: CodecSpec, tokens: int) -> tuple[str, ...]:
    many, codec = 1 << 8, section_codec(spec.name, HEAD_DIM)
    kinds = (SectionKind.KEYS, SectionKind.VALUES)
    sections = (Section(kind, spec.name, many, tokens, 1, HEAD_DIM) for kind in kinds)
    key, value = (codec.max_nbytes(section) / section.vectors for section in sections)
    ratio = 4 * HEAD_DIM / (key + value)
    return (
        spec.name,
        f"{spec.key_bits} / {spec.value_bits}",
        f"{key:.4g}, {value:.4g}",
        f"{ratio:.2f}x",
        PURPOSE[spec.name],
    )


def _row_of_expected(name: str) -> tuple[str, ...]:
    """Of numbers as the codec wants them: what it takes of others varies by a percent or two."""
    codec = section_codec(name, HEAD_DIM)
    kinds = (SectionKind.KEYS, SectionKind.VALUES)
    sections = [Section(kind, name, 1 << 8, BLOCK_TOKENS, 1, HEAD_DIM) for kind in kinds]
    key, value = (codec.expected_nbytes(section) / section.vectors for section in sections)
    bits = f"{8 * key / HEAD_DIM:.2f} / {8 * value / HEAD_DIM:.2f} on average"
    return name, bits, f"{key:.4g}, {value:.4g}", f"{4 * HEAD_DIM / (key + value):.2f}x", PURPOSE[name]


def _row_of_preset(name: str, ratio: float) -> tuple[str, ...]:
    """What is aimed at: keys and values take what each needs."""
    bits, both = 16 / ratio, 4 * HEAD_DIM / ratio
    return name, f"{bits:.3g} on average", f"{both:.4g} together", f"{ratio:.2f}x", PURPOSE[name]


def _vector_nbytes(codec: Codec, kind: str) -> float:
    """Bytes of one vector among many."""
    many = 1 << 12
    return codec.encoded_nbytes(many, kind) / many  # type: ignore[arg-type]
