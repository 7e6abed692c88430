#!/bin/sh
# Runs a command that trusts the certificates of the build secret `ca.pem`, where one was given.
set -eu
secret=/run/secrets/ca.pem
if [ -s "$secret" ]; then
  export SSL_CERT_FILE="$secret" PIP_CERT="$secret"
fi
exec "$@"
