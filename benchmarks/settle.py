"""Wait until a server has nothing more to do: no request runs, and Manthan compresses no KV blocks."""

import time

from manthan.benchmarks.endpoint import Endpoint

SETTLE_S = 120.0
POLL_S = 0.2
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
ENCODED = ("vllm:manthan_encodings_total", "vllm:manthan_encoded_blocks_total")


def until_settled(endpoint: Endpoint, still_s: float) -> None:
    """Return when no request runs or waits, no block was compressed for POLL_S, and all sessions are cold (saved).

    Args:
        still_s: Seconds without a change after which to return although some sessions are not cold. A full tier (store)
            cannot take all blocks of the pool, so that some sessions are never saved.

    Raises:
        ServerError: The server has not settled after SETTLE_S.
    """
    before, since = None, time.monotonic()
    deadline = since + SETTLE_S
    while time.monotonic() < deadline:
        samples = endpoint.samples()
        running = sum(value for name, _, value in samples if name in RUNNING)
        states = [(has["state"], value) for name, has, value in samples if name == "vllm:manthan_sessions"]
        warm = sum(value for state, value in states if state != "cold")
        found = running, warm, sum(value for name, _, value in samples if name in ENCODED)
        if found != before:
            before, since = found, time.monotonic()
        elif not running and (not warm or time.monotonic() - since >= still_s):
            return
        time.sleep(POLL_S)
    raise endpoint.error(f"The server still had something to do after {SETTLE_S:.0f} s.")
