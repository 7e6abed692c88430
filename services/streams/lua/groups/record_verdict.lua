-- Record a verdict in its group and ack it; the verdict that decides also changes the group's state.
-- `decision`: '' (none yet), more, kept, evaluated, or a release. `rest_task`: the task for the group's other samples,
-- '' unless the decision is `more`. `posterior`: '' for none.
local epoch_key, group_key, verdicts_key, counters_key, pending_key, released_key, tasks_key, posteriors_key,
  payload_keys = unpack(keys)
local fence, consumer_group, verdict_entry, index, verdict, group, decision, response_tokens, rest_task, prompt,
  posterior, evaluated_ttl_s = unpack(args)

local refused = fenced(epoch_key, fence)
if refused then return refused end
local found, state = find_sample(group_key, index)
if found < 0 then return found end
redis.call('XACK', verdicts_key, consumer_group, verdict_entry)
if state ~= 'pending' then return LATE end
local fresh = redis.call('HSETNX', group_key, 'verdict:' .. index, verdict)
if fresh == 1 then redis.call('HINCRBY', counters_key, 'response_tokens', response_tokens) end
if decision == '' then return fresh end
if posterior ~= '' then redis.call('HSET', posteriors_key, prompt, posterior) end
if decision == 'more' then
  if redis.call('HSETNX', group_key, 'extended', '1') == 1 then
    redis.call('HSET', group_key, 'task', rest_task, 'entry', publish(tasks_key, rest_task))
  end
  return FRESH
end
redis.call('HSET', group_key, 'state', decision)
redis.call('HINCRBY', counters_key, 'judged', 1)
if decision == 'kept' then
  redis.call('HSET', group_key, 'kept_order', redis.call('HINCRBY', counters_key, 'kept_order', 1))
  return FRESH
end
redis.call('SREM', pending_key, group)
redis.call('HINCRBY', counters_key, decision, 1)
if decision == 'evaluated' then
  redis.call('EXPIRE', group_key, evaluated_ttl_s)
  if #payload_keys > 0 then redis.call('UNLINK', unpack(payload_keys)) end
else
  retire_group(released_key, group_key, payload_keys)
end
return FRESH
