#!/bin/sh
# Owns the release's Redis: `sh start.sh` becomes the server, in the official image of Redis or Valkey, with a watch.
# Must not print a password, nor pass one to a process in arguments or variables.
#
#   sh start.sh          start: users from the mounted Secret, the append-only file in /data, TLS if it is mounted
#   sh start.sh ping     readiness: the server accepts commands (a server that is loading its file does not)
#   sh start.sh alive    liveness: the server returns any answer, for example that it is loading, and the watch looks
#   sh start.sh backup   writes all data of this moment to standard output, as an RDB file
#   sh start.sh restore  replaces all data by the RDB file on standard input, and ends the server, which starts with it;
#                        where the server does not end, it is refused, and all data stay
#
# The watch is a child of the server, so that the server has the container's signals. Once a second, and five times a
# second while little is free, it compares the free space of the volume with three limits, because a server whose
# append-only file cannot be written ends at once:
#   open   all writes
#   short  writes that need much space are refused, as at maxmemory: work in flight drains
#   full   all writes are refused: the server lives, and clients wait
# It rewrites the file when the new one fits: the server does not look at the space before it does so by itself.
# It also gives the server the users and the certificate again when those in the mounted Secrets change.
#
# Needs: a writable /data and /tmp; REDIS_MAXMEMORY (900mb); the files penstock-password and ray-password.
# Optional: penstock-password-other and ray-password-other, which are accepted too; REDIS_RAY_NAMESPACE, Ray's external
# storage namespace, which restricts user ray; REDIS_PORT (6379).
set -eu

secret=${REDIS_SECRET:-/etc/penstock/redis-secret}
tls=${REDIS_TLS:-/etc/penstock/redis-tls}
data=${REDIS_DATA:-/data}
users=${REDIS_USERS:-/tmp/users.acl}
keeper=$users.keeper
looked=$users.looked # changed at each look of the watch
reserve=$data/reserve
restoring=$users.restore # locked by a restore while it works, as file descriptor 9
patience=${REDIS_PATIENCE_S:-300} # how long a restore waits for a server that does not do what it is told
limit=${REDIS_ANSWER_S:-5} # how long one call waits for the server's answer
port=${REDIS_PORT:-6379}

# What Penstock needs: keys under penstock: and nothing else. docs/operations/redis.md contains the same lines.
penstock_rule="resetchannels resetkeys ~penstock:* -@all \
+ping +info +time +select +scan +multi +exec +fcall +function|load +function|list +function|delete \
+get +set +del +unlink +exists +expire \
+hget +hset +hsetnx +hdel +hmget +hgetall +hexists +hincrby +hkeys +hlen +hvals \
+sadd +srem +scard +smembers +sismember +sscan +zadd +zcard +zrange +zrem +lpop +rpush +lrem +llen +lrange \
+xadd +xack +xdel +xlen +xtrim +xrange +xrevrange +xread +xreadgroup +xclaim +xautoclaim +xpending \
+xgroup|create +xgroup|delconsumer +xinfo|groups +xinfo|consumers"
# What Ray's GCS needs, and the job that deletes a removed cluster's keys. It reads DUMMY to find a cluster's leader.
ray_rule='-@all +ping +info +scan +hget +hset +hsetnx +hdel +hmget +hexists +hscan +incrby +del +unlink'
# What this script needs.
keeper_rule='-@all +ping +info +config|set +bgrewriteaof +acl|load +sync +psync +replconf +shutdown'

refuse() {
  echo "redis: $1" >&2
  exit 1
}

# The first of these programs that the image has.
program() {
  for name in "$@"; do
    if command -v "$name"; then return; fi
  done
  refuse "none of the programs $* exists: expected an official image of Redis or Valkey"
}

# The SHA-256 of a password, as in an ACL file. $1: the Secret's key.
hash_of() {
  [ -r "$secret/$1" ] || refuse "$secret/$1 cannot be read: expected the key $1 in the Secret"
  password=$(cat "$secret/$1")
  [ -n "$password" ] || refuse "$secret/$1 is not valid: expected a password, found an empty file"
  case $password in
    *[![:graph:]]*) refuse "$secret/$1 is not valid: expected printable ASCII without spaces" ;;
  esac
  printf %s "$password" | sha256sum | cut -d ' ' -f 1
}

# The hashes of a user's password, and of the other one that is accepted too, as in an ACL file. $1: the user.
hashes_of() {
  first=$(hash_of "$1-password") || return 1
  hashes="#$first"
  if [ -s "$secret/$1-password-other" ]; then
    second=$(hash_of "$1-password-other") || return 1
    hashes="$hashes #$second"
  fi
  echo "$hashes"
}

write_users() {
  case ${REDIS_RAY_NAMESPACE:-x} in
    *[!A-Za-z0-9_.-]*)
      refuse "REDIS_RAY_NAMESPACE: '$REDIS_RAY_NAMESPACE' is not valid: expected only A-Z a-z 0-9 _ . -" ;;
  esac
  if [ -n "${REDIS_RAY_NAMESPACE:-}" ]; then ray_keys="~RAY$REDIS_RAY_NAMESPACE@*"; else ray_keys='~RAY*'; fi
  # Where the caller looks at the result, a shell does not end at an error by itself.
  penstock_hashes=$(hashes_of penstock) || return 1
  ray_hashes=$(hashes_of ray) || return 1
  umask 077
  keeper_hash=$(sha256sum < "$keeper" | cut -d ' ' -f 1)
  {
    # No client can log in as this user, but the server loads its append-only file as this user, and leaves out the
    # transactions that it may not execute: without these permissions a restart would lose the writes of all functions.
    echo "user default off ~* &* +@all"
    echo "user penstock on $penstock_hashes $penstock_rule"
    echo "user ray on $ray_hashes resetchannels resetkeys $ray_keys ~DUMMY $ray_rule"
    # For the probes: this user can only ping, so that probes need no password and survive a password change.
    echo "user probe on nopass resetchannels resetkeys -@all +ping"
    # For this script alone, with a new password at each start, which is readable only in the container.
    echo "user keeper on #$keeper_hash resetchannels resetkeys $keeper_rule"
  } > "$users.new"
  mv "$users.new" "$users"
}

# Become redis-cli, connected to the server: busybox' timeout would not end a child of its child. $@: arguments.
client() {
  cli=$(program redis-cli valkey-cli)
  # The connection stays in the container, and the certificate is for the Service's name.
  if [ -e "$tls/tls.crt" ]; then set -- --tls --insecure "$@"; fi
  exec "$cli" -h 127.0.0.1 -p "$port" "$@"
}

# Whether the server has ended: nothing listens on its port. A server that only does not answer still listens. Here and
# in `ask`, busybox' timeout leaves a process for up to a second, which must not keep the lock of a restore.
ended() {
  case $(timeout "$limit" sh "$0" client ping 2>&1 9>&-) in
    *'Connection refused'*) ;;
    *) return 1 ;;
  esac
}

# The replies to commands of user keeper; its password goes through standard input. $@: one command each.
ask() {
  {
    printf 'AUTH keeper '
    cat "$keeper"
    printf '\n'
    printf '%s\n' "$@"
  } | timeout "$limit" sh "$0" client 2>/dev/null 9>&- | tail -n +2
}

# Total and available KiB of the volume.
volume() {
  df -P -k "$data" | awk 'END { print $2, $4 }'
}

# Sets total, free, and the limits in KiB. $1: the state before; sets state.
look() {
  state=$1
  found=$(volume)
  total=${found% *} free=${found#* }
  short=$((total / 10))
  if [ "$short" -gt 4194304 ]; then short=4194304; fi
  # What a fast writer writes between two looks does not depend on the size of the volume.
  least=$((total / 4))
  if [ "$least" -gt 65536 ]; then least=65536; fi
  if [ "$short" -lt "$least" ]; then short=$least; fi
  full=$((short * 2 / 5)) again=$((short * 3 / 2)) kept=$((short / 5))
  if [ "$kept" -gt 65536 ]; then kept=65536; fi
  if [ "$free" -lt "$full" ]; then
    state=full
  elif [ "$free" -ge "$again" ]; then
    state=open
  elif [ "$state" = full ]; then
    if [ "$free" -ge $((full * 3 / 2)) ]; then state=short; fi
  elif [ "$free" -lt "$short" ]; then
    state=short
  fi
}

# The server's settings in a state. $2: what comes before each name.
settings_of() {
  case $1 in
    open) set -- "$2" "$REDIS_MAXMEMORY" 0 ;;
    short) set -- "$2" 1 0 ;;
    full) set -- "$2" 1 1 ;;
  esac
  echo "$1maxmemory $2 $1min-replicas-to-write $3"
}

report() {
  case $state in
    open) text='all writes are accepted' ;;
    short) text="data that grow are refused until $((again / 1024)) MiB are free" ;;
    full)
      text="all writes are refused until $((full * 3 / 2 / 1024)) MiB are free: enlarge the volume, or free space" ;;
  esac
  echo "redis: volume $state: $((free / 1024)) of $((total / 1024)) MiB of $data are free; $text" >&2
}

# Rewrite the append-only file if the new one fits beside it and is smaller: it is at most as large as the data. While
# the volume is open, only a file that has doubled, as the server would do; after a failure, only once a minute.
rewrite() {
  if [ -e "$data/restore.rdb.new" ] || [ -e "$data/restore.rdb" ]; then return; fi
  facts=$(ask 'INFO memory' 'INFO persistence' | tr -d '\r')
  used=$(fact used_memory) written=$(fact aof_current_size) base=$(fact aof_base_size)
  if [ "$(fact aof_rewrite_in_progress)" != 0 ] || [ "${used:-0}" -ge "${written:-0}" ]; then return; fi
  if [ "$state" = open ] && { [ "$written" -lt 67108864 ] || [ "$written" -lt $((2 * ${base:-0})) ]; }; then return; fi
  if [ $((used / 1024 + full)) -ge "$free" ]; then return; fi
  if [ "$(fact aof_last_bgrewrite_status)" != ok ] && [ "$since_rewrite" -lt 300 ]; then return; fi
  echo "redis: rewriting the append-only file: it has $((written / 1048576)) MiB, the data $((used / 1048576))" >&2
  ask BGREWRITEAOF > /dev/null
  since_rewrite=0
}

# A number or word of INFO. $1: its name.
fact() {
  printf '%s\n' "$facts" | sed -n "s/^$1://p"
}

# Delete what a restore that was killed has left: nothing is rewritten beside it, and a later start would install it.
forget_restore() {
  for left in "$data/restore.rdb.new" "$data/restore.rdb"; do
    if [ ! -e "$left" ]; then continue; fi
    # Not while a restore works, nor after one for which the server has ended. The lock is shared, so that a restore
    # does not take the watch for another one.
    if (flock -s -n 9 && ! ended && rm "$left") 9> "$restoring"; then
      echo "redis: $left was left by a restore that was killed, and is deleted: the server keeps its data" >&2
    fi
  done
}

# Keep space that the next start can free. Random bytes: a file system may compress zeros away.
reserve_space() {
  if [ ! -e "$reserve" ] && [ "$free" -ge $((again + kept)) ]; then
    if head -c $((kept * 1024)) /dev/urandom > "$reserve.new"; then mv "$reserve.new" "$reserve"; fi
    rm -f "$reserve.new"
  fi
}

# The passwords of the mounted Secret, as one text that is compared.
passwords() {
  for name in penstock-password penstock-password-other ray-password ray-password-other; do
    if [ -r "$secret/$name" ]; then sha256sum < "$secret/$name"; else echo none; fi
  done
}

# Give the server the users again if the mounted Secret has changed.
reload_users() {
  now=$(passwords)
  if [ "$now" = "$known" ] || [ "$now" = "$refused" ]; then return; fi
  if ! (write_users); then
    text='the passwords of the mounted Secret have changed and cannot be used: the server keeps the earlier ones'
    echo "redis: $text" >&2
    refused=$now
  elif [ "$(ask 'ACL LOAD')" = OK ]; then # else again at the next look
    echo 'redis: the passwords of the mounted Secret have changed: they are accepted now' >&2
    known=$now refused=''
  fi
}

# What the mounted certificate is: one text that is compared; empty without TLS.
certificate() {
  if [ -e "$tls/tls.crt" ]; then cat "$tls/tls.crt" "$tls/tls.key" | sha256sum; fi
}

# Give the server its certificate again if the mounted one has changed. It reads the files when their names are set.
reload_certificate() {
  served_now=$(certificate)
  case $served_now in '' | "$served" | "$unusable") return ;; esac
  reply=$(ask "CONFIG SET tls-cert-file $tls/tls.crt tls-key-file $tls/tls.key")
  case $reply in
    OK)
      echo 'redis: the mounted certificate has changed: it is served now' >&2
      served=$served_now unusable='' ;;
    '' | LOADING*) ;; # again at the next look
    *)
      echo 'redis: the mounted certificate has changed and cannot be used: the server keeps the earlier one' >&2
      unusable=$served_now ;;
  esac
}

# Wait for the next look; sets fifths, of a second.
pause() {
  if [ "$free" -lt $((short * 5 / 2)) ]; then fifths=1 && sleep 0.2; else fifths=5 && sleep 1; fi
}

# Watch the volume and the Secrets while the server lives, whose process this script's has become. $1: the state at the
# start.
watch() {
  set +e
  done_for=$1 known=$(passwords) refused='' served=$(certificate) unusable=''
  since_facts=0 since_secrets=0 since_rewrite=300
  while pause && kill -0 $$ 2>/dev/null; do
    before=$state
    look "$state"
    touch "$looked"
    if [ "$state" != "$before" ]; then report; fi
    if [ "$state" != "$done_for" ]; then
      if [ "$(ask "CONFIG SET $(settings_of "$state" '')")" = OK ]; then done_for=$state; fi
    fi
    if [ "$state" = open ]; then reserve_space; fi
    since_facts=$((since_facts + fifths)) since_secrets=$((since_secrets + fifths))
    since_rewrite=$((since_rewrite + fifths))
    if [ "$since_facts" -ge 25 ]; then
      since_facts=0
      forget_restore
      rewrite
    fi
    if [ "$since_secrets" -ge 15 ]; then
      since_secrets=0
      reload_users
      reload_certificate
    fi
  done
}

# Make the append-only file from a backup that `restore` has left.
install_backup() {
  if [ ! -e "$data/restore.rdb" ]; then return; fi
  files=$data/appendonlydir
  rm -rf "$files.new"
  # A start that was killed had installed it.
  base=$files/appendonly.aof.1.base.rdb
  if [ -e "$base" ] && [ "$(stat -c %i "$base")" = "$(stat -c %i "$data/restore.rdb")" ]; then
    rm "$data/restore.rdb"
    return
  fi
  if [ -e "$files" ]; then
    rm -rf "$files.replaced"
    mv "$files" "$files.replaced"
  fi
  mkdir "$files.new"
  ln "$data/restore.rdb" "$files.new/appendonly.aof.1.base.rdb"
  echo 'file appendonly.aof.1.base.rdb seq 1 type b' > "$files.new/appendonly.aof.manifest"
  mv "$files.new" "$files"
  rm "$data/restore.rdb"
  echo "redis: starting with the backup; what was there before is in $files.replaced" >&2
}

start() {
  case ${REDIS_MAXMEMORY:-} in
    *[!0-9kKmMgGbB]* | '' | [!1-9]*)
      refuse "REDIS_MAXMEMORY: '${REDIS_MAXMEMORY:-}' is not valid: expected a size such as 900mb, below the \
container's memory" ;;
  esac
  server=$(program redis-server valkey-server)
  umask 077
  head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1 | tr -d '\n' > "$keeper"
  write_users
  # What a server that was killed in a rewriting left behind.
  rm -f "$data"/temp-*.aof "$data"/temp-*.rdb "$reserve.new" "$data/restore.rdb.new"
  install_backup
  look open
  if [ "$state" != open ] && [ -e "$reserve" ]; then
    rm "$reserve"
    look "$state"
    echo 'redis: the reserve on the volume was freed' >&2
  fi
  if [ "$state" != open ]; then report; fi
  if [ -e "$tls/tls.crt" ]; then
    [ -r "$tls/tls.key" ] || refuse "$tls/tls.key cannot be read: expected it beside tls.crt"
    set -- --port 0 --tls-port "$port" --tls-cert-file "$tls/tls.crt" --tls-key-file "$tls/tls.key" \
      --tls-auth-clients no
  else
    set -- --port "$port"
  fi
  # Every pod of the release is a client, so that loopback is not enough; the users protect the server.
  touch "$looked"
  watch "$state" &
  # A backup is the first synchronisation of a replica: without a file, and without waiting for other replicas. Only the
  # watch starts a rewriting.
  # shellcheck disable=SC2046 # names and values without spaces
  exec "$server" "$@" --protected-mode no --dir "$data" --aclfile "$users" --appendonly yes --appendfsync always \
    --auto-aof-rewrite-percentage 0 --save '' --maxmemory-policy noeviction --repl-diskless-sync yes \
    --repl-diskless-sync-delay 0 --daemonize no \
    $(settings_of "$state" --)
}

# The server's answer to PING; empty without an answer.
answer() {
  REDISCLI_AUTH=none VALKEYCLI_AUTH=none timeout "$limit" sh "$0" client --user probe ping 2>/dev/null || true
}

# Whether the watch has looked within a minute. Without it, a full volume would end the server, and a server that refuses
# writes would refuse them for ever.
watched() {
  last=$(stat -c %Y "$looked" 2>/dev/null) && [ $(($(date +%s) - last)) -le 60 ]
}

# The server's data of one moment, as its replica would get them; nothing is written to the volume.
backup() {
  client --user keeper --askpass --rdb - < "$keeper"
}

# Seconds that a jump of the clock does not change.
seconds() {
  cut -d . -f 1 /proc/uptime
}

# Lock other restores out. The watch has the lock too, while it deletes what a killed restore has left: for seconds, if
# the server does not answer.
lock_restores() {
  lock=$(program flock)
  ends=$(($(seconds) + patience))
  until "$lock" -n 9; do # busybox' flock cannot limit its time
    "$lock" -s -n 9 || refuse 'restore: another restore works: try again when it has ended'
    "$lock" -u 9
    if [ "$(seconds)" -ge "$ends" ]; then
      refuse "restore: after $patience s the watch still deletes what a killed restore has left: nothing has changed"
    fi
    sleep 0.2
  done
}

# Wait until the server answers that no rewriting of the append-only file needs the volume's space. The watch starts none
# beside a restore.
await_rewriting() {
  ends=$(($(seconds) + patience))
  while sleep 1; do
    case $(ask 'INFO persistence' | tr -d '\r') in
      *aof_rewrite_in_progress:0*) return ;;
      *aof_rewrite_in_progress:1*) found='the append-only file is being rewritten' ;;
      *) found='the server does not answer' ;;
    esac
    if [ "$(seconds)" -ge "$ends" ]; then refuse "restore: after $patience s $found: nothing has changed"; fi
  done
}

# End the server. One that does not answer, or that still sends a backup, may need to be told more than once. $1: the
# backup, which is deleted if the server does not end.
end_server() {
  # The server may end at any moment after it was told, so that neither a signal nor an error may delete the backup.
  trap 'echo "redis: the server has been told to end: the restore goes on" >&2' HUP INT TERM
  trap : PIPE
  set +e
  ends=$(($(seconds) + patience))
  # Before it ends: its container ends this process too.
  echo 'redis: the server ends, and starts with the backup' >&2 || exit 1
  while :; do
    reply=$(ask 'SHUTDOWN NOSAVE')
    sleep 1
    if ended; then return; fi
    found="the server has not ended (${reply:-no answer})"
    if [ "$(seconds)" -ge "$ends" ]; then
      rm -f "$1" || exit 1 # before the line says so: a server that ends now starts with what is there
      refuse "restore: after $patience s $found: the backup is deleted, the server keeps its data"
    fi
    echo "redis: $found: it is told again" >&2
  done
}

# Write standard input to a file in pieces, each only while the volume has more free space than the limit at which data
# are refused: the server must not end for lack of it. dd reads no byte that it does not write. $1: the file.
receive() {
  got=0
  while :; do
    look open
    if [ "$free" -lt "$short" ]; then
      refuse "restore: the backup does not fit: after $((got / 1048576)) MiB of it, $((free / 1024)) MiB of $data are \
free, and $((short / 1024)) must stay free: enlarge the volume, or delete $data/appendonlydir.replaced"
    fi
    dd bs=65536 count=64 >> "$1" 2>/dev/null || refuse "restore: $1 cannot be written: expected space on $data"
    size=$(stat -c %s "$1")
    if [ "$size" = "$got" ]; then return; fi
    got=$size
  done
}

restore() {
  umask 077
  incoming=$data/restore.rdb.new
  exec 9> "$restoring"
  lock_restores
  trap 'rm -f "$incoming"' EXIT
  trap 'exit 1' HUP INT TERM
  take_backup 9>&- # what a killed shell leaves running must not keep the lock
  trap - EXIT
}

take_backup() {
  rm -f "$incoming" # that of a killed one may still be written
  : > "$incoming"
  await_rewriting
  receive "$incoming"
  case $(head -c 6 "$incoming" | tr -d '\0') in
    REDIS0 | VALKEY) ;;
    *) refuse 'restore: standard input is not valid: expected an RDB file, as backup writes it' ;;
  esac
  check=$(program redis-check-rdb valkey-check-rdb)
  if ! "$check" "$incoming" > /dev/null; then
    refuse "restore: standard input is not valid: $check found it damaged or of a newer server"
  fi
  # redis-cli leaves the mark with which a server ends the transfer: 40 hexadecimal digits. A file ends with the byte 255
  # and a checksum of 8 bytes, so that its own last 40 bytes are never such digits.
  if [ -z "$(tail -c 40 "$incoming" | tr -d 0-9a-f)" ]; then truncate -s $((got - 40)) "$incoming"; fi
  mv "$incoming" "$data/restore.rdb"
  incoming=$data/restore.rdb # a later start would install it, whatever was written until then
  end_server "$incoming"
}

case ${1:-start} in
  start) start ;;
  ping)
    found=$(answer)
    [ "$found" = PONG ] || refuse "not ready: ${found:-no answer}" ;;
  alive)
    [ -n "$(answer)" ] || refuse 'no answer'
    watched || refuse 'the watch has ended: no look at the volume for more than 60 s' ;;
  backup) backup ;;
  restore) restore ;;
  client) # for this script's own calls, which limit its time
    shift
    client "$@" ;;
  *) refuse "command: '$1' is not valid: expected start, ping, alive, backup or restore" ;;
esac
