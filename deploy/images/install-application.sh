#!/bin/sh
# Builds Penstock's wheel from a folder of sources and installs it: install-application.sh SOURCES TARGET
set -eu
sources=$1 target=$2
uv=/opt/build/bin/uv
$uv build --no-cache --wheel --require-hashes --build-constraints "$(dirname "$0")/build.lock" --out-dir /dist "$sources"
$uv pip install --no-cache --no-deps --python /opt/venv/bin/python --target "$target" /dist/*.whl
# Where and when it was installed from is the build's business.
for name in uv_cache.json direct_url.json; do
  rm -f "$target"/*.dist-info/$name
  sed -i "/dist-info\/$name,/d" "$target"/*.dist-info/RECORD
done
rm -f "$target/.lock"
# An image made from this one, or a mount, may replace modules here.
MODE=checked-hash "$(dirname "$0")/compile-bytecode.sh" "$target"
