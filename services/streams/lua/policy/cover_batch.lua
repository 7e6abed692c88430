-- Delete a batch whose step a checkpoint covers: its payloads, the sampler's snapshot, and the entry itself.
-- `payload_keys`: those of all groups in order; `payload_count_list`: how many of them belong to each group.
local epoch_key, batches_key, released_key, snapshot_key, group_keys, payload_keys = unpack(keys)
local fence, entry, step, payload_count_list = unpack(args)

local refused = fenced(epoch_key, fence)
if refused then return refused end
if redis.call('XDEL', batches_key, entry) == 0 then return 0 end
local first = 1
for at, group_key in ipairs(group_keys) do
  local last = first + tonumber(payload_count_list[at]) - 1
  local found = redis.call('HMGET', group_key, 'state', 'step', 'covered')
  -- Any client that reaches Redis can write a batch, or this one again; it must not delete what it does not own.
  if found[1] == 'trained' and found[2] == step and not found[3] then
    redis.call('HSET', group_key, 'covered', '1')
    redis.call('UNLINK', snapshot_key)
    for payload = first, last do redis.call('UNLINK', payload_keys[payload]) end
    retire_group(released_key, group_key, {})
  end
  first = last + 1
end
return 1
