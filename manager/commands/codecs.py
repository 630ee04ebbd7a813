"""`manthan codecs`: which codecs there are, what they keep of a number and what that takes."""

from rich.table import Table
from rich.text import Text

from manthan.codec import Codec, Section, SectionKind, codec_names, get_codec
from manthan.codec.cpu.klt import PRESETS as CALIBRATED
from manthan.manager.commands.console import make_console

HEAD_DIM = 128
"""The head size of most models."""
BLOCK_TOKENS = 16
"""vLLM's block on GPUs."""
PURPOSE = {
    "wht-5x": "the default, auto, without a profile: rotated, rounded to steps and entropy-coded",
    "wht-4x": "the same with finer steps: what the guard falls back to last",
    "klt-5x": "takes a profile of the model (manthan calibrate): the most exact",
    "klt-8x": "the same, smaller: the default, auto, with a profile",
    "klt-12x": "the same: the smallest, which loses most",
    "k3v3": "3 bits for each number, of a fixed rate: loses more of a real model, and biased keys break it",
}


def codecs() -> None:
    """List the codecs there are, with their bits, and their sizes for vectors of 128 numbers in blocks of 16 tokens."""
    table = Table(box=None)
    for heading in ("codec", "bits, keys / values", "bytes of a key, a value", "ratio to bf16", "for"):
        table.add_column(heading)
    for name in codec_names():
        try:
            row = _row(name)
        except Exception as error:  # whatever another package's module does
            said = " ".join(str(error).split())
            table.add_row(Text(name), "", "", "", Text(f"cannot be used: {type(error).__name__}: {said}", style="red"))
            continue
        table.add_row(*map(Text, row))
    make_console().print(table)


def _row(name: str) -> tuple[str, ...]:
    """Sizes are of numbers as the codec wants them; of others they vary by a percent or two."""
    if name in CALIBRATED:  # keys and values take what each needs
        ratio = CALIBRATED[name].ratio
        return (
            name,
            f"{16 / ratio:.3g} on average",
            f"{4 * HEAD_DIM / ratio:.4g} together",
            f"{ratio:.2f}x",
            PURPOSE[name],
        )
    codec = get_codec(name, HEAD_DIM)
    if not isinstance(codec, Codec):
        raise TypeError(f"it must give a manthan.codec.Codec, not {codec!r}")
    kinds = (SectionKind.KEYS, SectionKind.VALUES)
    sections = [Section(kind, name, 1 << 8, BLOCK_TOKENS, 1, HEAD_DIM) for kind in kinds]
    key, value = (codec.expected_nbytes(section) / section.vectors for section in sections)
    bits = f"{8 * key / HEAD_DIM:.3g} / {8 * value / HEAD_DIM:.3g}" + (" on average" if codec.varies else "")
    lines = (type(codec).__doc__ or "").strip().splitlines() or [""]
    ratio = 4 * HEAD_DIM / (key + value)
    return name, bits, f"{key:.4g}, {value:.4g}", f"{ratio:.2f}x", PURPOSE.get(name, lines[0])
