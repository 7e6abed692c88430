-- Change a run's record in one step, if its state is in `states` (',a,b,') and its closing in `closings` (',,a,b,'; the
-- empty word: it is not closed): append a transition to its history, count a field up, delete fields, set others, delete
-- other keys of the run, and keep the index of active runs in line.
-- `fence`: '' for a change that needs no fence. `transition`, `counted_field`: '' for none.
-- `set_field_list`: field, value, field, value, ...
local record_key, epoch_key, active_key, deleted_keys = unpack(keys)
local fence, run, states, closings, active_words, transition, counted_field, deleted_field_list, set_field_list = unpack(args)

if fence ~= '' then
  local refused = fenced(epoch_key, fence)
  if refused then return refused end
end
local state, history, closing = unpack(redis.call('HMGET', record_key, 'state', 'history', 'closing'))
if not history then return -1 end
-- The reply to a first call may have been lost: a repeated call is no error. Transitions carry their time.
if transition ~= '' and history:sub(-#transition - 1) == transition .. ']' then return 1 end
if not states:find(',' .. state .. ',', 1, true) then return 0 end
if not closings:find(',' .. (closing or '') .. ',', 1, true) then return 0 end
if transition ~= '' then redis.call('HSET', record_key, 'history', history:sub(1, -2) .. ',' .. transition .. ']') end
if counted_field ~= '' then redis.call('HINCRBY', record_key, counted_field, 1) end
for _, field in ipairs(deleted_field_list) do redis.call('HDEL', record_key, field) end
if #set_field_list > 0 then redis.call('HSET', record_key, unpack(set_field_list)) end
for _, deleted_key in ipairs(deleted_keys) do redis.call('UNLINK', deleted_key) end
index_run(record_key, active_key, run, active_words)
return 1
