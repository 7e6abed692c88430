-- Announce that a process is alive, and what it reports, with this server's time in milliseconds: clients' clocks do not
-- matter. The hash expires when no process has announced itself for `forgotten_s` seconds.
local heartbeats_key = unpack(keys)
local process, info, forgotten_s = unpack(args)

local seconds, microseconds = unpack(redis.call('TIME'))
local now = string.format('%d%03d', seconds, math.floor(microseconds / 1000))
redis.call('HSET', heartbeats_key, process, now .. ' ' .. info)
redis.call('EXPIRE', heartbeats_key, forgotten_s)
return 1
