-- Write a line that is worth keeping although memory is short.
-- keys: stream   args: message, longest length of the stream (0: unbounded)
write(keys[1], args[1], args[2])
return 1
