-- Count again, and change nothing.
-- Returns the bytes in use as counted, or -1 if nobody has; what the sizes add up to; and the first block of each kind
-- that cannot be: stored or pending without a size, a size that is no such block's, stored and pending at once.
local sum, sizes, found = 0, {}, {'', '', ''}
local flat = redis.call('HGETALL', SIZES)
for i = 1, #flat, 2 do
    sizes[flat[i]] = tonumber(flat[i + 1])
    sum = sum + sizes[flat[i]]
end
local seen = {}
for _, books in ipairs({BLOCKS, PENDING}) do
    for _, block in ipairs(redis.call('ZRANGE', books, 0, -1)) do
        if not sizes[block] and found[1] == '' then found[1] = block end
        if seen[block] and found[3] == '' then found[3] = block end
        seen[block] = true
    end
end
for i = 1, #flat, 2 do
    if not seen[flat[i]] and found[2] == '' then found[2] = flat[i] end
end
return {used() or -1, sum, unpack(found)}
