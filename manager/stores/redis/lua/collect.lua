-- What has expired, and what an engine that died has left half written; at most so many of each.
-- KEYS: sessions, blocks, pending, users. ARGV: how many.
-- Returns the time, sessions to forget, block keys to delete, and the blocks in use.
local now = tonumber(redis.call('TIME')[1])
local sessions = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])) do
    redis.call('ZREM', KEYS[2], key)
    redis.call('HDEL', KEYS[4], key)
end
local orphans = {}
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, ARGV[1])) do
    redis.call('ZREM', KEYS[3], key)
    if not redis.call('ZSCORE', KEYS[2], key) then orphans[#orphans + 1] = key end
end
local used = redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[3])
return {now, sessions, orphans, used}
