"""An engine in this process with tracing on: alice's session goes cold by the clock while bob's runs, and returns.

Run as a script: on standard input, the collector's endpoint; on standard output, the log, and how much is kept.
"""

import json
import sys
import time
from functools import partial
from typing import Any

from opentelemetry import trace
from stepped_engine import SteppedEngine


def ask(engine: SteppedEngine, number: int, session: str, prompt: int, tokens: int = 320) -> None:
    """Ask with the headers of a client's span in a trace of this number."""
    headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
    add = engine.engine.add_request
    engine.engine.add_request = partial(add, trace_headers=headers)
    engine.ask([(7 * at + 31 * prompt) % 190 + 10 for at in range(tokens)], session, 4)
    engine.engine.add_request = add


def main() -> None:
    vllm = {"otlp_traces_endpoint": json.load(sys.stdin)["endpoint"]}
    engine = SteppedEngine(72, vllm, idle={"after_s": 0.2, "min_tokens": 64}, codec={"guard": False})
    ask(engine, 1, "alice", 1)
    time.sleep(0.4)
    ask(engine, 2, "bob", 2)
    assert engine.half.pool._pool.reset_prefix_cache()
    ask(engine, 3, "alice", 1, tokens=360)
    provider: Any = trace.get_tracer_provider()
    provider.force_flush()
    traces = engine.half.telemetry.traces
    print(f"kept: {len(traces._headers) + len(traces._begun)}", end="")


if __name__ == "__main__":
    main()
