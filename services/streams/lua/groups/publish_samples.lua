-- Store the payloads of some of a group's samples and announce the samples, in this order; ack the task with the last
-- sample that it asks for. The first result of an index wins; only its tokens are counted. Replies with one effect per
-- sample.
-- What was kept of the samples while they were half-drawn leaves.
-- `payload_field_list`: the payloads as field, value, field, value, ...; each has as many fields as the others.
local group_key, samples_key, tasks_key, counters_key, in_flight_key, partials_key, payload_keys = unpack(keys)
local consumer_group, group, task_entry, wanted, index_list, sample_list, token_count_list, payload_field_list =
  unpack(args)

local effects, state, refused = find_samples(group_key, index_list)
local pending = state == 'pending'
local leased = pending and is_leased(tasks_key, consumer_group, task_entry)
local size, announced, tokens, published_now = #payload_field_list / #payload_keys, {}, 0, {}
for at, index in ipairs(index_list) do
  if effects[at] == FRESH then
    if leased and redis.call('EXISTS', payload_keys[at]) == 0 then
      redis.call('HSET', payload_keys[at], unpack(payload_field_list, size * (at - 1) + 1, size * at))
      announced[#announced + 1] = 'sample:' .. index
      announced[#announced + 1] = publish(samples_key, sample_list[at])
      tokens = tokens + tonumber(token_count_list[at])
      published_now[index] = 0
    else
      effects[at] = LATE
    end
  end
end
set_fields(group_key, announced)
if #announced > 0 then
  redis.call('HINCRBY', group_key, 'published', #announced / 2)
  redis.call('HINCRBY', counters_key, 'tokens_generated', tokens)
  redis.call('HINCRBY', in_flight_key, group, tokens)
end
local published = tonumber(redis.call('HGET', group_key, 'published') or '0')
local done = not refused and (not pending or published >= tonumber(wanted))
if done then redis.call('XACK', tasks_key, consumer_group, task_entry) end
-- A group that needs more samples has another task by now, if this call is a late one: its other pieces stay.
if done and redis.call('HGET', partials_key, 'entry') == task_entry then
  redis.call('UNLINK', partials_key)
elseif #announced > 0 then
  forget_pieces(partials_key, published_now)
end
return effects
