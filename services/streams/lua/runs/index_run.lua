-- Bring the index of active runs in line with a run's record.
local record_key, active_key = unpack(keys)
local run, active_words = unpack(args)

index_run(record_key, active_key, run, active_words)
return 1
