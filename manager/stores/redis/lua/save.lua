#!lua flags=allow-oom
-- Write a session as one: its record, its chain, and what it means for its blocks.
-- ARGV: id, owner, seconds to live, seconds that bookkeeping outlives it, number of fields, field and value by turns,
--       then what other groups have for it, and the chain behind that: block and its bytes by turns, 0 if its codes are
--       not stored.
-- Returns a verdict, the time at which the session expires, blocks to delete, blocks that are not stored after all, and
-- sessions without a name that this one goes on from.
-- What was reserved for a block and not needed is free from now on. One that has more bytes than are booked for it would
-- break the budget: it is not stored after all.
-- A server whose memory is full must take it: the blocks are there already, and what makes room is said afterwards.
local id, owner, ttl, slack, fields = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local first = 6 + 2 * fields
local expires = now + ttl
local blocks_expire = expires + math.floor(ttl / 4)

local old = redis.call('LRANGE', CHAIN, 0, -1)
local chain, sizes = {}, {}
for i = first, #ARGV, 2 do
    chain[#chain + 1], sizes[#sizes + 1] = ARGV[i], tonumber(ARGV[i + 1])
end

local was, is = {}, {}
for _, block in ipairs(old) do was[block] = true end
for _, block in ipairs(chain) do is[block] = true end

local had = redis.call('HMGET', SESSION, 'owner', 'created')
if had[1] and had[1] ~= owner and #old > 0 and not is[old[#old]] then
    -- Another engine has it. If it has only gone on from here, ours is out of date, but in use.
    if #chain > 0 and not was[chain[#chain]] then
        return {'conflict', 0, {}, {}, {}}
    end
    redis.call('ZADD', SESSIONS, 'XX', 'GT', expires, id)
    redis.call('EXPIREAT', SESSION, expires, 'GT')
    redis.call('EXPIREAT', CHAIN, expires + slack, 'GT')
    return {'stale', expires, {}, {}, {}}
end

-- Whether the block is stored, as this engine says.
local function commit(block, nbytes)
    local booked = tonumber(redis.call('HGET', SIZES, block)) or 0
    local was_pending = redis.call('ZREM', PENDING, block) == 1
    if nbytes > booked or not (was_pending or redis.call('ZSCORE', BLOCKS, block)) then return false end
    redis.call('ZADD', BLOCKS, 'GT', blocks_expire, block)
    if was_pending then book(block, nbytes) end
    return true
end

local lost, absorbed, freed = {}, {}, {}
for i, block in ipairs(chain) do
    if not was[block] then redis.call('HINCRBY', USERS, block, 1) end
    if sizes[i] > 0 and not commit(block, sizes[i]) then
        remove(block)
        lost[#lost + 1] = block
        freed[#freed + 1] = block
    end
    local tip = redis.call('HGET', TIPS, block)
    if tip and tip ~= id and string.sub(tip, 1, 10) == 'anonymous-' then absorbed[#absorbed + 1] = tip end
end
for _, block in ipairs(old) do
    if not is[block] and let_go(block) then freed[#freed + 1] = block end
end

if #old > 0 and redis.call('HGET', TIPS, old[#old]) == id then redis.call('HDEL', TIPS, old[#old]) end
if #chain > 0 then redis.call('HSETNX', TIPS, chain[#chain], id) end
redis.call('DEL', SESSION, CHAIN)
for start = 1, #chain, 1000 do
    redis.call('RPUSH', CHAIN, unpack(chain, start, math.min(start + 999, #chain)))
end
redis.call('HSET', SESSION, unpack(ARGV, 6, first - 1))
if had[2] then redis.call('HSET', SESSION, 'created', had[2]) end
redis.call('ZADD', SESSIONS, expires, id)
redis.call('EXPIREAT', SESSION, expires)
redis.call('EXPIREAT', CHAIN, expires + slack)
keep({INFO, SESSIONS, BLOCKS, PENDING, SIZES, USERS, TIPS}, expires + slack, expires + 2 * slack)
return {'saved', expires, freed, lost, absorbed}
