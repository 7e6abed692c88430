-- Take a run back to an older rollout step: steps behind it leave the history, groups that are open or were trained
-- there go back to pending and are asked for again; nothing that was generated for them stays. Once per resumption.
-- Letters about groups end none of them any more. Nothing happens (-1) if other groups are open than those given.
-- keys: epoch, policy, counters, pending, tasks, samples, verdicts, batches, steps, queue, posteriors, released, dead,
--       then what the log of batches still held: the sampler's snapshots, the payloads of groups that stay trained
-- args: epoch, resumption, step, prefix of the group keys, prefix of the payload keys, response tokens judged by then
--       ('' if unknown), number of open groups, number of steps to drop, their entry ids, number of posteriors,
--       (prompt id, posterior) each, number of groups that stay trained and were not covered, their ids, then per group
--       that goes back (id, task, samples, '1' if trained)
local refused = fenced(keys[1], args[1])
if refused then return refused end
if redis.call('HGET', keys[2], 'resumption') == args[2] then return 0 end
if redis.call('SCARD', keys[4]) ~= tonumber(args[7]) then return -1 end
local at = 8
local function take() at = at + 1; return args[at - 1] end
for _ = 1, tonumber(take()) do redis.call('XDEL', keys[9], take()) end
if args[6] ~= '' then redis.call('HSET', keys[3], 'response_tokens', args[6]) end
redis.call('DEL', keys[11])
for _ = 1, tonumber(take()) do redis.call('HSET', keys[11], take(), take()) end
-- The consumers create their groups anew; what was on its way belongs to the history that is left.
redis.call('DEL', keys[5], keys[6], keys[7], keys[8])
for i = 14, #keys do redis.call('UNLINK', keys[i]) end
for _ = 1, tonumber(take()) do bury(keys[12], args[4] .. take(), {}) end
while at <= #args do
  local id, task, samples, trained = take(), take(), take(), take()
  local group = args[4] .. id
  for index = 0, tonumber(samples) - 1 do redis.call('UNLINK', args[5] .. id .. ':' .. index) end
  redis.call('DEL', group)
  redis.call('LREM', keys[12], 0, group)
  redis.call('HSET', group, 'state', 'pending', 'task', task, 'samples', samples)
  redis.call('SADD', keys[4], id)
  if trained == '1' then redis.call('HINCRBY', keys[3], 'trained', -1) end
  publish(keys[5], task)
end
local letters = redis.call('XREVRANGE', keys[13], '+', '-', 'COUNT', 1)
redis.call('HSET', keys[10], 'step', args[3], 'last', '0', 'letters', letters[1] and letters[1][1] or '0-0')
redis.call('HSET', keys[2], 'step', args[3], 'weights', '', 'resumption', args[2])
return 1
