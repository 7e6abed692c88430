-- Charge a run, and its project by the same amounts, for what its processes used since the last account. `at` names the
-- account: a repeated call changes nothing. `discard`: '1' once no group in flight can be trained any more.
-- `amount_list`: field, amount, field, amount, ... The lists of keys have one element per lane.
local epoch_key, ledger_key, project_key, projects_key, counters_keys, in_flight_keys = unpack(keys)
local fence, project, at, discard, amount_list = unpack(args)

if redis.call('HGET', ledger_key, 'at') == at then return 0 end
for place = 1, #amount_list, 2 do
  redis.call('HINCRBY', ledger_key, amount_list[place], amount_list[place + 1])
  redis.call('HINCRBY', project_key, amount_list[place], amount_list[place + 1])
end
if discard == '1' then
  for lane, counters_key in ipairs(counters_keys) do discard_tokens(counters_key, in_flight_keys[lane]) end
end
add_tokens(ledger_key, project_key, counters_keys, in_flight_keys)
redis.call('HSETNX', ledger_key, 'since', at)
redis.call('HSET', ledger_key, 'at', at)
redis.call('SADD', projects_key, project)
return 1
