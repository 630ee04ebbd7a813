"""The ways in which the tests on a GPU run the engine: tiers, graphs or not, kernels or numpy."""

from typing import Any

BLOCK = 25_760  # bytes of an encoded block of 32 tokens of the test model
WAYS: dict[str, dict[str, Any]] = {
    "host, eager": {"eager": True, "cold_store": {"kind": "host", "max_bytes": "64MiB"}},
    "device, graphs": {"eager": False, "cold_store": {"kind": "device", "max_bytes": "64MiB"}},
    "device and host": {"cold_store": {"kind": "device", "max_bytes": 60 * BLOCK, "host_bytes": "64MiB"}},
    "numpy": {"backend": "numpy", "cold_store": {"kind": "host", "max_bytes": "64MiB"}},
}
