#!lua flags=allow-oom
-- Blocks that an engine does not want any more, or that nobody can read.
-- ARGV: 1 to remove them whoever uses them, or 0; then blocks.
-- Returns the blocks to delete.
local freed = {}
for i = 2, #ARGV do
    if ARGV[1] == '1' or redis.call('HEXISTS', USERS, ARGV[i]) == 0 then
        remove(ARGV[i])
        freed[#freed + 1] = ARGV[i]
    end
end
return freed
