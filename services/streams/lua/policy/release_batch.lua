-- Release groups of a committed batch: their payloads leave, and their hashes are kept like those of released groups.
-- `last`: '1' with the batch's last groups; its entry leaves with them, and the sampler's snapshot of the step before.
-- `payload_keys`: those of all groups in order; `payload_count_list`: how many of them belong to each group.
local epoch_key, batches_key, released_key, snapshot_key, group_keys, payload_keys = unpack(keys)
local fence, entry, step, last, payload_count_list = unpack(args)

local first, own = 1, false
for at, group_key in ipairs(group_keys) do
  local last_of_group = first + tonumber(payload_count_list[at]) - 1
  local found = redis.call('HMGET', group_key, 'state', 'step', 'batch')
  -- Any client that reaches Redis can write a batch, or this one again; it must not delete what it does not own. A
  -- sampler of an older release recorded no entry.
  if found[1] == 'trained' and found[2] == step and (not found[3] or found[3] == entry) then
    own = true
    for payload = first, last_of_group do redis.call('UNLINK', payload_keys[payload]) end
    -- A repeated release finds no task.
    if redis.call('HDEL', group_key, 'task') == 1 then retire_group(released_key, group_key, {}) end
  end
  first = last_of_group + 1
end
if last == '0' then return 1 end
if redis.call('XDEL', batches_key, entry) == 0 then return 0 end
if own then redis.call('UNLINK', snapshot_key) end
return 1
