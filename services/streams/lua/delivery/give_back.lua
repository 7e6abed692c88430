-- Take a batch that is not to be trained out of the log, with a letter that says why, or without ('') where the sampler
-- is to find it gone and keep its groups again.
-- keys: epoch, batches, dead   args: epoch, entry, letter
local refused = fenced(keys[1], args[1])
if refused then return refused end
if redis.call('XDEL', keys[2], args[2]) == 0 then return 0 end
if args[3] ~= '' then lay_down(keys[3], args[3]) end
return 1
