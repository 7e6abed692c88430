-- Groups that waited are in the archive, or are lost (`abandoned`: '1'): their payloads leave. Replies with
-- how many waited. `payload_keys`: those of all groups in order; `payload_count_list`: how many belong to each group.
local epoch_key, unarchived_key, bare_key, released_key, counters_key, group_keys, payload_keys = unpack(keys)
local fence, evaluated_ttl_s, abandoned, payload_count_list = unpack(args)

local first, taken = 1, 0
for at, group_key in ipairs(group_keys) do
  local last_of_group = first + tonumber(payload_count_list[at]) - 1
  -- A rewind reopened a group that no longer waits: its payloads are those of its next attempt.
  if redis.call('LREM', unarchived_key, 1, group_key) + redis.call('LREM', bare_key, 1, group_key) > 0 then
    for payload = first, last_of_group do redis.call('UNLINK', payload_keys[payload]) end
    forget_group(released_key, group_key, evaluated_ttl_s)
    taken = taken + 1
  end
  first = last_of_group + 1
end
redis.call('HINCRBY', counters_key, abandoned == '1' and 'abandoned' or 'archived', taken)
return taken
