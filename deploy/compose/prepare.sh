#!/bin/sh
# Writes random passwords and tokens for deploy/compose.yaml to the folder secrets beside this file, and the access file
# with the digests of the tokens; existing passwords and tokens are kept.
set -eu
folder=$(dirname "$0")/secrets
# The folder is closed to other users of the machine; the containers' users must be able to read the files.
mkdir -p "$folder"
chmod 0700 "$folder"
for name in penstock-password ray-password grafana-password api-token prometheus-token; do
  if [ -s "$folder/$name" ]; then
    echo "$folder/$name: kept"
  else
    head -c 32 /dev/urandom | sha256sum | cut -c 1-48 | tr -d '\n' >"$folder/$name"
    chmod 0444 "$folder/$name"
    echo "$folder/$name: written"
  fi
done

# $1: the token's name; $2: its role.
entry() {
  digest=$(sha256sum "$folder/$1" | cut -d ' ' -f 1)
  echo "  - {name: $1, sha256: $digest, roles: {'*': $2}}"
}

if [ -s "$folder/access.yaml" ]; then
  echo "$folder/access.yaml: kept"
else
  {
    echo "tokens:"
    entry api-token admin
    entry prometheus-token viewer
  } >"$folder/access.yaml"
  chmod 0444 "$folder/access.yaml"
  echo "$folder/access.yaml: written"
fi
