#!/bin/sh
# Writes the passwords of deploy/compose.yaml, random, into the folder secrets beside this file; those there are stay.
set -eu
folder=$(dirname "$0")/secrets
# The folder keeps other users of the machine out; the files are read by the containers' own users.
mkdir -p "$folder"
chmod 0700 "$folder"
for name in penstock-password ray-password grafana-password; do
  if [ -s "$folder/$name" ]; then
    echo "$folder/$name: kept"
  else
    head -c 32 /dev/urandom | sha256sum | cut -c 1-48 | tr -d '\n' >"$folder/$name"
    chmod 0444 "$folder/$name"
    echo "$folder/$name: written"
  fi
done
