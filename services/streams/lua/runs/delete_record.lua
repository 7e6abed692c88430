-- Delete the record of a run that is being deleted, and its place in the indices: the last step of its deletion. Not if
-- the request was changed since `delete_files` was read.
local record_key, runs_key, active_key = unpack(keys)
local run, closing, delete_files = unpack(args)

local state, found, files = unpack(redis.call('HMGET', record_key, 'state', 'closing', 'delete_files'))
if state and (found ~= closing or (files or '') ~= delete_files) then return 0 end
redis.call('UNLINK', record_key)
redis.call('ZREM', runs_key, run)
redis.call('SREM', active_key, run)
return 1
