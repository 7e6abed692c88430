-- Change a run's record in one step, if its state is in `states` (',a,b,'), its closing in `closings` (',,a,b,'; the
-- empty word: it is not closed), and its revision is `revision` ('': whatever it is): append a transition to its history,
-- count a field up, delete fields, set others, delete other keys of the run, and keep the indices of runs in line.
-- 1 if it was changed; 0: its state or closing does not allow it; -1: there is no such run; -2: another revision.
-- `fence`: '' for a change that needs no fence. `transition`, `counted_field`: '' for none.
-- `set_field_list`: field, value, field, value, ...
local record_key, epoch_key, lists_key, active_key, ended_key, unclosed_key, deleted_keys = unpack(keys)
local fence, run, states, closings, revision, active_words, ended_words, transition, counted_field, deleted_field_list, set_field_list = unpack(args)

if fence ~= '' then
  local refused = fenced(epoch_key, fence)
  if refused then return refused end
end
local state, history, closing, found =
  unpack(redis.call('HMGET', record_key, 'state', 'history', 'closing', 'revision'))
if not history then return -1 end
-- The reply to a first call may have been lost: a repeated call is no error. Transitions carry their time.
if transition ~= '' and history:sub(-#transition - 1) == transition .. ']' then return 1 end
if revision ~= '' and revision ~= (found or '0') then return -2 end
if not contains(states, state) then return 0 end
if not closings:find(',' .. (closing or '') .. ',', 1, true) then return 0 end
if transition ~= '' then redis.call('HSET', record_key, 'history', history:sub(1, -2) .. ',' .. transition .. ']') end
if counted_field ~= '' then count_up(record_key, counted_field) end
for _, field in ipairs(deleted_field_list) do redis.call('HDEL', record_key, field) end
if #set_field_list > 0 then redis.call('HSET', record_key, unpack(set_field_list)) end
count_up(record_key, 'revision')
for _, deleted_key in ipairs(deleted_keys) do redis.call('UNLINK', deleted_key) end
index_run({lists_key = lists_key, active_key = active_key, ended_key = ended_key, unclosed_key = unclosed_key,
  active_words = active_words, ended_words = ended_words}, record_key, run)
return 1
