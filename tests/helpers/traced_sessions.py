"""An engine in this process with tracing on, or off: sessions go cold by the clock and for want of room, and return.

Run as a script: on standard input, a job: the collector's endpoint, or null; on standard output, the log and a report.
"""

import json
import os
import sys
import time
from typing import Any

from stepped_engine import SteppedEngine


def prompt(number: int, tokens: int = 320) -> list[int]:
    return [(7 * at + 31 * number) % 190 + 10 for at in range(tokens)]


def headers(number: int) -> dict[str, str]:
    """Of a client's span in a trace of its own."""
    return {"traceparent": f"00-{number:032x}-{number:016x}-01"}


class TracedEngine(SteppedEngine):
    """Requests come with trace headers."""

    def ask_traced(self, tokens: list[int], session: str, trace: int | None) -> None:
        add = self.engine.add_request
        if trace is not None:

            def with_headers(*args: Any, **kwargs: Any) -> Any:
                return add(*args, **kwargs, trace_headers=headers(trace))

            self.engine.add_request = with_headers
        try:
            self.ask(tokens, session, 4)
        finally:
            self.engine.add_request = add


def main() -> None:
    job = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    vllm = {} if job["endpoint"] is None else {"otlp_traces_endpoint": job["endpoint"]}
    manthan = {"min_tokens": 64, "codec": {"guard": False}, **job["manthan"]}
    engine = TracedEngine(72, vllm, **manthan)
    for turn in job["turns"]:
        time.sleep(turn.get("after_s", 0.0))
        engine.ask_traced(prompt(turn["prompt"], turn.get("tokens", 320)), turn["session"], turn["trace"])
    if job["endpoint"] is not None:
        from opentelemetry import trace

        provider: Any = trace.get_tracer_provider()
        provider.force_flush()
    with report:
        json.dump({"found": [each["found"] for each in engine.requests], "traces": _kept(engine)}, report)


def _kept(engine: SteppedEngine) -> int | None:
    """What there still is of requests, None without traces."""
    traces = engine.half.telemetry.traces
    return None if traces is None else len(traces._headers) + len(traces._begun)


if __name__ == "__main__":
    main()
