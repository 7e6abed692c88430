-- Reopen groups, once: they are pending again without anything that was generated for them, and wait to be dispatched.
-- `made_keys`: their payloads, and what is kept of their half-drawn responses. `prompt_list`: one element per group.
-- `step`: '' or the last rollout step of the history, whose groups are all reopened by now; it leaves the history, with
-- its `step_entry` and its tokens.
local epoch_key, policy_key, counters_key, pending_key, steps_key, queue_key, unarchived_key, bare_key, released_key,
  in_flight_key, step_tokens_key, group_keys, made_keys = unpack(keys)
local fence, step, step_entry, group_list, prompt_list = unpack(args)

for _, made_key in ipairs(made_keys) do redis.call('UNLINK', made_key) end
for at, group_key in ipairs(group_keys) do
  if redis.call('HGET', group_key, 'state') ~= 'reopened' then
    redis.call('DEL', group_key)
    move_tokens(counters_key, in_flight_key, group_list[at], 'discarded')
    redis.call('HSET', group_key, 'state', 'reopened', 'prompt', prompt_list[at])
    -- A group that was not pending had been trained. If its batch was released, it is among the released groups, or,
    -- when the archive could not be written, among those that wait for it.
    if redis.call('SADD', pending_key, group_list[at]) == 1 then
      for _, list_key in ipairs({unarchived_key, bare_key, released_key}) do
        redis.call('LREM', list_key, 0, group_key)
      end
      redis.call('HINCRBY', counters_key, 'trained', -1)
    end
  end
end
if step ~= '' and redis.call('XDEL', steps_key, step_entry) == 1 then
  redis.call('HSET', policy_key, 'step', tonumber(step) - 1, 'weights', '')
  redis.call('HSET', queue_key, 'step', tonumber(step) - 1)
  local tokens = redis.call('HGET', step_tokens_key, step)  -- nil of a step that an older release committed
  redis.call('HDEL', step_tokens_key, step)
  if tokens and tokens ~= '0' then
    redis.call('HINCRBY', counters_key, 'tokens_trained', '-' .. tokens)
    redis.call('HINCRBY', counters_key, 'tokens_discarded', tokens)
  end
end
return 1
