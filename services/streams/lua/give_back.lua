-- Take a batch that is not to be trained out of the log; the sampler finds it gone and keeps its groups again.
-- keys: epoch, batches   args: epoch, entry
local refused = fenced(keys[1], args[1])
if refused then return refused end
redis.call('XDEL', keys[2], args[2])
return 1
