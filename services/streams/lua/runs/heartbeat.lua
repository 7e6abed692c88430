-- Announce that a process is alive, and what it reports, until the announcement lapses.
local process_key, processes_key = unpack(keys)
local info, lapses_ms, process = unpack(args)

redis.call('SET', process_key, info, 'PX', lapses_ms)
redis.call('SADD', processes_key, process)
return 1
