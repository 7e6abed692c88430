-- Forget the places of a run without a proven fault: those whose JSON has no `kind`, and those that cannot be read.
-- Replies with their number.
local places_key = unpack(keys)

local forgotten = 0
local entries = redis.call('HGETALL', places_key)
for at = 1, #entries, 2 do
  local read, place = pcall(cjson.decode, entries[at + 1])
  local kind = read and type(place) == 'table' and place.kind
  if type(kind) ~= 'string' or kind == '' then
    forgotten = forgotten + redis.call('HDEL', places_key, entries[at])
  end
end
return forgotten
