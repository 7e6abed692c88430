#!/bin/sh
# Builds Penstock's wheel from a folder of sources and installs it: install-application.sh SOURCES TARGET
set -eu
sources=$1 target=$2
uv=/opt/build/bin/uv
$uv build --no-cache --wheel --require-hashes --build-constraints "$(dirname "$0")/build.lock" --out-dir /dist "$sources"
$uv pip install --no-cache --no-deps --python /opt/venv/bin/python --target "$target" /dist/*.whl
# These files contain the place and time of the build.
for name in uv_cache.json direct_url.json; do
  rm -f "$target"/*.dist-info/$name
  sed -i "/dist-info\/$name,/d" "$target"/*.dist-info/RECORD
done
rm -f "$target/.lock"
# An image based on this one, or a mount, may replace modules here.
MODE=checked-hash "$(dirname "$0")/compile-bytecode.sh" "$target"
