-- The operations of a record store on Redis or Valkey. Each call is one operation, which is atomic and bounded.
--
-- redis_store.py puts a line before this text that defines RECORD_BYTES, SEGMENT_BYTES, LEASE_US_MAX and
-- PASSING_KIND.
-- ARGV: the operation's name, then its arguments. The answer is one string: fields, each behind its length. That of
-- a reading is an array of such a string and of segments.
-- Times are microseconds of the server's clock. KEYS is not used: the store does not run on Redis Cluster.
--
--   tl:r:r:KIND\0OWNER\0ID   hash, a record: v version, s head, c created, u used, t ttl in seconds,
--                            o names of its last changes, l and e token and end of its lease
--   tl:r:h:KIND\0OWNER\0ID   string, the record's header; apart, because small hashes are compact
--   tl:r:s:OWNER\0NAME       string, a segment: how many records and segments need it (4 bytes), parent (16),
--                            content
--   tl:r:i:KIND\0OWNER       sorted set, the ids of records in their order
--   tl:r:u, tl:r:d           sorted sets, records by the time of their last use (those of PASSING_KIND before all
--                            others), and by the end of their ttl
--   tl:r:o:OWNER, tl:r:a     hashes, n records and b bytes of an owner, and of all
--   tl:r:g                   list, segments that nothing needs, which `tend` removes
--   tl:r:x:...               strings, what deletions have done, for a while: see `is_done`

local P = 'tl:r:'
local NO_PARENT = string.rep('\0', 16)
local CHANGE_BYTES, CHANGES_BYTES = 8, 32  -- of a change's name, and of those that a record remembers
local MEMORY_MS = 120000                   -- for which a deletion is remembered
local PASSING_US = -4e15                   -- added to a time, so that it is before any other
local ANSWER_BYTES = 4194304               -- after which a reading or a page stops, to be continued
local WALK_SEGMENTS = 1000                 -- after which a reading stops, to be continued
local INLINE_SEGMENTS = 200                -- removed by one operation at most; `tend` removes the others
local TEND_STEPS = 400                     -- records and segments that one `tend` removes at most
local TEND_RECORDS = 100

local call = redis.call
local budget = INLINE_SEGMENTS
local clock = call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local at = 0

local function arg()
  at = at + 1
  return ARGV[at]
end

local function whole(number)
  return string.format('%.0f', number)
end

local function answer(...)
  local out = {}
  for _, field in ipairs({...}) do
    out[#out + 1] = struct.pack('>I4', #field)
    out[#out + 1] = field
  end
  return table.concat(out)
end

-- Sizes

local grown = {}  -- by owner: records and bytes that this call has added

local function grow(owner, records, bytes)
  local sum = grown[owner] or {0, 0}
  grown[owner] = {sum[1] + records, sum[2] + bytes}
end

local function settle()
  for owner, sum in pairs(grown) do
    local key = P .. 'o:' .. owner
    local records, bytes = call('HINCRBY', key, 'n', sum[1]), call('HINCRBY', key, 'b', sum[2])
    if records == 0 and bytes == 0 then call('UNLINK', key) end
    call('HINCRBY', P .. 'a', 'n', sum[1])
    call('HINCRBY', P .. 'a', 'b', sum[2])
  end
  grown = {}
end

local function bytes_of(owner)
  local sum = grown[owner] or {0, 0}
  return (tonumber(call('HGET', P .. 'o:' .. owner, 'b') or 0)) + sum[2]
end

-- Segments

local function segment(owner, name)
  return P .. 's:' .. owner .. '\0' .. name
end

-- The number of those who need a segment, and its parent; nil: there is no such segment.
local function needs(key)
  local top = call('GETRANGE', key, 0, 19)
  if #top < 20 then return nil end
  local parent = string.sub(top, 5, 20)
  return struct.unpack('>I4', top), parent == NO_PARENT and '' or parent
end

local function set_needs(key, count)
  call('SETRANGE', key, 0, struct.pack('>I4', count))
end

-- Remove a segment, and then those before it that nothing else needs, as far as the budget goes.
local function remove_segments(owner, name)
  while name ~= '' do
    local key = segment(owner, name)
    if budget <= 0 then
      set_needs(key, 0)
      call('RPUSH', P .. 'g', owner .. '\0' .. name)
      return
    end
    local _, parent = needs(key)
    budget = budget - 1
    grow(owner, 0, 20 - SEGMENT_BYTES - call('STRLEN', key))
    call('UNLINK', key)
    name = parent
    local count = name ~= '' and needs(segment(owner, name))
    if not count then return end
    if count > 1 then
      set_needs(segment(owner, name), count - 1)
      return
    end
  end
end

local function let_go(owner, name)
  local count = name ~= '' and needs(segment(owner, name))
  if not count then return end
  if count > 1 then
    set_needs(segment(owner, name), count - 1)
  else
    remove_segments(owner, name)
  end
end

local function need(owner, name)
  local key = segment(owner, name)
  set_needs(key, needs(key) + 1)
end

-- Store the new segments that the remaining arguments hold: name, content, name, content...
local function append(owner, base)
  local parent = base
  while at < #ARGV do
    local name, content = arg(), arg()
    local key = segment(owner, name)
    if call('EXISTS', key) == 0 then
      call('SET', key, struct.pack('>I4', 0) .. (parent == '' and NO_PARENT or parent) .. content)
      grow(owner, 0, SEGMENT_BYTES + #content)
      if parent ~= '' then need(owner, parent) end
    end
    parent = name
  end
  return parent
end

-- Records

local function whole_key(kind, owner, id)
  return kind .. '\0' .. owner .. '\0' .. id
end

local function parts_of(key)
  return string.match(key, '^(%Z*)%z(%Z*)%z(.*)$')
end

local function load(key)
  local field = call('HMGET', P .. 'r:' .. key, 'v', 's', 'c', 'u', 't', 'o', 'l', 'e')
  if not field[1] then return nil end
  local record = {version = tonumber(field[1]), head = field[2], created = field[3], used = tonumber(field[4])}
  record.ttl, record.changes, record.token, record.lease = field[5], field[6], field[7] or '', 0
  local left = tonumber(field[8] or 0) - now
  -- A lease that seems to be longer than any was taken before the clock was put back.
  if record.token ~= '' and left > 0 and left <= LEASE_US_MAX then record.lease = left end
  return record
end

-- Whether the change with this name was made by an earlier try of this call; then also how many came after it.
local function is_done(record, key, change)
  local changes = record and record.changes or call('GET', P .. 'x:' .. key) or ''
  for first = 1, #changes, CHANGE_BYTES do
    if string.sub(changes, first, first + CHANGE_BYTES - 1) == change then return true, (first - 1) / CHANGE_BYTES end
  end
  return false
end

-- Set when a record was used last, and with it when its time to live ends.
local function set_used(key, ttl)
  local passes = string.sub(key, 1, #PASSING_KIND + 1) == PASSING_KIND .. '\0'
  call('ZADD', P .. 'u', whole(passes and now + PASSING_US or now), key)
  if tonumber(ttl) > 0 then
    call('ZADD', P .. 'd', whole(now + tonumber(ttl) * 1000000), key)
  else
    call('ZREM', P .. 'd', key)
  end
end

local function touch(record, key)
  local ttl = tonumber(record.ttl)
  local exactness = 60000000
  if ttl > 0 then exactness = math.min(exactness, ttl * 62500) end
  if math.abs(now - record.used) <= exactness then return end
  record.used = now
  call('HSET', P .. 'r:' .. key, 'u', whole(now))
  set_used(key, record.ttl)
end

local function remove(record, key, change)
  local kind, owner, id = parts_of(key)
  grow(owner, -1, -RECORD_BYTES - call('STRLEN', P .. 'h:' .. key))
  call('UNLINK', P .. 'r:' .. key, P .. 'h:' .. key)
  call('ZREM', P .. 'i:' .. kind .. '\0' .. owner, id)
  call('ZREM', P .. 'u', key)
  call('ZREM', P .. 'd', key)
  let_go(owner, record.head)
  if change then call('SET', P .. 'x:' .. key, change .. record.changes, 'PX', MEMORY_MS) end
end

local function written(record)
  return answer('ok', whole(record.version), record.head, record.created, whole(record.used), record.ttl)
end

-- Give a record what the remaining arguments say: header, ttl, base, segments.
local function write(record, key, owner, change, header, ttl, base)
  local head = append(owner, base)
  if head ~= record.head then
    if head ~= '' then need(owner, head) end
    let_go(owner, record.head)
  end
  record.version, record.head, record.used, record.ttl = record.version + 1, head, now, ttl
  record.changes = string.sub(change .. record.changes, 1, CHANGES_BYTES)
  grow(owner, 0, #header - call('STRLEN', P .. 'h:' .. key))
  call('SET', P .. 'h:' .. key, header)
  call('HSET', P .. 'r:' .. key, 'v', whole(record.version), 's', head, 'c', record.created, 'u', whole(now),
    't', ttl, 'o', record.changes)
  set_used(key, ttl)
end

local function is_missing(owner, base)
  return base ~= '' and (needs(segment(owner, base)) or 0) == 0
end

-- Operations

local operations = {}

function operations.create()
  local kind, owner, id, change, quota = arg(), arg(), arg(), arg(), tonumber(arg())
  local header, ttl, base = arg(), arg(), arg()
  local key = whole_key(kind, owner, id)
  local record = load(key)
  local done, later = is_done(record, key, change)
  if record and not done then return answer('exists') end
  if done then
    record = record or {version = 1, created = whole(now), used = now, ttl = ttl}
    record.version, record.head = record.version - later, ARGV[#ARGV - 1]
    if at == #ARGV then record.head = base end
    if record.version < 1 then record.version = 1 end
    return written(record)
  end
  if quota > 0 and bytes_of(owner) >= quota then return answer('quota', whole(bytes_of(owner)), whole(quota)) end
  if is_missing(owner, base) then return answer('base') end
  record = {version = 0, head = '', created = whole(now), changes = ''}
  write(record, key, owner, change, header, ttl, base)
  call('ZADD', P .. 'i:' .. kind .. '\0' .. owner, 0, id)
  grow(owner, 1, RECORD_BYTES)
  return written(record)
end

function operations.put()
  local kind, owner, id, change, version = arg(), arg(), arg(), arg(), tonumber(arg())
  local token, release = arg(), arg()
  local header, ttl, base = arg(), arg(), arg()
  local key = whole_key(kind, owner, id)
  local record = load(key)
  if is_done(record, key, change) then
    record = record or {created = whole(now), used = now}
    record.version, record.ttl = version + 1, ttl
    record.head = at == #ARGV and base or ARGV[#ARGV - 1]
    return written(record)
  end
  if not record then return answer('missing') end
  if record.lease > 0 and record.token ~= token then return answer('busy', whole(record.lease)) end
  if record.version ~= version then return answer('conflict', whole(record.version)) end
  if is_missing(owner, base) then return answer('base') end
  write(record, key, owner, change, header, ttl, base)
  if release == '1' then call('HDEL', P .. 'r:' .. key, 'l', 'e') end
  return written(record)
end

function operations.delete()
  local key, change, token = whole_key(arg(), arg(), arg()), arg(), arg()
  local record = load(key)
  if not record then return answer(is_done(nil, key, change) and 'ok' or 'missing') end
  if record.lease > 0 and record.token ~= token then return answer('busy', whole(record.lease)) end
  remove(record, key, change)
  return answer('ok')
end

-- Read the chain from a segment back to one that the remaining arguments name, or to its beginning. Returns an
-- answer to which are added the known segment and the one to continue with; then follow segments as they are
-- stored, the last one first: joining them would take the server longer than reading them. nil: one is missing.
local function walk(owner, name, front)
  local known = {}
  while at < #ARGV do known[arg()] = true end
  local parts, bytes = {''}, 0
  while name ~= '' and not known[name] do
    if #parts > WALK_SEGMENTS or bytes >= ANSWER_BYTES then
      parts[1] = front .. answer('', name)
      return parts
    end
    local stored = call('GET', segment(owner, name))
    if not stored then return nil end
    parts[#parts + 1] = stored
    bytes = bytes + #stored
    local parent = string.sub(stored, 5, 20)
    name = parent == NO_PARENT and '' or parent
  end
  parts[1] = front .. answer(name, '')
  return parts
end

-- A record whose segments the server has evicted is of no use.
local function reading(record, key, owner)
  local header = call('GET', P .. 'h:' .. key)
  local front = header and written(record) .. answer(whole(record.lease), header, whole(bytes_of(owner)))
  local parts = front and walk(owner, record.head, front)
  if parts then return parts end
  remove(record, key)
  return answer('missing')
end

function operations.get()
  local kind, owner, id, use = arg(), arg(), arg(), arg()
  local key = whole_key(kind, owner, id)
  local record = load(key)
  if not record then return answer('missing') end
  if use == '1' then touch(record, key) end
  return reading(record, key, owner)
end

-- Continue a reading of a record that has had this version.
operations['continue'] = function()
  local kind, owner, id, version, name = arg(), arg(), arg(), tonumber(arg()), arg()
  local key = whole_key(kind, owner, id)
  local parts = walk(owner, name, answer('ok'))
  if parts then return parts end
  local record = load(key)
  if record and record.version == version then remove(record, key) end
  return answer('changed')
end

function operations.acquire()
  local kind, owner, id, token, duration = arg(), arg(), arg(), arg(), tonumber(arg())
  local key = whole_key(kind, owner, id)
  local record = load(key)
  if not record then return answer('missing') end
  if record.lease > 0 and record.token ~= token then return answer('busy', whole(record.lease)) end
  call('HSET', P .. 'r:' .. key, 'l', token, 'e', whole(now + duration))
  touch(record, key)
  return reading(record, key, owner)
end

function operations.renew()
  local key, token, duration = whole_key(arg(), arg(), arg()), arg(), tonumber(arg())
  local record = load(key)
  if not record or record.lease <= 0 or record.token ~= token then return answer('ok', '0') end
  call('HSET', P .. 'r:' .. key, 'e', whole(now + duration))
  return answer('ok', '1')
end

function operations.release()
  local key, token = whole_key(arg(), arg(), arg()), arg()
  local record = load(key)
  if record and record.token == token then call('HDEL', P .. 'r:' .. key, 'l', 'e') end
  return answer('ok')
end

-- Answers whether this is the end, and the last id that was looked at; then for each record id, version, head,
-- created, used, ttl, header.
function operations.page()
  local kind, owner, from, to, limit, headers = arg(), arg(), arg(), arg(), tonumber(arg()), arg()
  local ids = call('ZRANGEBYLEX', P .. 'i:' .. kind .. '\0' .. owner, from, to, 'LIMIT', 0, limit)
  local fields, bytes, last, ended = {}, 0, '', #ids < limit
  for place, id in ipairs(ids) do
    local key = whole_key(kind, owner, id)
    local record = call('HMGET', P .. 'r:' .. key, 'v', 's', 'c', 'u', 't')
    if record[1] then
      local header = headers == '1' and call('GET', P .. 'h:' .. key) or ''
      bytes = bytes + #header
      local count = #fields
      fields[count + 1] = answer(id, record[1], record[2], record[3], record[4], record[5], header)
    end
    last = id
    if bytes >= ANSWER_BYTES and place < #ids then
      ended = false
      break
    end
  end
  return answer('ok', ended and '1' or '0', last) .. table.concat(fields)
end

function operations.usage()
  local sizes = call('HMGET', arg(), 'n', 'b')
  return answer('ok', sizes[1] or '0', sizes[2] or '0')
end

-- Tending

local function remove_garbage()
  while budget > 0 do
    local entry = call('LPOP', P .. 'g')
    if not entry then return end
    budget = budget - 1
    local owner, name = string.match(entry, '^(%Z*)%z(.*)$')
    if needs(segment(owner, name)) == 0 then remove_segments(owner, name) end
  end
end

-- Remove the record of an index, unless it is leased. Returns whether it is gone.
local function remove_indexed(key, deleted)
  local record = load(key)
  if record and record.lease > 0 then return false, record.lease end
  budget = budget - 1
  remove(record or {head = '', changes = ''}, key)  -- without one: the server has evicted it
  deleted[#deleted + 1] = key
  return true
end

local function remove_overdue(deleted)
  local overdue = call('ZRANGEBYSCORE', P .. 'd', '-inf', whole(now), 'LIMIT', 0, TEND_RECORDS)
  for _, key in ipairs(overdue) do
    if budget <= 0 then return false end
    local gone, lease = remove_indexed(key, deleted)
    if not gone then call('ZADD', P .. 'd', whole(now + lease), key) end
  end
  return #overdue < TEND_RECORDS
end

local function remove_for_room(deleted, bytes_max)
  settle()
  local bytes = tonumber(call('HGET', P .. 'a', 'b') or 0)
  if bytes_max == 0 or bytes <= bytes_max then return true end
  -- What `tend` has yet to remove still counts.
  if call('LLEN', P .. 'g') > 0 then return false end
  local count = #deleted
  for _, key in ipairs(call('ZRANGE', P .. 'u', 0, TEND_RECORDS - 1)) do
    if budget <= 0 then return false end
    remove_indexed(key, deleted)
    local left = bytes
    for _, sum in pairs(grown) do left = left + sum[2] end
    if left <= bytes_max then return true end
  end
  return #deleted == count
end

function operations.tend()
  local change, bytes_max = arg(), tonumber(arg())
  local memory = P .. 'x:' .. change
  local before = call('GET', memory)
  if before then return before end
  budget = TEND_STEPS
  remove_garbage()
  local deleted = {}
  local is_over = remove_overdue(deleted)
  is_over = remove_for_room(deleted, bytes_max) and is_over
  settle()
  is_over = is_over and call('LLEN', P .. 'g') == 0
  local names = {}
  for _, key in ipairs(deleted) do names[#names + 1] = answer(parts_of(key)) end
  local result = answer('ok', is_over and '1' or '0') .. table.concat(names)
  if #deleted > 0 then call('SET', memory, result, 'PX', MEMORY_MS) end
  return result
end

local name = arg()
-- These change nothing. A replica refuses both, so that no operation reads what is out of date; and a server whose
-- memory is full refuses the first, but no operation that needs no room.
if name == 'create' or name == 'put' or name == 'acquire' then
  call('SETRANGE', P .. 'x', 0, '')
else
  call('UNLINK', P .. 'x')
end
local result = operations[name]()
settle()
return result
