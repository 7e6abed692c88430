-- Delete keys of a run whose record is closed in this way; nothing of another run that has its id since then.
local record_key, doomed_keys = unpack(keys)
local closing = unpack(args)

if redis.call('HGET', record_key, 'closing') ~= closing then return -1 end
return redis.call('UNLINK', unpack(doomed_keys))
