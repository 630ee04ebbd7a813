"""The ways in which the tests on a GPU run the engine: tiers, graphs or not, kernels or numpy."""

from typing import Any

FIXED_RATE = {"name": "k3v3", "sink_tokens": 0, "guard": False}
BLOCK = 25_856  # bytes that a compressed block of 32 tokens of the test model take in a tier
WAYS: dict[str, dict[str, Any]] = {
    "host, eager": {"eager": True, "tiers": {"kind": "host", "max_bytes": "64MiB"}},
    "device, graphs": {"eager": False, "tiers": {"kind": "device", "max_bytes": "64MiB"}},
    "device and host": {
        "tiers": {"kind": "device", "max_bytes": 60 * BLOCK, "host_bytes": "64MiB"},
        "codec": FIXED_RATE,
    },
    "numpy": {"codec.backend": "numpy", "tiers": {"kind": "host", "max_bytes": "64MiB"}},
}
