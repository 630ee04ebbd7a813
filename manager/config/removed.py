"""Keys that are no more. Start-up says one sentence for each that is still set."""

REMOVED = {
    "codec.calibrate": "a profile comes from `manthan calibrate MODEL`",
    "log": "for logs as JSON, see vLLM's VLLM_LOGGING_CONFIG_PATH",
    "log.format": "for logs as JSON, see vLLM's VLLM_LOGGING_CONFIG_PATH",
}
