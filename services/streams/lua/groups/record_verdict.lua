-- Keep a verdict in its group and ack it; with the verdict that decides, also say how the group goes on.
-- keys: epoch, group, verdicts, counters, pending, released, tasks, posteriors, then the group's payloads
-- args: epoch, consumer group, entry id, sample index, verdict, group id, decision ('' | more | kept | evaluated | a
--       release), response tokens of the sample, task that asks for more ('' without), prompt id, posterior ('' without),
--       ttl s of an evaluated group
local refused = fenced(keys[1], args[1])
if refused then return refused end
local found, state = place(keys[2], args[4])
if found < 0 then return found end
redis.call('XACK', keys[3], args[2], args[3])
if state ~= 'pending' then return LATE end
local fresh = redis.call('HSETNX', keys[2], 'verdict:' .. args[4], args[5])
if fresh == 1 then redis.call('HINCRBY', keys[4], 'response_tokens', args[8]) end
local decision = args[7]
if decision == '' then return fresh end
if args[11] ~= '' then redis.call('HSET', keys[8], args[10], args[11]) end
if decision == 'more' then
  if redis.call('HSETNX', keys[2], 'extended', '1') == 1 then
    redis.call('HSET', keys[2], 'task', args[9])
    publish(keys[7], args[9])
  end
  return FRESH
end
redis.call('HSET', keys[2], 'state', decision)
redis.call('HINCRBY', keys[4], 'judged', 1)
if decision == 'kept' then
  redis.call('HSET', keys[2], 'kept_order', redis.call('HINCRBY', keys[4], 'kept_order', 1))
  return FRESH
end
redis.call('SREM', keys[5], args[6])
redis.call('HINCRBY', keys[4], decision, 1)
local payloads = from(keys, 9)
if decision == 'evaluated' then
  redis.call('EXPIRE', keys[2], args[12])
  if #payloads > 0 then redis.call('UNLINK', unpack(payloads)) end
else
  bury(keys[6], keys[2], payloads)
end
return FRESH
