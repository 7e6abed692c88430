-- Withdraw a pending group: it is reopened, so it waits to be dispatched again. Its messages leave their streams and its
-- leases end: nothing that was generated for it has an effect later. Not a group that an older release dispatched, whose
-- messages are unknown. `made_keys`: its payloads, and what is kept of its half-drawn responses. `reader_list`: the consumer groups of tasks, samples and verdicts.
local epoch_key, group_key, tasks_key, samples_key, verdicts_key, counters_key, in_flight_key, made_keys = unpack(keys)
local fence, group, reader_list = unpack(args)

local state, entry = unpack(redis.call('HMGET', group_key, 'state', 'entry'))
if state ~= 'pending' or not entry then return 0 end
local streams = {entry = {tasks_key, 1}, sample = {samples_key, 2}, judged = {verdicts_key, 3}}
local fields = redis.call('HGETALL', group_key)
for at = 1, #fields, 2 do
  local stream_key, reader = unpack(streams[fields[at]:match('^%a+')] or {})
  if stream_key then
    redis.call('XACK', stream_key, reader_list[reader], fields[at + 1])
    redis.call('XDEL', stream_key, fields[at + 1])
  end
end
for _, made_key in ipairs(made_keys) do redis.call('UNLINK', made_key) end
redis.call('DEL', group_key)
move_tokens(counters_key, in_flight_key, group, 'discarded')
redis.call('HSET', group_key, 'state', 'reopened')
return 1
