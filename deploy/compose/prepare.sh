#!/bin/sh
# Writes random passwords for deploy/compose.yaml to the folder secrets beside this file; existing ones are kept.
set -eu
folder=$(dirname "$0")/secrets
# The folder is closed to other users of the machine; the containers' users must be able to read the files.
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
