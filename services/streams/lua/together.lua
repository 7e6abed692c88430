-- Run several functions in one call, in order: each as if it were called alone, and its error does not stop the others.
-- `args`: the number of calls; then per call its function, its number of keys and of arguments; then all arguments.
local function together(keys, args)
  local calls = tonumber(args[1])
  local replies, key_at, arg_at = {}, 1, 2 + 3 * calls
  for at = 1, calls do
    local name, key_count, arg_count = args[3 * at - 1], tonumber(args[3 * at]), tonumber(args[3 * at + 1])
    local call_keys, call_args = {}, {}
    for number = 1, key_count do call_keys[number] = keys[key_at + number - 1] end
    for number = 1, arg_count do call_args[number] = args[arg_at + number - 1] end
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
