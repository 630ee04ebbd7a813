#!lua flags=allow-oom
-- Remove a session as one; its blocks go unless another session uses them.
-- KEYS: session, chain, sessions, blocks, users, tips.
-- ARGV: id; the owner it must have, or empty; the latest time at which it may be to expire, or empty.
-- Returns whether it was removed, and block keys to delete.
-- A server whose memory is full must take what makes room in it.
local expires = redis.call('ZSCORE', KEYS[3], ARGV[1])
if ARGV[2] ~= '' and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2] then return {0, {}} end
if ARGV[3] ~= '' and expires and tonumber(expires) > tonumber(ARGV[3]) then return {0, {}} end
local chain, freed = redis.call('LRANGE', KEYS[2], 0, -1), {}
for _, key in ipairs(chain) do
    if redis.call('HINCRBY', KEYS[5], key, -1) <= 0 then
        redis.call('HDEL', KEYS[5], key)
        redis.call('ZREM', KEYS[4], key)
        freed[#freed + 1] = key
    end
end
if #chain > 0 and redis.call('HGET', KEYS[6], chain[#chain]) == ARGV[1] then redis.call('HDEL', KEYS[6], chain[#chain]) end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
return {1, freed}
