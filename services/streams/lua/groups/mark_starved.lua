-- Record that a run has to pause, for lack of kept groups or of verdicts. When it is resumed, judged groups are counted from here.
local epoch_key, starved_key, queue_key, counters_key = unpack(keys)
local fence, reason = unpack(args)

redis.call('SET', starved_key, reason)
redis.call('HSET', queue_key, 'judged', redis.call('HGET', counters_key, 'judged') or '0')
return 1
