#!/bin/sh
# Installs a lock file into /opt/venv: install-lock.sh LOCK [uv's options saying where from]
# Only what the lock's hashes name is accepted; so are the tools with which source distributions are built.
set -eu
lock=$1
shift
# Source distributions are built in folders of random names, and some write sets down as they come.
export CFLAGS=-g0 PYTHONHASHSEED=0
/opt/build/bin/uv pip install --no-cache --python /opt/venv/bin/python --no-deps --require-hashes --link-mode copy \
  --index-strategy unsafe-best-match --build-constraints "$(dirname "$lock")/build.lock" "$@" -r "$lock"
# uv's own, and writable by everyone.
rm -f /opt/venv/.lock
"$(dirname "$lock")/compile-bytecode.sh" /opt/venv/lib
