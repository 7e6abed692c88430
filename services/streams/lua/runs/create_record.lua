-- Create a run's record as a whole, with its place in the indices of all runs and of active ones, and the user's files.
-- A repeated call is no error, and nothing of a run that has the id changes. `field_list`: field, value, field, value,
-- ... `file_list`: name, text, name, text, ...
local record_key, runs_key, active_key, files_key = unpack(keys)
local run, created_at, field_list, file_list = unpack(args)

local found = redis.call('HGET', record_key, 'created_at')
if found then return found == created_at and 1 or 0 end
redis.call('HSET', record_key, 'created_at', created_at, unpack(field_list))
if #file_list > 0 then redis.call('HSET', files_key, unpack(file_list)) end
redis.call('ZADD', runs_key, created_at, run)
redis.call('SADD', active_key, run)
return 1
