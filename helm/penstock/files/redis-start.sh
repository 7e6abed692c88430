#!/bin/sh
# Owns the start of the release's Redis: `sh start.sh` becomes the server, in the official image of Redis or Valkey.
# Must not print a password, nor pass one to a process in arguments or variables.
#
#   sh start.sh        start: users from the mounted Secret, the append-only file in /data, TLS if it is mounted
#   sh start.sh ping   readiness: the server accepts commands (a server that is loading its file does not)
#   sh start.sh alive  liveness: the server returns any answer, for example that it is loading
#
# Needs: a writable /data and /tmp; REDIS_MAXMEMORY (900mb); the files penstock-password and ray-password.
# Optional: REDIS_RAY_NAMESPACE, Ray's external storage namespace, which restricts user ray; REDIS_PORT (6379).
set -eu

secret=${REDIS_SECRET:-/etc/penstock/redis-secret}
tls=${REDIS_TLS:-/etc/penstock/redis-tls}
data=${REDIS_DATA:-/data}
users=${REDIS_USERS:-/tmp/users.acl}
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

write_users() {
  case ${REDIS_RAY_NAMESPACE:-x} in
    *[!A-Za-z0-9_.-]*) refuse "REDIS_RAY_NAMESPACE: '$REDIS_RAY_NAMESPACE' is not valid: expected only A-Z a-z 0-9 _ . -" ;;
  esac
  if [ -n "${REDIS_RAY_NAMESPACE:-}" ]; then ray_keys="~RAY$REDIS_RAY_NAMESPACE@*"; else ray_keys='~RAY*'; fi
  penstock_hash=$(hash_of penstock-password)
  ray_hash=$(hash_of ray-password)
  umask 077
  {
    echo "user default off"
    echo "user penstock on #$penstock_hash $penstock_rule"
    echo "user ray on #$ray_hash resetchannels resetkeys $ray_keys ~DUMMY $ray_rule"
    # For the probes: this user can only ping, so that probes need no password and survive a password change.
    echo "user probe on nopass resetchannels resetkeys -@all +ping"
  } > "$users"
}

start() {
  case ${REDIS_MAXMEMORY:-} in
    *[!0-9kKmMgGbB]* | '' | [!1-9]*)
      refuse "REDIS_MAXMEMORY: '${REDIS_MAXMEMORY:-}' is not valid: expected a size such as 900mb, below the container's memory" ;;
  esac
  server=$(program redis-server valkey-server)
  write_users
  if [ -e "$tls/tls.crt" ]; then
    [ -r "$tls/tls.key" ] || refuse "$tls/tls.key cannot be read: expected it beside tls.crt"
    set -- --port 0 --tls-port "$port" --tls-cert-file "$tls/tls.crt" --tls-key-file "$tls/tls.key" \
      --tls-auth-clients no
  else
    set -- --port "$port"
  fi
  # Every pod of the release is a client, so that loopback is not enough; the users protect the server.
  exec "$server" "$@" --protected-mode no --dir "$data" --aclfile "$users" --appendonly yes --appendfsync always \
    --save '' --maxmemory "$REDIS_MAXMEMORY" --maxmemory-policy noeviction --daemonize no
}

# The server's answer to PING; empty without an answer.
answer() {
  cli=$(program redis-cli valkey-cli)
  set -- -h 127.0.0.1 -p "$port" --user probe
  # The probe sends nothing secret, and the certificate is for the Service's name.
  if [ -e "$tls/tls.crt" ]; then set -- "$@" --tls --insecure; fi
  REDISCLI_AUTH=none VALKEYCLI_AUTH=none timeout 5 "$cli" "$@" ping 2>/dev/null || true
}

case ${1:-start} in
  start) start ;;
  ping)
    found=$(answer)
    [ "$found" = PONG ] || refuse "not ready: ${found:-no answer}" ;;
  alive)
    [ -n "$(answer)" ] || refuse 'no answer' ;;
  *) refuse "command: '$1' is not valid: expected start, ping or alive" ;;
esac
