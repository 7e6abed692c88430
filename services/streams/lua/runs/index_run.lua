-- Bring the indices of runs in line with a run's record, or with its absence.
local record_key, lists_key, active_key, ended_key, unclosed_key = unpack(keys)
local run, active_words, ended_words = unpack(args)

index_run({lists_key = lists_key, active_key = active_key, ended_key = ended_key, unclosed_key = unclosed_key,
  active_words = active_words, ended_words = ended_words}, record_key, run)
return 1
