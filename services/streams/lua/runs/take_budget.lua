-- Set how many requests and tokens of a judge model one process has used in all, unless all processes together would
-- use more than `most_requests` or `most_tokens` ('': no limit). 1 if it was set. A repeated call sets the same.
local budget_key = unpack(keys)
local reward, process, requests, tokens, most_requests, most_tokens = unpack(args)

local used = {requests = 0, tokens = 0}
local own = {requests = reward .. ':' .. process .. ':requests', tokens = reward .. ':' .. process .. ':tokens'}
local fields = redis.call('HGETALL', budget_key)
for place = 1, #fields, 2 do
  local kind = fields[place]:match('^' .. reward .. ':.*:(%l+)$')
  if kind and fields[place] ~= own[kind] then used[kind] = used[kind] + tonumber(fields[place + 1]) end
end
if most_requests ~= '' and used.requests + tonumber(requests) > tonumber(most_requests) then return 0 end
if most_tokens ~= '' and used.tokens + tonumber(tokens) > tonumber(most_tokens) then return 0 end
redis.call('HSET', budget_key, own.requests, requests, own.tokens, tokens)
return 1
