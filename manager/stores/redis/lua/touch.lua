#!lua flags=allow-oom
-- A session was used, and nothing of its chain has changed: its record and its expiry are written, not its blocks,
-- which live a quarter of the time to live longer.
-- KEYS: session, chain, sessions, then the namespace's other bookkeeping.
-- ARGV: id, owner, seconds to live, seconds that bookkeeping outlives it, blocks in the chain, field and value by turns.
-- Returns whether that was enough: not if the session is not as this engine has left it.
local id, owner, ttl, slack = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local had = redis.call('HMGET', KEYS[1], 'owner', 'created')
if had[1] ~= owner or redis.call('LLEN', KEYS[2]) ~= tonumber(ARGV[5]) then return 0 end
local expires = tonumber(redis.call('TIME')[1]) + ttl
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('HSET', KEYS[1], 'created', had[2])
redis.call('ZADD', KEYS[3], expires, id)
redis.call('EXPIREAT', KEYS[1], expires)
redis.call('EXPIREAT', KEYS[2], expires + slack)
for i = 3, #KEYS do
    if redis.call('TTL', KEYS[i]) < ttl + slack then redis.call('EXPIREAT', KEYS[i], expires + 2 * slack) end
end
return 1
