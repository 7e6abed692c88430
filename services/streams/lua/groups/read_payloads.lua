-- These fields of each payload, one payload after the other; nil where a field or the payload is gone. Changes nothing.
local payload_keys = unpack(keys)
local field_list = unpack(args)

local found, size = {}, #field_list
for at, payload_key in ipairs(payload_keys) do
  for place, value in ipairs(redis.call('HMGET', payload_key, unpack(field_list))) do
    found[size * (at - 1) + place] = value
  end
end
return found
