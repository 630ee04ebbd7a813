"""The ways in which the tests on a GPU run the engine: tiers, graphs or not, kernels or numpy."""

from typing import Any

FIXED_RATE = {"name": "k4v2", "sink_tokens": 0, "guard": False}
BLOCK = 25_856  # bytes that its codes of 32 tokens of the test model take in a tier
WAYS: dict[str, dict[str, Any]] = {
    "host, eager": {"eager": True, "cold_store": {"kind": "host", "max_bytes": "64MiB"}},
    "device, graphs": {"eager": False, "cold_store": {"kind": "device", "max_bytes": "64MiB"}},
    "device and host": {
        "cold_store": {"kind": "device", "max_bytes": 60 * BLOCK, "host_bytes": "64MiB"},
        "codec": FIXED_RATE,
    },
    "numpy": {"backend": "numpy", "cold_store": {"kind": "host", "max_bytes": "64MiB"}},
}
