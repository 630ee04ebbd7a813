"""Removed and renamed keys, for which start-up logs a warning."""

REMOVED = {
    "api.page": "the live page is there where the API is, see api.enabled",
    "codec.calibrate": "a profile comes from `manthan calibrate MODEL`",
    "codec.window_tokens": "a session's last tokens are in vLLM's pool, exact, until it needs their room",
    "cold_store.tiers": "set tiers.host_bytes and tiers.disk_bytes for tiers in front of that of tiers.kind",
    "disk.sync_s": "writes are synced to the disk within 5 s",
    "disk.timeout_s": "a restore waits for the disk for 10 s",
    "encode_threads": "one thread encodes, or four where the CPU encodes for a GPU",
    "hot_pool": "when under a tenth of the KV pool is free of unsaved blocks, sessions are evicted until a quarter is",
    "hot_pool.high_watermark": "it is 0.25",
    "hot_pool.low_watermark": "it is 0.1",
    "log": "for logs as JSON, see vLLM's VLLM_LOGGING_CONFIG_PATH",
    "log.format": "for logs as JSON, see vLLM's VLLM_LOGGING_CONFIG_PATH",
    "prefetch": "sessions that are expected are always prefetched, 2 s before or half of idle.after_s",
    "prefetch.enabled": "sessions that are expected are always prefetched",
    "prefetch.lead_s": "sessions are prefetched 2 s before they are expected, or half of idle.after_s",
    "quotas.default_share": 'write the share as that of the tenant "*" in tenants.shares',
    "quotas.shared_heads_share": "heads that sessions share may take a quarter of the cold store",
    "redis.connections": "each process has as many connections as threads that use them",
    "redis.password_env": "the password is read from MANTHAN_REDIS_PASSWORD",
    "redis.password_file": "the password is read from MANTHAN_REDIS_PASSWORD",
    "redis.required": "an engine serves without Redis until Redis answers",
    "redis.timeout_s": "name it in tiers.redis.url, as in redis://HOST?socket_timeout=2",
    "redis.tls_ca_file": "name it in tiers.redis.url, as in rediss://HOST?ssl_ca_certs=PATH",
    "redis.tls_cert_file": "name it in tiers.redis.url, as in rediss://HOST?ssl_certfile=PATH",
    "redis.tls_key_file": "name it in tiers.redis.url, as in rediss://HOST?ssl_keyfile=PATH",
    "redis.username": "name the user in tiers.redis.url, as in redis://USER@HOST",
    "sweep_interval_s": "idle sessions are looked for four times in idle.after_s, and twice a second at least",
}

RENAMED = {
    "idle_after_s": "idle.after_s",
    "min_tokens": "idle.min_tokens",
    "backend": "codec.backend",
    "cold_store": "tiers.kind",
    "cold_store.kind": "tiers.kind",
    "cold_store.max_bytes": "tiers.max_bytes",
    "cold_store.host_bytes": "tiers.host_bytes",
    "cold_store.disk_bytes": "tiers.disk_bytes",
    "cold_store.encryption": "sealing.key_file",
    "cold_store.encryption.key_file": "sealing.key_file",
    "disk": "tiers.disk.path",
    "disk.path": "tiers.disk.path",
    "redis": "tiers.redis.url",
    "redis.url": "tiers.redis.url",
    "redis.prefix": "tiers.redis.prefix",
    "redis.ttl_s": "tiers.redis.ttl_s",
    "quotas.pinned_share": "tiers.pinned_share",
    "quotas.tenants": "tenants.shares",
    "quotas.header": "tenants.header",
    "quotas.isolate": "tenants.isolate",
}
"""New names of keys by old names. A value under the old name still takes effect."""

KINDS = {
    "tiered": "name the last tier, disk or redis, and the bytes of those in front of it, tiers.host_bytes and "
    "tiers.disk_bytes",
}
"""Removed values of tiers.kind, and what to set instead. Start-up ends with this sentence as an error."""
