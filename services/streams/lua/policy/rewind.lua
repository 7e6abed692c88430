-- Rewind a run to an older rollout step, once per resumption: later steps leave the history, and groups that are open
-- or were trained after that step become pending and are drawn again without anything that was generated for them.
-- Existing dead letters no longer end a group. Replies -1 and changes nothing if the number of open groups is not
-- `open_groups`.
-- `obsolete_keys`: what the batches in the log still hold: snapshots, and payloads of groups that stay trained.
-- `response_tokens`: those judged by that step, '' if unknown. `step_entry_list`: the steps to delete.
-- `posterior_list`: one per element of `prompt_list`. `stay_trained_list`: groups that no checkpoint covered yet.
-- The last four lists have one element per group that is drawn again; `was_trained_list`: '1' if it had been trained.
local epoch_key, policy_key, counters_key, pending_key, tasks_key, samples_key, verdicts_key, batches_key, steps_key,
  queue_key, posteriors_key, released_key, dead_key, obsolete_keys = unpack(keys)
local epoch, resumption, step, group_prefix, payload_prefix, response_tokens, open_groups, step_entry_list, prompt_list,
  posterior_list, stay_trained_list, group_list, task_list, samples_list, was_trained_list = unpack(args)

local refused = fenced(epoch_key, epoch)
if refused then return refused end
if redis.call('HGET', policy_key, 'resumption') == resumption then return 0 end
if redis.call('SCARD', pending_key) ~= tonumber(open_groups) then return -1 end
for _, entry in ipairs(step_entry_list) do redis.call('XDEL', steps_key, entry) end
if response_tokens ~= '' then redis.call('HSET', counters_key, 'response_tokens', response_tokens) end
redis.call('DEL', posteriors_key)
for at, prompt in ipairs(prompt_list) do redis.call('HSET', posteriors_key, prompt, posterior_list[at]) end
-- The consumers create their groups again; messages in flight belong to the abandoned history.
redis.call('DEL', tasks_key, samples_key, verdicts_key, batches_key)
for _, obsolete_key in ipairs(obsolete_keys) do redis.call('UNLINK', obsolete_key) end
for _, group in ipairs(stay_trained_list) do retire_group(released_key, group_prefix .. group, {}) end
for at, group in ipairs(group_list) do
  local group_key, task, samples = group_prefix .. group, task_list[at], samples_list[at]
  for index = 0, tonumber(samples) - 1 do redis.call('UNLINK', payload_prefix .. group .. ':' .. index) end
  redis.call('DEL', group_key)
  redis.call('LREM', released_key, 0, group_key)
  redis.call('HSET', group_key, 'state', 'pending', 'task', task, 'samples', samples)
  redis.call('SADD', pending_key, group)
  if was_trained_list[at] == '1' then redis.call('HINCRBY', counters_key, 'trained', -1) end
  publish(tasks_key, task)
end
local letters = redis.call('XREVRANGE', dead_key, '+', '-', 'COUNT', 1)
redis.call('HSET', queue_key, 'step', step, 'last', '0', 'letters', letters[1] and letters[1][1] or '0-0')
redis.call('HSET', policy_key, 'step', step, 'weights', '', 'resumption', resumption)
return 1
