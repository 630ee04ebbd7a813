"""The offline class `LLM`, with the engine in the caller's own process: swept when it is stepped, never by itself."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"


@pytest.mark.slow
def test_llm_in_one_process(table, tmp_path: Path) -> None:
    (first, right), (other, _) = table(1).question(1), table(2).question(1)
    name, right_too = list(table(1).values.items())[2]
    second = f"\nassert {name} == "
    script = textwrap.dedent(f"""
        import os, time
        os.environ |= {{"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
        from vllm import LLM, SamplingParams
        from manthan.vllm_hooks import kv_transfer_config

        policy = {{"name": "returns", "prior": 60}}
        manthan = kv_transfer_config(policy=policy, idle_after_s=0.2, min_tokens=64)
        llm = LLM({str(MODEL)!r}, block_size=32, num_gpu_blocks_override=131, max_model_len=2048,
                  enforce_eager=True, kv_transfer_config=manthan)

        def ask(prompt):
            output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
            print("ANSWER", output.outputs[0].text, output.num_cached_tokens)
            return output.prompt_token_ids + list(output.outputs[0].token_ids)

        manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.manager
        print("POLICY", *manager.table.hot._make_policy().options)
        said = ask({first!r})
        time.sleep(0.5)
        session = next(iter(manager.table.by_id.values()))
        print("BETWEEN", session.state)
        ask({other!r})
        hint = lambda **hints: SamplingParams(max_tokens=1, extra_args={{"kv_transfer_params": {{"manthan": hints}}}})
        try:
            llm.generate("x", hint(pinn=True), use_tqdm=False)
        except ValueError as error:
            print("REFUSED", error)
        output = llm.generate({other!r}, hint(pin=True, tenant="acme"), use_tqdm=False)[0]
        told = output.kv_transfer_params["manthan"]
        print("TOLD", told["pinned"], told["refused"], manager.table.by_id["acme/" + told["session_id"]].pinned)
        llm.generate("y" * 100, hint(tenant="acme"), use_tqdm=False)
        print("TENANTS", *sorted({{session.tenant for session in manager.table.by_id.values()}}))
        while session.state != "cold":  # what the guard found, and what was encoded, is reported with later steps
            llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
        print("AFTER", session.state)
        more = llm.get_tokenizer().encode({second!r}, add_special_tokens=False)
        ask({{"prompt_token_ids": said + more}})
    """)
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    words = ("POLICY", "ANSWER", "BETWEEN", "REFUSED", "TOLD", "TENANTS", "AFTER")
    said = [line.split(" ") for line in result.stdout.splitlines() if line.startswith(words)]
    assert "('prior', 60.0)" in " ".join(said.pop(0))
    assert [line[0] for line in said] == [*words[1:3], "ANSWER", *words[3:], "ANSWER"]
    assert said[0] == ["ANSWER", right, "0"]
    assert said[1] == ["BETWEEN", "idle"]
    refusal = " ".join(said[3][1:])
    assert refusal == "kv_transfer_params.manthan: unknown hint 'pinn' (did you mean 'pin'?)"
    assert said[4] == ["TOLD", "True", "None", "True"]
    assert said[5] == ["TENANTS", "", "acme"]
    assert said[6] == ["AFTER", "cold"]
    assert said[7][1] == right_too
    assert int(said[7][2]) >= 16 * 32
