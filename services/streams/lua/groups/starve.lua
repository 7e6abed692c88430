-- Say that a run has to pause for want of kept groups. Whoever takes it on gives it fresh patience: judged groups are
-- counted from here.
-- keys: epoch, starved, queue, counters   args: epoch, why
local refused = fenced(keys[1], args[1])
if refused then return refused end
redis.call('SET', keys[2], args[2])
redis.call('HSET', keys[3], 'judged', redis.call('HGET', keys[4], 'judged') or '0')
return 1
