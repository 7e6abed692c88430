-- Delete evaluation records, and everything in flight on the evaluation lane.
local epoch_key, evaluations_key, lane_keys = unpack(keys)
local fence, record_entry_list = unpack(args)

for _, entry in ipairs(record_entry_list) do redis.call('XDEL', evaluations_key, entry) end
for _, lane_key in ipairs(lane_keys) do redis.call('UNLINK', lane_key) end
return 1
