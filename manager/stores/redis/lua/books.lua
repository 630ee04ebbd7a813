-- What every script begins with.
-- KEYS: the books of the namespace; then, in a script about one session, its record and its chain.
local INFO, SESSIONS, BLOCKS, PENDING, SIZES, USERS, TIPS, SESSION, CHAIN = unpack(KEYS)
local now = tonumber(redis.call('TIME')[1])

-- Bytes of all blocks and reservations; nil if nobody has counted, or the server has evicted it.
local function used()
    return tonumber(redis.call('HGET', INFO, 'used_bytes'))
end

-- Whether nothing is missing of the books that the count depends on. Servers evict whole keys.
local function complete()
    local sizes, total = redis.call('HLEN', SIZES), used() or 0
    local is_counted = sizes > 0 and total > 0 or sizes == 0 and total == 0
    return is_counted and redis.call('ZCARD', BLOCKS) + redis.call('ZCARD', PENDING) == sizes
end

-- Book so many bytes for a block from now on; 0 for none.
local function book(block, nbytes)
    local had = tonumber(redis.call('HGET', SIZES, block)) or 0
    if nbytes == had then return end
    if nbytes > 0 then redis.call('HSET', SIZES, block, nbytes) else redis.call('HDEL', SIZES, block) end
    if used() then redis.call('HINCRBY', INFO, 'used_bytes', nbytes - had) end
end

-- Take a block out of the books.
local function remove(block)
    redis.call('ZREM', BLOCKS, block)
    redis.call('ZREM', PENDING, block)
    book(block, 0)
end

-- A session does not hold a block any more. Returns whether it is to be deleted: nobody holds it, and nobody writes it.
local function let_go(block)
    if redis.call('HINCRBY', USERS, block, -1) > 0 then return false end
    redis.call('HDEL', USERS, block)
    if redis.call('ZSCORE', PENDING, block) then return false end
    remove(block)
    return true
end

-- Let books live until then, at least, if they end before `least`.
local function keep(books, least, till)
    for _, name in ipairs(books) do
        if redis.call('TTL', name) < least - now then redis.call('EXPIREAT', name, till) end
    end
end
