#!/bin/sh
# Builds Penstock's wheel from a folder of sources and installs it: install-application.sh SOURCES TARGET
set -eu
sources=$1 target=$2
uv=/opt/build/bin/uv
$uv build --no-cache --wheel --require-hashes --build-constraints "$sources/deploy/images/build.lock" --out-dir /dist "$sources"
$uv pip install --no-cache --no-deps --python /opt/venv/bin/python --target "$target" /dist/*.whl
# Where and when it was installed from is the build's business.
rm -f "$target/.lock" "$target"/*.dist-info/uv_cache.json "$target"/*.dist-info/direct_url.json
"$(dirname "$0")/compile-bytecode.sh" "$target"
