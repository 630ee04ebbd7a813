"""Only package that imports vLLM: the plugin, the flags, and the KV connector in two halves.

From Python:

    from manthan.vllm_hooks import kv_transfer_config
    llm = LLM(model, kv_transfer_config=kv_transfer_config(policy="lru", idle=5))
"""

from manthan.vllm_hooks.transfer_config import kv_transfer_config

__all__ = ["kv_transfer_config"]
