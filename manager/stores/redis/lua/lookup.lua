-- How many of these blocks are stored, from the first on without a gap.
-- KEYS: blocks. ARGV: block keys.
local now = tonumber(redis.call('TIME')[1])
for i, expires in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(ARGV))) do
    if not expires or tonumber(expires) <= now then return i - 1 end
end
return #ARGV
