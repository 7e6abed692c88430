-- Reclaim the batch of a rollout step whose entry is gone from the log, and all later ones: their groups are kept
-- again. `event` reports it; the log keeps `events_kept` events. `group_keys`: the groups of all these batches.
-- `lost_entry`: '' if the publication itself was lost, so that no group names it.
local epoch_key, policy_key, batches_key, queue_key, events_key, group_keys = unpack(keys)
local fence, step, lost_entry, event, events_kept = unpack(args)

if tonumber(redis.call('HGET', policy_key, 'step') or '-1') >= tonumber(step) then return 0 end
if lost_entry ~= '' and #redis.call('XRANGE', batches_key, lost_entry, lost_entry) > 0 then return 0 end
for _, group_key in ipairs(group_keys) do
  local found = redis.call('HMGET', group_key, 'state', 'step', 'batch')
  if found[1] == 'batched' and tonumber(found[2]) >= tonumber(step) then
    redis.call('XDEL', batches_key, found[3])
    redis.call('HSET', group_key, 'state', 'kept')
    redis.call('HDEL', group_key, 'step', 'batch')
  end
end
redis.call('HSET', queue_key, 'step', tonumber(step) - 1, 'last', '0')
append_once(events_key, event, events_kept)
return 1
