-- Finish the rewind of a run to rollout step `step`. `obsolete_keys`: snapshots of batches that left. The versions so far
-- have no step any more: what they still generate is not of this history.
-- `response_tokens`: those judged by that step, '' if unknown. `event` reports the rewind; the log keeps `events_kept`.
local epoch_key, policy_key, counters_key, queue_key, events_key, obsolete_keys = unpack(keys)
local fence, resumption, step, response_tokens, event, events_kept = unpack(args)

if response_tokens ~= '' then redis.call('HSET', counters_key, 'response_tokens', response_tokens) end
for _, obsolete_key in ipairs(obsolete_keys) do redis.call('UNLINK', obsolete_key) end
redis.call('HSET', queue_key, 'step', step, 'last', '0')
redis.call('HSET', policy_key, 'step', step, 'weights', '', 'resumption', resumption)
redis.call('HDEL', policy_key, 'rewinding', 'version_steps')
append_once(events_key, event, events_kept)
return 1
