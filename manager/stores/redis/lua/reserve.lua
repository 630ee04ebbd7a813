-- Room for blocks that are about to be written.
-- KEYS: blocks, pending. ARGV: capacity in blocks, seconds that a reservation lasts, then block keys.
-- Returns the blocks in use, then for each key: 0 granted, 1 stored already, 2 no room.
local now = tonumber(redis.call('TIME')[1])
local lasts = tonumber(ARGV[2])
local used = redis.call('ZCOUNT', KEYS[1], '(' .. now, '+inf') + redis.call('ZCARD', KEYS[2])
local answer = {used}
for i = 3, #ARGV do
    local expires = redis.call('ZSCORE', KEYS[1], ARGV[i])
    if expires and tonumber(expires) > now + 10 then
        answer[#answer + 1] = 1
    elseif redis.call('ZSCORE', KEYS[2], ARGV[i]) or used < tonumber(ARGV[1]) then
        -- what is stored but about to expire is written again, and counted twice for a moment
        used = used + redis.call('ZADD', KEYS[2], now + lasts, ARGV[i])
        answer[#answer + 1] = 0
    else
        answer[#answer + 1] = 2
    end
end
answer[1] = used
redis.call('EXPIREAT', KEYS[2], now + lasts + 3600)
return answer
