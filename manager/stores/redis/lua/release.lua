-- Blocks that an engine does not want any more, or that nobody can read.
-- KEYS: blocks, pending, users. ARGV: 1 to remove them whoever uses them, or 0; then block keys.
-- Returns the block keys to delete.
local freed = {}
for i = 2, #ARGV do
    if ARGV[1] == '1' or redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then
        redis.call('ZREM', KEYS[1], ARGV[i])
        redis.call('ZREM', KEYS[2], ARGV[i])
        freed[#freed + 1] = ARGV[i]
    end
end
return freed
