-- A process says that it lives.
-- keys: process, index   args: what it tells, milliseconds until this lapses, process id
redis.call('SET', keys[1], args[1], 'PX', args[2])
redis.call('SADD', keys[2], args[3])
return 1
