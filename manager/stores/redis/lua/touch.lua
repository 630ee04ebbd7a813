#!lua flags=allow-oom
-- A session was used, and nothing of its chain has changed: its record and its expiry are written, not its blocks,
-- which live a quarter of the time to live longer.
-- ARGV: id, owner, seconds to live, seconds that bookkeeping outlives it, blocks in the chain, field and value by turns.
-- Returns whether that was enough: not if the session is not as this engine has left it.
local id, owner, ttl, slack = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local had = redis.call('HMGET', SESSION, 'owner', 'created')
if had[1] ~= owner or redis.call('LLEN', CHAIN) ~= tonumber(ARGV[5]) then return 0 end
local expires = now + ttl
redis.call('HSET', SESSION, unpack(ARGV, 6))
redis.call('HSET', SESSION, 'created', had[2])
redis.call('ZADD', SESSIONS, expires, id)
redis.call('EXPIREAT', SESSION, expires)
redis.call('EXPIREAT', CHAIN, expires + slack)
keep({INFO, SESSIONS, BLOCKS, PENDING, SIZES, USERS, TIPS}, expires + slack, expires + 2 * slack)
return 1
