-- The replies to commands that only read, as of one moment; of each: its key, its name, and how many of the words follow
-- the key. A transaction would do, but Redis at its maxmemory refuses even one that only reads.
local read_keys = unpack(keys)
local name_list, size_list, word_list = unpack(args)

local found, at = {}, 1
for place, read_key in ipairs(read_keys) do
  local size = tonumber(size_list[place])
  found[place] = redis.call(name_list[place], read_key, unpack(slice(word_list, at, size)))
  at = at + size
end
return found
