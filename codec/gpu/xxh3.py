"""Constants of xxh3-64 without a seed, for inputs over 240 bytes, for CUDA kernels that hash compressed KV blocks.

The input is read as 64-bit words, little-endian, 8 in each stripe. SECRET[s + i] is mixed with word i of stripe s of a
kibibyte, and SECRET[16 + i] with sum i after each 16 stripes. LAST is mixed with the input's last 64 bytes, and MERGE
with the 8 sums in the end.
"""

import struct

PRIME_32_1, PRIME_32_2, PRIME_32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME_64_1, PRIME_64_2, PRIME_64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME_64_4, PRIME_64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1 = 0x165667919E3779F9

_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _words(count: int, start: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", _BYTES, start)


START = (PRIME_32_3, PRIME_64_1, PRIME_64_2, PRIME_64_3, PRIME_64_4, PRIME_32_2, PRIME_64_5, PRIME_32_1)
"""Initial values of the hash's 8 sums."""
SECRET = _words(24, 0)
LAST = _words(8, 121)
MERGE = _words(8, 11)
