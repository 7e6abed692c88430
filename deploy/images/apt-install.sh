#!/bin/sh
# Installs Debian packages and removes all traces of the installation: apt-install.sh PACKAGE...
# `python-headers` means Debian's python3-dev, or nothing if the base image has its own Python with headers.
set -eu
packages=
for package in "$@"; do
  if [ "$package" = python-headers ]; then
    include=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] && continue
    package=python3-dev
  fi
  packages="$packages $package"
done
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $packages
apt-get clean
# Package lists, logs and the linker's cache contain time stamps.
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/cache/ldconfig/* /var/lib/dpkg/*-old \
  /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /var/log/bootstrap.log
