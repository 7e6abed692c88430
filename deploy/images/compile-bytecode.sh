#!/bin/sh
# Compiles every module in the given folders: compile-bytecode.sh FOLDER...
# By default Python compares time stamps, which image builders reset: all byte code would be stale, and every process would
# compile it again. MODE=checked-hash compares contents, for code that may be patched; unchecked-hash compares nothing.
set -u
for folder in "$@"; do
  find "$folder" -name '*.pyc' -delete
  # One process: the output of several processes would depend on their order.
  PYTHONHASHSEED=0 python3 -m compileall -q -f -j 1 --invalidation-mode "${MODE:-unchecked-hash}" "$folder" >/tmp/compile.log 2>&1
  # Templates and modules for other versions of Python do not compile, and are never imported.
  echo "byte code in $folder: $(find "$folder" -name '*.pyc' | wc -l) files, $(grep -c '^\*\*\*' /tmp/compile.log) not compiled"
  rm -f /tmp/compile.log
done
