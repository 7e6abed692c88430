-- Used by several functions.

-- `size` values, from `first` on.
local function slice(values, first, size)
  if size <= 1000 then return {unpack(values, first, first + size - 1)} end  -- a stack of Lua has room for 8,000
  local found = {}
  for place = 1, size do found[place] = values[first + place - 1] end
  return found
end

-- Turns what a call sent into what the `local` lines of a function unpack: single values first, then one table per
-- list. `args` starts with the sizes of all lists, those of `keys` first.
local function with_lists(keys, args, single_keys, key_lists, single_args, arg_lists)
  local function pick(values, at, singles, first_size, lists)
    local found = slice(values, at, singles)
    at = at + singles
    for number = 1, lists do
      local size = tonumber(args[first_size + number - 1])
      found[singles + number], at = slice(values, at, size), at + size
    end
    return found
  end
  return pick(keys, 1, single_keys, 1, key_lists),
    pick(args, key_lists + arg_lists + 1, single_args, key_lists + 1, arg_lists)
end

-- The epoch and the owner of a fence, such as '7 learner-1a2b3c4d'. The owner is '' where an older release stored the
-- epoch alone.
local function parse_fence(fence)
  local epoch, owner = fence:match('^(%d+) ?(.*)$')
  return tonumber(epoch), owner
end

-- The error reply for a caller whose run Redis has lost.
local function gone(key)
  return redis.error_reply('FENCED Redis no longer has the state of this run: ' .. key .. ' is gone')
end

-- The error reply for a caller that does not own the role; nothing for the owner. The assembled library calls this first
-- in each function whose first key is `epoch_key` and whose first argument is `fence`.
local function fenced(epoch_key, fence)
  local stored = redis.call('GET', epoch_key)
  if stored == fence then return end
  if not stored then return gone(epoch_key) end
  local stored_epoch, stored_owner = parse_fence(stored)
  local epoch, owner = parse_fence(fence)
  if stored_epoch > epoch or stored_epoch == epoch and stored_owner ~= '' and stored_owner ~= owner then
    return redis.error_reply('FENCED a newer owner holds ' .. epoch_key .. ': ' .. stored)
  end
  -- The server lost its last writes, in a restart or a failover. The caller has the highest epoch that it knows: it is
  -- the newest owner, unless another one started after the loss of two epochs. That one is rejected from now on.
  redis.call('SET', epoch_key, fence)
end

local function publish(stream, message)
  return redis.call('XADD', stream, '*', 'm', message)
end

-- Append a message to a stream that has no consumer group, and keep its last `kept` entries (0: all). A message that is
-- among the newest entries is not appended again: the reply to the first command may have been lost, and one command has
-- up to 32 messages (TOGETHER_APPENDING).
local function append_once(stream, message, kept)
  for _, entry in ipairs(redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 64)) do
    if entry[2][2] == message then return end
  end
  publish(stream, message)
  if kept ~= '0' then redis.call('XTRIM', stream, 'MAXLEN', '~', kept) end
end

-- A time as the score of a sorted set; '0' if it is no number.
local function score_of(time)
  local number = tonumber(time or '')
  return number and number == number and string.format('%.17g', number) or '0'
end

-- Since when a run is in its state: the time of the last transition of its history, '0' if that cannot be read.
local function since(history)
  local done, changes = pcall(cjson.decode, history or '')
  local last = done and type(changes) == 'table' and changes[#changes]
  return score_of(type(last) == 'table' and last.at)
end

-- The lists in which a run stands, besides that of all runs: `listed` is 'PROJECT/WORD', where WORD is the run's state,
-- and ends with '.closed' for a run that is closed.
local function lists_of(lists_key, listed)
  local project, word = listed:match('^(.*)/(.-)$')
  return {lists_key .. ':' .. project .. '/' .. word, lists_key .. ':*/' .. word, lists_key .. ':' .. project .. '/*'}
end

-- Count a field of a record up; one that is no count starts again.
local function count_up(record_key, field)
  local digits = (redis.call('HGET', record_key, field) or ''):match('^%d+$') or '0'
  redis.call('HSET', record_key, field, string.format('%.0f', (#digits < 15 and tonumber(digits) or 0) + 1))
end

local function contains(words, word)
  return word and words:find(',' .. word .. ',', 1, true)
end

-- Bring the indices in line with a run's record, or with its absence. `active_words` (',a,b,'): the states and closings
-- of runs for which the controller has work; `ended_words`: the states of ended runs. The record's field `listed` says in
-- which lists it stands.
local function index_run(index, record_key, run)
  local state, closing, project, created_at, listed, history =
    unpack(redis.call('HMGET', record_key, 'state', 'closing', 'project', 'created_at', 'listed', 'history'))
  local ended = contains(index.ended_words, state)
  local active = contains(index.active_words, state) or contains(index.active_words, closing)
  redis.call(active and 'SADD' or 'SREM', index.active_key, run)
  if ended then redis.call('ZADD', index.ended_key, since(history), run) else redis.call('ZREM', index.ended_key, run) end
  if ended and not closing then
    redis.call('ZADD', index.unclosed_key, since(history), run)
  else
    redis.call('ZREM', index.unclosed_key, run)
  end
  local known = ended or contains(index.active_words, state)
  local word = known and state .. (ended and closing and '.closed' or '') or 'unreadable'
  local wanted = (history or state or created_at) and (project or 'default') .. '/' .. word
  if listed and listed ~= wanted then
    for _, list in ipairs(lists_of(index.lists_key, listed)) do redis.call('ZREM', list, run) end
  end
  if not wanted then
    redis.call('ZREM', index.lists_key, run)
    return
  end
  local score = score_of(created_at)
  redis.call('ZADD', index.lists_key, score, run)
  for _, list in ipairs(lists_of(index.lists_key, wanted)) do redis.call('ZADD', list, score, run) end
  if listed ~= wanted then redis.call('HSET', record_key, 'listed', wanted) end
end

-- A version that is committed was announced, even if a failover lost that: it is not used again, and has a step.
local function remember_version(policy_key, version, step, weights)
  if tonumber(redis.call('HGET', policy_key, 'announced') or '-1') >= tonumber(version) then return end
  local known = cjson.decode(redis.call('HGET', policy_key, 'version_steps') or '{}')
  known[version] = tonumber(step)
  redis.call('HSET', policy_key, 'announced', version, 'announced_step', step, 'announced_weights', weights,
    'version_steps', cjson.encode(known))
end

-- A group is no longer in flight: its response tokens get another `use`. Replies with their number. `in_flight_key`: the
-- tokens of each group in flight. They are not in the group's hash, because Redis may lose that alone.
local function move_tokens(counters_key, in_flight_key, group, use)
  local tokens = redis.call('HGET', in_flight_key, group)
  if not tokens then return 0 end
  redis.call('HDEL', in_flight_key, group)
  redis.call('HINCRBY', counters_key, 'tokens_' .. use, tokens)
  return tonumber(tokens)
end

-- All groups of a lane are no longer in flight: their tokens are discarded.
local function discard_tokens(counters_key, in_flight_key)
  for _, group in ipairs(redis.call('HKEYS', in_flight_key)) do
    move_tokens(counters_key, in_flight_key, group, 'discarded')
  end
end

-- Bring the tokens of a project in line with those of one of its runs, which may have fallen: `ledger_key` has what was
-- added so far. One element per lane in both tables.
local function add_tokens(ledger_key, project_key, counters_keys, in_flight_keys)
  local totals = {['tokens.in_flight'] = 0}
  for lane, counters_key in ipairs(counters_keys) do
    local fields = redis.call('HGETALL', counters_key)
    for place = 1, #fields, 2 do
      local use = fields[place]:match('^tokens_(%l+)$')
      if use then totals['tokens.' .. use] = (totals['tokens.' .. use] or 0) + tonumber(fields[place + 1]) end
    end
    for _, tokens in ipairs(redis.call('HVALS', in_flight_keys[lane])) do
      totals['tokens.in_flight'] = totals['tokens.in_flight'] + tonumber(tokens)
    end
  end
  for field, total in pairs(totals) do
    local added = total - tonumber(redis.call('HGET', ledger_key, field) or '0')
    if added ~= 0 then
      redis.call('HINCRBY', project_key, field, string.format('%.0f', added))
      redis.call('HSET', ledger_key, field, string.format('%.0f', total))
    end
  end
end

-- UNKNOWN: this run never dispatched the group, or its hash was deleted. OUTSIDE: the group has no such sample.
local FRESH, LATE, UNKNOWN, OUTSIDE = 1, 0, -1, -2

-- Per index FRESH or the reason why the group cannot have such a sample; the group's state; whether any is refused.
local function find_samples(group_key, index_list)
  local state, samples = unpack(redis.call('HMGET', group_key, 'state', 'samples'))
  -- A reopened group has no samples until it is dispatched again.
  local effects, bound, refused = {}, samples and tonumber(samples) or math.huge, not state
  for at, index in ipairs(index_list) do
    local fits = tonumber(index) < bound
    effects[at] = not state and UNKNOWN or fits and FRESH or OUTSIDE
    refused = refused or not fits
  end
  return effects, state, refused
end

-- The indices, of those in the list, whose sample has the field `prefix` .. index in its group's hash.
local function samples_with(group_key, prefix, index_list)
  local found = {}
  for first = 1, #index_list, 1000 do
    local indices, fields = slice(index_list, first, math.min(1000, #index_list - first + 1)), {}
    for at, index in ipairs(indices) do fields[at] = prefix .. index end
    for at, value in ipairs(redis.call('HMGET', group_key, unpack(fields))) do found[indices[at]] = value end
  end
  return found
end

-- Set fields of a hash: field, value, field, value, ...
local function set_fields(key, fields)
  for first = 1, #fields, 1000 do
    redis.call('HSET', key, unpack(slice(fields, first, math.min(1000, #fields - first + 1))))
  end
end

-- Forget pieces of half-drawn responses: per index in `starts`, those from this token on, and with all of them the rest.
local function forget_pieces(partials_key, starts)
  local doomed = {}
  for _, field in ipairs(redis.call('HKEYS', partials_key)) do
    local index, start = field:match('^(%d+):(%d+)$')
    local first = starts[index or field:match('^%l+:(%d+)$')]
    if first and tonumber(start or '0') >= first then doomed[#doomed + 1] = field end
  end
  for first = 1, #doomed, 1000 do
    redis.call('HDEL', partials_key, unpack(slice(doomed, first, math.min(1000, #doomed - first + 1))))
  end
end

-- A group has ended: it waits for the archive with its payloads, in this attempt once. Returns whether it does so now.
local function retire_group(unarchived_key, group_key)
  if redis.call('HSETNX', group_key, 'archive', 'waits') == 0 then return false end
  redis.call('RPUSH', unarchived_key, group_key)
  return true
end

-- A group no longer waits for the archive. Its hash stays until the sampler's maintenance calls `trim_released`; of an
-- evaluated group only the result stays, for `evaluated_ttl_s`, and nothing once its evaluation is recorded.
local function forget_group(released_key, group_key, evaluated_ttl_s)
  local state, samples, result, recorded =
    unpack(redis.call('HMGET', group_key, 'state', 'samples', 'result', 'recorded'))
  if recorded then
    redis.call('UNLINK', group_key)
  elseif state == 'evaluated' then
    redis.call('DEL', group_key)
    redis.call('HSET', group_key, 'state', state, 'samples', samples, 'result', result, 'archive', 'done')
    redis.call('EXPIRE', group_key, evaluated_ttl_s)
  elseif state then
    redis.call('HSET', group_key, 'archive', 'done')
    if state == 'trained' then redis.call('HDEL', group_key, 'task', 'trained_as', 'optimizer_step') end
    redis.call('RPUSH', released_key, group_key)
  end
end

-- Whether any consumer holds a lease on an entry: neither acked nor dead-lettered, and in the stream as it is now. A
-- rewind creates the streams again, and work done under a lease of the abandoned history must not count.
local function is_leased(stream, consumer_group, entry)
  local pending = redis.pcall('XPENDING', stream, consumer_group, entry, entry, 1)
  return not pending.err and #pending > 0
end

-- By name: every function of the library.
local functions = {}

-- Run several functions in one call, in order: each as if it were called alone, and its error does not stop the others.
-- `args`: the number of calls; then per call its function, its number of keys and of arguments; then all arguments.
local function together(keys, args)
  local calls = tonumber(args[1])
  local replies, key_at, arg_at = {}, 1, 2 + 3 * calls
  for at = 1, calls do
    local name, key_count, arg_count = args[3 * at - 1], tonumber(args[3 * at]), tonumber(args[3 * at + 1])
    local call_keys, call_args = slice(keys, key_at, key_count), slice(args, arg_at, arg_count)
    key_at, arg_at = key_at + key_count, arg_at + arg_count
    local done, reply = pcall(functions[name], call_keys, call_args)
    if done then
      replies[at] = reply
    else
      replies[at] = redis.error_reply(type(reply) == 'table' and reply.err or tostring(reply))
    end
  end
  return replies
end
