-- Change a run's record in one step, if its state is one of those named: add a transition to its history, count a field
-- up, drop fields, set others, forget other keys of the run.
-- keys: record, epoch, then keys to forget
-- args: epoch ('' by anybody), states (',a,b,'), transition ('' without), field to count up ('' without), number of
--       fields to drop, those fields, then field/value pairs
if args[1] ~= '' then
  local refused = fenced(keys[2], args[1])
  if refused then return refused end
end
local found = redis.call('HMGET', keys[1], 'state', 'history')
local state, history = found[1], found[2]
if not history then return -1 end
-- The reply to a first call may have been lost: to repeat it is no fault. Transitions carry their time.
if args[3] ~= '' and history:sub(-#args[3] - 1) == args[3] .. ']' then return 1 end
if not args[2]:find(',' .. state .. ',', 1, true) then return 0 end
if args[3] ~= '' then redis.call('HSET', keys[1], 'history', history:sub(1, -2) .. ',' .. args[3] .. ']') end
if args[4] ~= '' then redis.call('HINCRBY', keys[1], args[4], 1) end
local first = 6 + tonumber(args[5])
for i = 6, first - 1 do redis.call('HDEL', keys[1], args[i]) end
if #args >= first then redis.call('HSET', keys[1], unpack(args, first)) end
for i = 3, #keys do redis.call('UNLINK', keys[i]) end
return 1
