-- Avoid a place of a run, in place of what is known of it. 1 if it was not avoided at `now` (Unix seconds): there was no
-- entry, or its time was over, as entries are kept; else 0. `place`: JSON with the time `until`.
local places_key = unpack(keys)
local field, now, place = unpack(args)

local read, known = pcall(cjson.decode, redis.call('HGET', places_key, field) or '')
local until_s = read and type(known) == 'table' and tonumber(known['until']) or 0
redis.call('HSET', places_key, field, place)
return until_s > tonumber(now) and 0 or 1
