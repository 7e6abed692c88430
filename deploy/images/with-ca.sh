#!/bin/sh
# Runs a command that trusts the certificates in the build secret `ca.pem`, if there is one.
set -eu
secret=/run/secrets/ca.pem
if [ -s "$secret" ]; then
  export SSL_CERT_FILE="$secret" PIP_CERT="$secret"
fi
exec "$@"
