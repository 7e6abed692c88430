-- Drop evaluation records, and all that is under way on the evaluation lane.
-- keys: epoch, evaluations, then what goes   args: epoch, entries of the records
local refused = fenced(keys[1], args[1])
if refused then return refused end
for i = 2, #args do redis.call('XDEL', keys[2], args[i]) end
for i = 3, #keys do redis.call('UNLINK', keys[i]) end
return 1
