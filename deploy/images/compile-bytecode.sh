#!/bin/sh
# Compiles every module below the given folders: compile-bytecode.sh FOLDER...
# The byte code is not compared with its source when it is loaded: image builders reset the sources' times, by which
# Python would take it for stale, and compile it anew in every process.
set -u
for folder in "$@"; do
  find "$folder" -name '*.pyc' -delete
  # One process: what several write depends on which of them had seen a name before.
  PYTHONHASHSEED=0 python3 -m compileall -q -f -j 1 --invalidation-mode unchecked-hash "$folder" >/tmp/compile.log 2>&1
  # Templates and modules for other versions of Python do not compile; they are not imported either.
  echo "byte code in $folder: $(find "$folder" -name '*.pyc' | wc -l) files, $(grep -c '^\*\*\*' /tmp/compile.log) not compiled"
  rm -f /tmp/compile.log
done
