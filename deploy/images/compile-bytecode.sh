#!/bin/sh
# Compiles every module below the given folders: compile-bytecode.sh FOLDER...
# Python would compare times by default, which image builders reset: it would take all byte code for stale, and compile it
# anew in every process. MODE=checked-hash compares contents, for what may be patched; unchecked-hash compares nothing.
set -u
for folder in "$@"; do
  find "$folder" -name '*.pyc' -delete
  # One process: what several write depends on which of them had seen a name before.
  PYTHONHASHSEED=0 python3 -m compileall -q -f -j 1 --invalidation-mode "${MODE:-unchecked-hash}" "$folder" >/tmp/compile.log 2>&1
  # Templates and modules for other versions of Python do not compile; they are not imported either.
  echo "byte code in $folder: $(find "$folder" -name '*.pyc' | wc -l) files, $(grep -c '^\*\*\*' /tmp/compile.log) not compiled"
  rm -f /tmp/compile.log
done
