-- Take an unwanted entry out of a stream, once: ack it for its consumer group, or delete it from a stream without one
-- (''). Only the call that does so adds the dead letter. `epoch_keys`: that of the role that `fence` is of; empty if no
-- role is needed. The last `letters_kept` dead letters are kept. `prompt`: one that is never drawn again, for this
-- `cause`; '' for none. It is remembered here, because the sampler may not read the letter before it leaves the stream.
local stream_key, dead_key, dropped_key, epoch_keys = unpack(keys)
local fence, consumer_group, entry, letter, letters_kept, prompt, cause = unpack(args)

local refused = epoch_keys[1] and fenced(epoch_keys[1], fence)
if refused then return refused end
local gone
if consumer_group == '' then
  gone = redis.call('XDEL', stream_key, entry)
else
  gone = redis.call('XACK', stream_key, consumer_group, entry)
end
if gone == 0 then return 0 end
publish(dead_key, letter)
redis.call('XTRIM', dead_key, 'MAXLEN', letters_kept)
if prompt ~= '' then redis.call('HSETNX', dropped_key, prompt, cause) end
return 1
