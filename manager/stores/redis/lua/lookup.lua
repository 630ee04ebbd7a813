-- What is stored of these blocks.
-- ARGV: blocks. Returns the bytes of each, 0 for one that is not.
local expires = redis.call('ZMSCORE', BLOCKS, unpack(ARGV))
local sizes, found = redis.call('HMGET', SIZES, unpack(ARGV)), {}
for i = 1, #ARGV do
    local is_stored = sizes[i] and expires[i] and tonumber(expires[i]) > now
    found[i] = is_stored and tonumber(sizes[i]) or 0
end
return found
