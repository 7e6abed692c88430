-- The same by the owner of a role alone.
-- keys: epoch, stream   args: epoch, message, longest length of the stream (0: unbounded)
local refused = fenced(keys[1], args[1])
if refused then return refused end
write(keys[2], args[2], args[3])
return 1
