-- Create a run's record as a whole, with its place in the indices of runs, and the user's files. A repeated call is no
-- error, and nothing of a run that has the id changes. 1 if it was created; 0: another run has the id; -1: `request_key` has
-- a request, which was carried out before. `request`: stored there for `request_kept_s` seconds; '': none.
-- `field_list`: field, value, field, value, ... `file_list`: name, text, name, text, ...
local record_key, lists_key, active_key, ended_key, unclosed_key, files_key, request_key = unpack(keys)
local run, created_at, active_words, ended_words, request, request_kept_s, field_list, file_list = unpack(args)

local known = request ~= '' and redis.call('GET', request_key)
local found = redis.call('HGET', record_key, 'created_at')
if known and (known ~= request or found ~= created_at) then return -1 end
if found then return found == created_at and 1 or 0 end
redis.call('HSET', record_key, 'created_at', created_at, unpack(field_list))
if #file_list > 0 then redis.call('HSET', files_key, unpack(file_list)) end
if request ~= '' then redis.call('SET', request_key, request, 'EX', request_kept_s) end
index_run({lists_key = lists_key, active_key = active_key, ended_key = ended_key, unclosed_key = unclosed_key,
  active_words = active_words, ended_words = ended_words}, record_key, run)
return 1
