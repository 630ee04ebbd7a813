"""Wait until a server has nothing more to do: no request runs, and Manthan encodes nothing."""

import time

from manthan.benchmarks.endpoint import Endpoint

SETTLE_S = 120.0
POLL_S = 0.2
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
ENCODED = ("vllm:manthan_encodings_total", "vllm:manthan_encoded_blocks_total")


def until_settled(endpoint: Endpoint, *, all_cold: bool) -> None:
    """Return when no request runs, and nothing was encoded for POLL_S.

    Args:
        all_cold: True to wait until every session is cold, too.

    Raises:
        ServerError: after SETTLE_S.
    """
    before, deadline = -1.0, time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        samples = endpoint.samples()
        busy = sum(value for name, _, value in samples if name in RUNNING)
        sessions = [(has["state"], value) for name, has, value in samples if name == "vllm:manthan_sessions"]
        busy += sum(value for state, value in sessions if all_cold and state != "cold")
        encoded = sum(value for name, _, value in samples if name in ENCODED)
        if not busy and encoded == before:
            return
        before = encoded
        time.sleep(POLL_S)
    raise endpoint.error(f"The server still had sessions to compress after {SETTLE_S:.0f} s.")
