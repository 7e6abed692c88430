-- Release groups of a committed batch: they wait for the archive of groups, each with its part of the batch.
-- `last`: '1' with the batch's last groups; its entry leaves with them, and the sampler's snapshot of the step before.
-- `trained_list`: one element per group.
local epoch_key, batches_key, unarchived_key, snapshot_key, group_keys = unpack(keys)
local fence, entry, step, last, trained_list = unpack(args)

local own = false
for at, group_key in ipairs(group_keys) do
  local found = redis.call('HMGET', group_key, 'state', 'step', 'batch')
  -- Any client that reaches Redis can write a batch, or this one again; it must not release what it does not own. A
  -- sampler of an older release recorded no entry.
  if found[1] == 'trained' and found[2] == step and (not found[3] or found[3] == entry) then
    own = true
    -- A repeated release finds that the group waits already, or is archived.
    if retire_group(unarchived_key, group_key) then redis.call('HSET', group_key, 'trained_as', trained_list[at]) end
  end
end
if last == '0' then return 1 end
if redis.call('XDEL', batches_key, entry) == 0 then return 0 end
if own then redis.call('UNLINK', snapshot_key) end
return 1
