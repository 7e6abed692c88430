-- Delete the record of a run that is being deleted, and its place in the indices: the last step of its deletion. Not if
-- the request was changed since `delete_files` was read. The last `deletions_kept` deleted runs are remembered.
local record_key, lists_key, active_key, ended_key, unclosed_key, deleted_key = unpack(keys)
local run, closing, delete_files, deletions_kept = unpack(args)

local state, found, files, created_at, listed =
  unpack(redis.call('HMGET', record_key, 'state', 'closing', 'delete_files', 'created_at', 'listed'))
if state and (found ~= closing or (files or '') ~= delete_files) then return 0 end
if created_at then append_once(deleted_key, run .. ' ' .. created_at, deletions_kept) end
redis.call('UNLINK', record_key)
for _, list in ipairs(listed and lists_of(lists_key, listed) or {}) do redis.call('ZREM', list, run) end
for _, index in ipairs({lists_key, ended_key, unclosed_key}) do redis.call('ZREM', index, run) end
redis.call('SREM', active_key, run)
return 1
