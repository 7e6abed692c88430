-- Delete the groups of an evaluation that is recorded. One that waits for the archive is deleted when it is archived.
local epoch_key, group_keys = unpack(keys)
local fence = unpack(args)

for _, group_key in ipairs(group_keys) do
  if redis.call('HGET', group_key, 'archive') == 'waits' then
    redis.call('HSET', group_key, 'recorded', '1')
  else
    redis.call('UNLINK', group_key)
  end
end
return 1
