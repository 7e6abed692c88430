-- Close the ledger of a run whose record is closed: the tokens of its groups in flight are discarded, also in the sums of
-- its project. Once: what is deleted afterwards changes neither. The lists of keys have one element per lane.
local record_key, ledger_key, project_key, counters_keys, in_flight_keys = unpack(keys)
local closing = unpack(args)

if redis.call('HGET', record_key, 'closing') ~= closing then return -1 end
if redis.call('HEXISTS', ledger_key, 'at') == 0 or redis.call('HEXISTS', ledger_key, 'closed') == 1 then return 0 end
for lane, counters_key in ipairs(counters_keys) do discard_tokens(counters_key, in_flight_keys[lane]) end
add_tokens(ledger_key, project_key, counters_keys, in_flight_keys)
redis.call('HSET', ledger_key, 'closed', '1')
return 1
