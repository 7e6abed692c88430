#!/bin/sh
# Installs a lock file into /opt/venv: install-lock.sh LOCK [options of uv for package sources]
# Only packages with the locked hashes are installed; this includes the build tools of source distributions.
set -eu
lock=$1
shift
# Makes builds of source distributions reproducible: they run in folders with random names, and some write unordered sets.
export CFLAGS=-g0 PYTHONHASHSEED=0
/opt/build/bin/uv pip install --no-cache --python /opt/venv/bin/python --no-deps --require-hashes --link-mode copy \
  --index-strategy unsafe-best-match --build-constraints "$(dirname "$lock")/build.lock" "$@" -r "$lock"
# Left by uv, and writable by all users.
rm -f /opt/venv/.lock
"$(dirname "$lock")/compile-bytecode.sh" /opt/venv/lib
