"""Keys that are no more. Start-up says one sentence for each that is still set."""

REMOVED = {
    "codec.calibrate": "a profile comes from `manthan calibrate MODEL`",
    "codec.window_tokens": "a session's last tokens are in vLLM's pool, exact, until it needs their room",
    "log": "for logs as JSON, see vLLM's VLLM_LOGGING_CONFIG_PATH",
    "log.format": "for logs as JSON, see vLLM's VLLM_LOGGING_CONFIG_PATH",
    "redis.connections": "each process has as many connections as threads that use them",
    "redis.password_env": "the password is read from MANTHAN_REDIS_PASSWORD",
    "redis.password_file": "the password is read from MANTHAN_REDIS_PASSWORD",
    "redis.required": "an engine serves without Redis until it answers",
    "redis.tls_ca_file": "name it in redis.url, as in rediss://HOST?ssl_ca_certs=PATH",
    "redis.tls_cert_file": "name it in redis.url, as in rediss://HOST?ssl_certfile=PATH",
    "redis.tls_key_file": "name it in redis.url, as in rediss://HOST?ssl_keyfile=PATH",
    "redis.username": "name the user in redis.url, as in redis://USER@HOST",
}
