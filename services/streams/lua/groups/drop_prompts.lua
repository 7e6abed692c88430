-- Record which prompts are never drawn again, with their causes, and the last dead letter that the sampler acted on.
local epoch_key, dropped_key, queue_key = unpack(keys)
local fence, letter_entry, prompt_list, cause_list = unpack(args)

for at, prompt in ipairs(prompt_list) do redis.call('HSETNX', dropped_key, prompt, cause_list[at]) end
redis.call('HSET', queue_key, 'letters', letter_entry)
return #prompt_list
