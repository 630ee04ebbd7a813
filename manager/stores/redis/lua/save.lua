#!lua flags=allow-oom
-- Write a session as one: its record, its chain, and what it means for its blocks.
-- KEYS: session, chain, sessions, blocks, pending, users, tips, info.
-- ARGV: id, owner, seconds to live, seconds that bookkeeping outlives it, number of fields, field and value by turns,
--       then the chain: block keys, each with + before it if its codes are stored, or - if not.
-- Returns a verdict, the time at which the session expires, block keys to delete, block keys that are not stored after
-- all, and sessions without a name that this one goes on from.
-- A server whose memory is full must take it: the blocks are there already, and what makes room is said afterwards.
local id, owner, ttl, slack, fields = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local first = 6 + 2 * fields
local now = tonumber(redis.call('TIME')[1])
local expires = now + ttl
local blocks_expire = expires + math.floor(ttl / 4)

local old = redis.call('LRANGE', KEYS[2], 0, -1)
local chain, stored = {}, {}
for i = first, #ARGV do
    chain[#chain + 1] = string.sub(ARGV[i], 2)
    stored[#stored + 1] = string.sub(ARGV[i], 1, 1) == '+'
end

local had = redis.call('HMGET', KEYS[1], 'owner', 'created')
if had[1] and had[1] ~= owner and #old > 0 and chain[#old] ~= old[#old] then
    -- Another engine has it. If it has only gone on from here, ours is out of date, but in use.
    if #chain > 0 and old[#chain] ~= chain[#chain] then
        return {'conflict', 0, {}, {}, {}}
    end
    redis.call('ZADD', KEYS[3], 'XX', 'GT', expires, id)
    redis.call('EXPIREAT', KEYS[1], expires, 'GT')
    redis.call('EXPIREAT', KEYS[2], expires + slack, 'GT')
    return {'stale', expires, {}, {}, {}}
end

local was, is = {}, {}
for _, key in ipairs(old) do was[key] = true end
local lost, absorbed = {}, {}
for i, key in ipairs(chain) do
    is[key] = true
    if not was[key] then redis.call('HINCRBY', KEYS[6], key, 1) end
    if stored[i] then
        if redis.call('ZREM', KEYS[5], key) == 1 then
            redis.call('ZADD', KEYS[4], 'GT', blocks_expire, key)
        elseif redis.call('ZSCORE', KEYS[4], key) then
            redis.call('ZADD', KEYS[4], 'XX', 'GT', blocks_expire, key)
        else
            lost[#lost + 1] = key
        end
    end
    local tip = redis.call('HGET', KEYS[7], key)
    if tip and tip ~= id and string.sub(tip, 1, 10) == 'anonymous-' then absorbed[#absorbed + 1] = tip end
end
local freed = {}
for _, key in ipairs(old) do
    if not is[key] and redis.call('HINCRBY', KEYS[6], key, -1) <= 0 then
        redis.call('HDEL', KEYS[6], key)
        redis.call('ZREM', KEYS[4], key)
        freed[#freed + 1] = key
    end
end

if #old > 0 and redis.call('HGET', KEYS[7], old[#old]) == id then redis.call('HDEL', KEYS[7], old[#old]) end
if #chain > 0 then redis.call('HSETNX', KEYS[7], chain[#chain], id) end
redis.call('DEL', KEYS[1], KEYS[2])
for start = 1, #chain, 1000 do
    redis.call('RPUSH', KEYS[2], unpack(chain, start, math.min(start + 999, #chain)))
end
redis.call('HSET', KEYS[1], unpack(ARGV, 6, first - 1))
if had[2] then redis.call('HSET', KEYS[1], 'created', had[2]) end
redis.call('ZADD', KEYS[3], expires, id)
redis.call('EXPIREAT', KEYS[1], expires)
redis.call('EXPIREAT', KEYS[2], expires + slack)
for i = 3, 8 do
    if redis.call('TTL', KEYS[i]) < ttl + slack then redis.call('EXPIREAT', KEYS[i], expires + 2 * slack) end
end
return {'saved', expires, freed, lost, absorbed}
