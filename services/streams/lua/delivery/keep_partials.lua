-- Keep pieces of a group's half-drawn responses, for the caller that leases its task. Replies with the tokens that are
-- now kept of each sample: NEVER for one of which none is kept any more, because it was published, its group has ended or
-- the caller does not lease the task; 0 where the caller must send all of them.
-- A piece is kept only where the previous one of the same attempt ended. The first piece of an attempt starts at 0, or
-- at `base`, the tokens of earlier attempts that it goes on from; what was kept beyond leaves. So a repeated call changes
-- nothing, and the tokens of two attempts never mix.
-- A delivery that brings the task further than it ever was is not counted: `most_forgiven` deliveries of a task at most.
-- Further means more published samples, or as many and more kept tokens; what was lost and drawn again does not count.
-- What is kept expires after `kept_s` seconds.
local group_key, partials_key, tasks_key = unpack(keys)
local consumer_group, consumer, task_entry, kept_s, most_forgiven, index_list, attempt_list, base_list, start_list,
  end_list, piece_list = unpack(args)

local NEVER = -1
local effects, state = find_samples(group_key, index_list)
local lease = redis.pcall('XPENDING', tasks_key, consumer_group, task_entry, task_entry, 1)
if state ~= 'pending' or lease.err or #lease == 0 or lease[1][2] ~= consumer then
  for at in ipairs(index_list) do effects[at] = NEVER end
  return effects
end
-- A reopened group has another task: what was kept for its previous one is not of this history.
if redis.call('HGET', partials_key, 'entry') ~= task_entry then redis.call('UNLINK', partials_key) end
local grown = false
for at, index in ipairs(index_list) do
  if effects[at] ~= FRESH or redis.call('HEXISTS', group_key, 'sample:' .. index) == 1 then
    effects[at] = NEVER
  else
    local kept, attempt = unpack(redis.call('HMGET', partials_key, 'tokens:' .. index, 'attempt:' .. index))
    local base, start = tonumber(base_list[at]), tonumber(start_list[at])
    kept = tonumber(kept or '0')
    if attempt ~= attempt_list[at] then
      local whole = kept == start or redis.call('HEXISTS', partials_key, index .. ':' .. start) == 1
      if start == 0 or start == base and kept >= base and whole then
        if kept > start then forget_pieces(partials_key, {[index] = start}) end
        kept, attempt = start, attempt_list[at]
      else
        kept = 0
      end
    end
    if attempt == attempt_list[at] and start == kept then
      kept, grown = tonumber(end_list[at]), true
      redis.call('HSET', partials_key, 'entry', task_entry, 'tokens:' .. index, kept, 'attempt:' .. index, attempt,
        index .. ':' .. start, piece_list[at])
    end
    effects[at] = kept
  end
end
if not grown then return effects end
redis.call('EXPIRE', partials_key, kept_s)
local published, samples = unpack(redis.call('HMGET', group_key, 'published', 'samples'))
published = tonumber(published or '0')
local names, tokens = {}, 0
for index = 0, tonumber(samples) - 1 do names[index + 1] = 'tokens:' .. index end
for _, kept in ipairs(redis.call('HMGET', partials_key, unpack(names))) do tokens = tokens + tonumber(kept or '0') end
local most_published, most_tokens = unpack(redis.call('HMGET', partials_key, 'most_published', 'most_tokens'))
most_published, most_tokens = tonumber(most_published or '0'), tonumber(most_tokens or '0')
if published < most_published or published == most_published and tokens <= most_tokens then return effects end
redis.call('HSET', partials_key, 'most_published', published, 'most_tokens', tokens)
local again = lease[1][4] - 1
if again > 0 and redis.call('HINCRBY', partials_key, 'forgiven', again) <= tonumber(most_forgiven) then
  redis.call('XCLAIM', tasks_key, consumer_group, consumer, 0, task_entry, 'RETRYCOUNT', 1, 'JUSTID')
end
return effects
