-- Forget what is kept of some of a group's half-drawn responses, for a task: they are whole now and need the room.
local partials_key = unpack(keys)
local task_entry, index_list = unpack(args)

if redis.call('HGET', partials_key, 'entry') ~= task_entry then return 0 end
local whole = {}
for _, index in ipairs(index_list) do whole[index] = 0 end
forget_pieces(partials_key, whole)
return 1
