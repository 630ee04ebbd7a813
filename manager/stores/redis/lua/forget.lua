#!lua flags=allow-oom
-- Remove a session as one; its blocks go unless another session uses them.
-- ARGV: id; the owner it must have, or empty; the latest time at which it may be to expire, or empty.
-- Returns whether it was removed, and blocks to delete.
-- A server whose memory is full must take what makes room in it.
local id, owner, latest = ARGV[1], ARGV[2], ARGV[3]
local expires = redis.call('ZSCORE', SESSIONS, id)
if owner ~= '' and redis.call('HGET', SESSION, 'owner') ~= owner then return {0, {}} end
if latest ~= '' and expires and tonumber(expires) > tonumber(latest) then return {0, {}} end
local chain, freed = redis.call('LRANGE', CHAIN, 0, -1), {}
for _, block in ipairs(chain) do
    if let_go(block) then freed[#freed + 1] = block end
end
if #chain > 0 and redis.call('HGET', TIPS, chain[#chain]) == id then redis.call('HDEL', TIPS, chain[#chain]) end
redis.call('ZREM', SESSIONS, id)
redis.call('DEL', SESSION, CHAIN)
return {1, freed}
