-- The text of each payload and its checksum; nil, nil for one that is gone. Changes nothing.
local payload_keys = unpack(keys)

local found = {}
for at, payload_key in ipairs(payload_keys) do
  local text, crc = unpack(redis.call('HMGET', payload_key, 'text', 'text_crc'))
  found[2 * at - 1], found[2 * at] = text, crc
end
return found
