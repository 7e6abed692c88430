-- Store the pass rates of prompts; `first`: '1' to delete all others. `posterior_list`: one element per prompt.
local epoch_key, posteriors_key = unpack(keys)
local fence, first, prompt_list, posterior_list = unpack(args)

if first == '1' then redis.call('UNLINK', posteriors_key) end
for at, prompt in ipairs(prompt_list) do redis.call('HSET', posteriors_key, prompt, posterior_list[at]) end
return 1
