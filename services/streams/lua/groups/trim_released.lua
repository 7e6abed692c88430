-- Delete the hashes of the groups that were released first, beyond the last `kept`. `group_keys`: the first ones of the
-- list as the caller read it; one that is no longer there, because its group was reopened meanwhile, ends the call.
local released_key, group_keys = unpack(keys)
local kept = unpack(args)

local surplus, deleted = redis.call('LLEN', released_key) - tonumber(kept), 0
local head = redis.call('LRANGE', released_key, 0, #group_keys - 1)
for at, group_key in ipairs(group_keys) do
  if deleted >= surplus or head[at] ~= group_key then break end
  redis.call('LPOP', released_key)
  redis.call('UNLINK', group_key)
  deleted = deleted + 1
end
return deleted
