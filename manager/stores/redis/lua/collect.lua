#!lua flags=allow-oom
-- What has expired, and what an engine that died has left half written; at most so many of each.
-- Books that the server has evicted a part of are made up again from what is left: a block without a size is none.
-- ARGV: how many.
-- Returns the time, sessions to forget, blocks to delete, the bytes in use, and whether there may be more.
local limit = tonumber(ARGV[1])

local function mend()
    local sizes, total, lost = {}, 0, {}
    local flat = redis.call('HGETALL', SIZES)
    for i = 1, #flat, 2 do sizes[flat[i]] = tonumber(flat[i + 1]) end
    for _, books in ipairs({BLOCKS, PENDING}) do
        for _, block in ipairs(redis.call('ZRANGE', books, 0, -1)) do
            if sizes[block] then
                total = total + sizes[block]
                sizes[block] = nil
            else
                redis.call('ZREM', books, block)
                lost[#lost + 1] = block
            end
        end
    end
    for block in pairs(sizes) do
        redis.call('HDEL', SIZES, block)
        lost[#lost + 1] = block
    end
    redis.call('HSET', INFO, 'used_bytes', total)
    keep({INFO}, now + 3600, now + 3600)
    return lost
end

local gone = complete() and {} or mend()
local sessions = redis.call('ZRANGEBYSCORE', SESSIONS, '-inf', now, 'LIMIT', 0, limit)
local blocks = redis.call('ZRANGEBYSCORE', BLOCKS, '-inf', now, 'LIMIT', 0, limit)
for _, block in ipairs(blocks) do
    remove(block)
    redis.call('HDEL', USERS, block)
end
local orphans = redis.call('ZRANGEBYSCORE', PENDING, '-inf', now, 'LIMIT', 0, limit)
for _, block in ipairs(orphans) do
    remove(block)
    gone[#gone + 1] = block
end
local more = #sessions > 0 or #blocks == limit or #orphans == limit
return {now, sessions, gone, used() or 0, more and 1 or 0}
