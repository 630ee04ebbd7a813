"""The constants of xxh3-64 for inputs of more than 240 bytes, as 64-bit words; for hashing where the library cannot go.

From the algorithm's specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): the secret, the sums' start values,
and the parts of the secret that the last stripe and the final merge take.
"""

_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(start: int, count: int) -> tuple[int, ...]:
    return tuple(int.from_bytes(_SECRET[i : i + 8], "little") for i in range(start, start + 8 * count, 8))


START = (
    _PRIME32[2],
    _PRIME64[0],
    _PRIME64[1],
    _PRIME64[2],
    _PRIME64[3],
    _PRIME32[1],
    _PRIME64[4],
    _PRIME32[0],
)
SECRET = _words(0, 24)
LAST = _words(121, 8)
MERGE = _words(11, 8)
