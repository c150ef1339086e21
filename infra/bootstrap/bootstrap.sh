#!/usr/bin/env bash
# What a node runs first, the same on every provider: set the clock that ends the node whatever happens,
# check the environment, say that it is up, become the training process. Arguments: those of Python; without
# any, the training node. On EC2 this is the user data, after lines that export the variables below.
set -euo pipefail

: "${HETERPS_PROVIDER:?}" "${HETERPS_RUN_ID:?}" "${HETERPS_NODE_ID:?}" "${HETERPS_RUN_DIR:?}"
: "${HETERPS_PYTHON:?}" "${HETERPS_LIFETIME_S:?}"

if [ $# -eq 0 ]; then
  set -- -m heterps_core.training.node
fi

# The instance ends itself even if nobody ever comes back for it; its shutdown behaviour is to terminate.
if [ "$HETERPS_PROVIDER" = aws ]; then
  shutdown -P "+$(((HETERPS_LIFETIME_S + 59) / 60))"
fi

if ! "$HETERPS_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "bootstrap: $HETERPS_PYTHON must be Python 3.11 or later, with heterps installed" >&2
  exit 1
fi

case "$HETERPS_RUN_DIR" in
  *://*) ;;
  *)
    mkdir -p "$HETERPS_RUN_DIR/nodes/$HETERPS_NODE_ID"
    touch "$HETERPS_RUN_DIR/nodes/$HETERPS_NODE_ID/booted"
    ;;
esac

# The same clock for a node that is a process.
if [ "$HETERPS_PROVIDER" != aws ] && command -v timeout >/dev/null; then
  exec timeout --kill-after=10 "$HETERPS_LIFETIME_S" "$HETERPS_PYTHON" "$@"
fi
exec "$HETERPS_PYTHON" "$@"
