-- Append lines to the log of a process, and describe the process; nothing of a run without a record, which was deleted.
-- `kept`: length of the log; `keep_s`: seconds after which a log that is no longer written is gone. The reply is the
-- number of processes with a log. A repeated call changes nothing: `about` counts the lines.
local record_key, logs_key, log_key = unpack(keys)
local process, about, kept, keep_s, line_list = unpack(args)

if redis.call('EXISTS', record_key) == 0 then return 0 end
if redis.call('HGET', logs_key, process) == about then return redis.call('HLEN', logs_key) end
redis.call('HSET', logs_key, process, about)
redis.call('EXPIRE', logs_key, keep_s)
for _, line in ipairs(line_list) do
  redis.call('XADD', log_key, 'MAXLEN', kept, '*', 'm', line)
end
redis.call('EXPIRE', log_key, keep_s)
return redis.call('HLEN', logs_key)
