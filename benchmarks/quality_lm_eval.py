"""Run unchanged tasks of lm-eval on a server with Manthan, in two passes: prompts are computed, and then restored.

lm-eval (the lm-evaluation-harness of EleutherAI) sends the requests. Each prompt has a session id of its own, so that
its second request restores the first request's blocks. Between the passes sessions go cold (Manthan stores all their
full blocks compressed), and vLLM's prefix cache is emptied. Only tasks that generate text are of use: for
log-probabilities of a prompt, vLLM computes the whole prompt again.
"""

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import write_report
from manthan.benchmarks.quality_settings import QualityError
from manthan.benchmarks.server import VllmServer, codec_used
from manthan.benchmarks.settle import until_settled

RESTORED = "vllm:external_prefix_cache_hits_total"
PROMPTS = "vllm:prompt_tokens_total"
COMPUTED, RETURNED = "computed", "returned"
IDLE_AFTER_S, STILL_S = 1.0, 10.0


def evaluate(model: str, tasks: str, data: Path | None, codec: str, limit: int, timeout_s: float, out: Path) -> Any:
    """Return a report of both passes.

    Args:
        tasks: names, separated by commas.
        data: Hugging Face cache with the tasks' data, and possibly YAML files of tasks. None: the default cache.
        limit: documents of each task; 0 for all.

    Raises:
        QualityError: lm-eval is not installed, does not know a task, or failed; or `data` is no folder.
        ServerError: The server did not start, or stayed busy.
    """
    if missing := [name for name in ("lm_eval", "tenacity") if find_spec(name) is None]:
        raise QualityError(
            f"--lm-eval needs lm-eval[api], and {missing[0]} is not installed here: `pip install 'lm-eval[api]'`."
        )
    if data is not None and not data.is_dir():
        raise QualityError(f"--lm-eval-data {data} is no folder: name the cache of Hugging Face with the tasks' data.")
    if data is not None:
        os.environ |= {"HF_HOME": str(data.absolute())}
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    class Sessions(LocalCompletionsAPI):  # type: ignore[misc]
        """Client of lm-eval that sends a session id with each prompt."""

        def _create_payload(self, messages: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            body: dict[str, Any] = super()._create_payload(messages, *args, **kwargs)
            return body | {"session_id": hashlib.sha256(repr(messages).encode()).hexdigest()[:16]}

    known = TaskManager(include_path=str(data) if data else None)
    names = [name.strip() for name in tasks.split(",")]
    if unknown := [name for name in names if name not in known.all_tasks]:
        raise QualityError(f"--lm-eval {tasks}: lm-eval knows no task {unknown[0]!r}; `lm-eval ls tasks` lists them.")
    out.mkdir(parents=True, exist_ok=True)
    config = out / "lm-eval.yaml"
    config.write_text(f"codec: {{name: {codec}, guard: false}}\nidle: {{after_s: {IDLE_AFTER_S}, min_tokens: 0}}\n")
    flags = ["--manthan-config", str(config)]
    with VllmServer(model, flags, out / "lm-eval.log", env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_until_ready(timeout_s)
        report: dict[str, Any] = {"benchmark": "lm-eval", "model": model, "tasks": names, "passes": {}}
        for name in (COMPUTED, RETURNED):
            before = server.metrics()
            client = Sessions(model=model, base_url=f"{server.url}/v1/completions", tokenizer_backend=None)
            try:
                found = simple_evaluate(
                    client, tasks=names, task_manager=known, limit=limit or None, bootstrap_iters=0, log_samples=True
                )
            except (OSError, ValueError, AssertionError, ImportError) as error:
                raise QualityError(
                    f"--lm-eval {tasks} failed: {next(iter(str(error).splitlines()), type(error).__name__)}"
                ) from error
            until_settled(server, STILL_S)
            after = server.metrics()
            moved = {series: after.get(series, 0) - before.get(series, 0) for series in (RESTORED, PROMPTS)}
            answers = [
                sample["resps"]
                for samples in found["samples"].values()  # of each subtask, once for each filter of the answers
                for sample in samples
                if sample.get("filter") == samples[0].get("filter")
            ]
            report["passes"][name] = {"results": found["results"], "answers": answers, **moved}
            server.reset_prefix_cache(external=False)
        report["codec"] = codec_used(server.log)
    first, second = (report["passes"][name]["answers"] for name in (COMPUTED, RETURNED))
    report["same_answers"] = [sum(a == b for a, b in zip(first, second, strict=True)), len(first)]
    return report


def show(report: dict[str, Any], out: Path, console: Console) -> None:
    """Write the report, and print a table."""
    path = write_report(report, out)
    table = Table(title=f"lm-eval on {report['model']}", caption=report["codec"], box=SIMPLE)
    for header in ("task", "metric", COMPUTED, RETURNED):
        table.add_column(header, justify="left" if header in ("task", "metric") else "right")
    first, second = (report["passes"][name] for name in (COMPUTED, RETURNED))
    for task, metrics in first["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "stderr" not in metric:
                table.add_row(task, metric, f"{value:.4f}", f"{second['results'][task][metric]:.4f}")
    console.print(table)
    same, count = report["same_answers"]
    console.print(
        f"{same} of {count} answers are the same; {second[RESTORED]:,.0f} of {second[PROMPTS]:,.0f} tokens of prompts "
        f"were restored in the second pass.\n  {path}",
        soft_wrap=True,
    )
