-- Room for blocks that are about to be written.
-- ARGV: the budget in bytes, seconds that a reservation lasts, then block and the most bytes it may take by turns.
-- Returns the bytes in use, then for each block: 0 granted, 1 stored already, 2 no room; and, of one that is stored, its
-- bytes, or 0. Books that something is missing of grant nothing, until they are collected.
local GRANTED, STORED, FULL = 0, 1, 2
local budget, lasts = tonumber(ARGV[1]), tonumber(ARGV[2])
local is_complete = complete()
if is_complete and not used() then redis.call('HSET', INFO, 'used_bytes', 0) end
local total = used() or 0

local function reserve(block, nbytes)
    local expires, had = redis.call('ZSCORE', BLOCKS, block), tonumber(redis.call('HGET', SIZES, block)) or 0
    if expires and tonumber(expires) > now + 10 and had > 0 then return STORED, had end
    local more = math.max(nbytes - had, 0)
    if not is_complete or (more > 0 and total + more > budget) then return FULL, 0 end
    redis.call('ZADD', PENDING, now + lasts, block) -- first: it is what a full memory refuses
    redis.call('ZREM', BLOCKS, block) -- what is about to expire is written again
    book(block, had + more)
    total = total + more
    return GRANTED, 0
end

local answer = {0}
for i = 3, #ARGV, 2 do
    answer[#answer + 1], answer[#answer + 2] = reserve(ARGV[i], tonumber(ARGV[i + 1]))
end
answer[1] = total
keep({INFO, PENDING, SIZES}, now + lasts + 3600, now + lasts + 3600)
return answer
