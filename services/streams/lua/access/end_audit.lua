-- Move a noted change into the log, with its outcome; a repeated call finds no note, and changes nothing. `kept`: entries
-- of the log; `oldest`: the id before which entries are deleted.
local pending_key, log_key = unpack(keys)
local request, entry, kept, oldest = unpack(args)

if redis.call('HDEL', pending_key, request) == 0 then return 0 end
redis.call('XADD', log_key, '*', 'm', entry)
redis.call('XTRIM', log_key, 'MAXLEN', '~', kept)
redis.call('XTRIM', log_key, 'MINID', '~', oldest)
return 1
