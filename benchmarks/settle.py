"""Wait until a server has nothing more to do: no request runs, and Manthan encodes nothing."""

import time

from manthan.benchmarks.endpoint import Endpoint

SETTLE_S = 120.0
POLL_S = 0.2


def until_settled(endpoint: Endpoint, *, all_cold: bool) -> None:
    """all_cold: until no session is hot either. Raises ServerError after SETTLE_S."""
    busy = ("hot", "idle", "evicting") if all_cold else ("evicting",)
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        samples = endpoint.samples()
        running = sum(
            value for name, _, value in samples if name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
        )
        sessions = sum(
            value for name, has, value in samples if name == "vllm:manthan_sessions" and has["state"] in busy
        )
        if not running and not sessions:
            return
        time.sleep(POLL_S)
    raise endpoint.error(f"The server still had sessions to compress after {SETTLE_S:.0f} s.")
