"""Every refusal: its type, and a sentence that names the value and what would be right."""

import numpy as np
import pytest

from manthan.codec import (
    CodecError,
    DtypeError,
    HeadDimError,
    KindError,
    ShapeError,
    UnknownBackendError,
    UnknownCodecError,
    get_codec,
)

CODEC = get_codec("lloyd3", 64)
X = np.ones((3, 64), np.float32)
CODES = CODEC.encode(X)

REFUSALS = {
    "name": (lambda: get_codec("loyd3", 64), UnknownCodecError, "'loyd3'.*did you mean 'lloyd3'.*k4v3"),
    "empty name": (lambda: get_codec("", 64), UnknownCodecError, "codec '' is unknown"),
    "backend": (
        lambda: get_codec("lloyd3", 64, "tpu"),
        UnknownBackendError,
        '\'tpu\' is unknown: use "auto" or "numpy"',
    ),
    "head_dim odd": (
        lambda: get_codec("lloyd3", 100),
        HeadDimError,
        "head_dim 100 .*multiple of 8 from 32 to 512",
    ),
    "head_dim small": (lambda: get_codec("lloyd3", 24), HeadDimError, "head_dim 24 "),
    "head_dim large": (lambda: get_codec("lloyd3", 520), HeadDimError, "head_dim 520 "),
    "head_dim float": (lambda: get_codec("lloyd3", 64.0), HeadDimError, "head_dim 64.0 "),
    "kind, encode": (lambda: CODEC.encode(X, "query"), KindError, 'kind \'query\' .*"key" or "value"'),
    "kind, decode": (lambda: CODEC.decode(CODES, 3, "k"), KindError, "kind 'k' "),
    "kind, size": (lambda: CODEC.encoded_nbytes(3, None), KindError, "kind None "),
    "float64": (
        lambda: CODEC.encode(X.astype(np.float64)),
        DtypeError,
        "float64 cannot be encoded: float32, or",
    ),
    "int16": (lambda: CODEC.encode(X.astype(np.int16)), DtypeError, "int16"),
    "list": (lambda: CODEC.encode([[1.0] * 64]), DtypeError, "list"),
    "one vector": (lambda: CODEC.encode(X[0]), ShapeError, r"\(64,\) .* \[n, 64\]"),
    "other head_dim": (
        lambda: CODEC.encode(np.ones((3, 128), np.float32)),
        ShapeError,
        r"\(3, 128\) .*\[n, 64\]",
    ),
    "out too small": (
        lambda: CODEC.encode(X, out=CODES[:-1]),
        ShapeError,
        r"\(95,\) .*takes a contiguous run of 96",
    ),
    "out not bytes": (lambda: CODEC.encode(X, out=np.zeros(96, np.int8)), DtypeError, "int8"),
    "codes too short": (
        lambda: CODEC.decode(CODES[:-16], 3),
        ShapeError,
        r"\(80,\) are not those of 3 key vectors",
    ),
    "codes too long": (lambda: CODEC.decode(np.zeros(112, np.uint8), 3), ShapeError, r"\(112,\)"),
    "codes strided": (lambda: CODEC.decode(np.zeros(192, np.uint8)[::2], 3), ShapeError, "contiguous"),
    "codes bytes": (lambda: CODEC.decode(CODES.tobytes(), 3), DtypeError, "bytes are not supported"),
    "dtype": (lambda: CODEC.decode(CODES, 3, dtype=np.float16), DtypeError, "float16.*float32, or uint16"),
    "decode out shape": (lambda: CODEC.decode(CODES, 3, out=X[:2]), ShapeError, r"\(2, 64\).*\(3, 64\)"),
    "decode out dtype": (
        lambda: CODEC.decode(CODES, 3, out=np.zeros((3, 64), np.uint16)),
        ShapeError,
        "uint16",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_with_a_clear_sentence(what):
    act, error, text = REFUSALS[what]
    with pytest.raises(error, match=text) as refusal:
        act()
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, CodecError)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith((".", "?"))
