-- Take an entry out of a stream that many read and nobody acks, and put its dead letter down, once.
-- keys: stream, dead   args: entry id, letter
if redis.call('XDEL', keys[1], args[1]) == 0 then return 0 end
lay_down(keys[2], args[2])
return 1
