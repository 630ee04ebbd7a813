-- Which of these blocks are stored, from the first on without a gap.
-- ARGV: blocks. Returns their bytes.
local expires = redis.call('ZMSCORE', BLOCKS, unpack(ARGV))
local sizes, found = redis.call('HMGET', SIZES, unpack(ARGV)), {}
for i = 1, #ARGV do
    if not sizes[i] or not expires[i] or tonumber(expires[i]) <= now then break end
    found[i] = tonumber(sizes[i])
end
return found
