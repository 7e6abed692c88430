-- Groups wait for the archive without their payloads from now on, because it could not be written. Replies with how many.
-- `payload_keys`: those of all groups in order; `payload_count_list`: how many belong to each group.
local epoch_key, unarchived_key, bare_key, group_keys, payload_keys = unpack(keys)
local fence, payload_count_list = unpack(args)

local first, stripped = 1, 0
for at, group_key in ipairs(group_keys) do
  local last_of_group = first + tonumber(payload_count_list[at]) - 1
  if redis.call('LREM', unarchived_key, 1, group_key) > 0 then
    for payload = first, last_of_group do redis.call('UNLINK', payload_keys[payload]) end
    redis.call('RPUSH', bare_key, group_key)
    stripped = stripped + 1
  end
  first = last_of_group + 1
end
return stripped
