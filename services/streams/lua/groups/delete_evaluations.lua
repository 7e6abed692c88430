-- Delete evaluation records, and everything in flight on the evaluation lane: its groups are no longer counted, its
-- tokens still are. `kept_tokens`: those of the evaluations that stay; what else was evaluated is discarded. '': the
-- counters stay as they are.
local epoch_key, evaluations_key, counters_key, in_flight_key, lane_keys = unpack(keys)
local fence, kept_tokens, record_entry_list = unpack(args)

for _, entry in ipairs(record_entry_list) do redis.call('XDEL', evaluations_key, entry) end
for _, lane_key in ipairs(lane_keys) do redis.call('UNLINK', lane_key) end
if kept_tokens == '' then return 1 end
discard_tokens(counters_key, in_flight_key)
local surplus = tonumber(redis.call('HGET', counters_key, 'tokens_evaluated') or '0') - tonumber(kept_tokens)
if surplus > 0 then
  redis.call('HINCRBY', counters_key, 'tokens_evaluated', -surplus)
  redis.call('HINCRBY', counters_key, 'tokens_discarded', surplus)
end
for _, field in ipairs(redis.call('HKEYS', counters_key)) do
  if field:sub(1, 7) ~= 'tokens_' then redis.call('HDEL', counters_key, field) end
end
return 1
