#!/usr/bin/env bash
# What a node runs first, the same on every provider: set the clocks that end the node whatever happens,
# check the environment, verify and unpack the code, say that it is up, become the training process. Arguments: those of Python; without
# any, the training node. On EC2 this is the user data, after lines that export the variables below; all machines of
# a fleet request share it, so there a node has no id yet and finds it in cluster.json, by its instance id.
set -euo pipefail

: "${HETERPS_NODE_IS:?}" "${HETERPS_RUN_ID:?}" "${HETERPS_RUN_DIR:?}"
: "${HETERPS_PYTHON:?}" "${HETERPS_LIFETIME_S:?}" "${HETERPS_LEASE_S:?}"

if [ $# -eq 0 ]; then
  set -- -m heterps_core.training.node
fi

# The instance ends itself even if nobody ever comes back for it; its shutdown behaviour is to terminate.
if [ "$HETERPS_NODE_IS" = machine ]; then
  shutdown -P "+$(((HETERPS_LIFETIME_S + 59) / 60))"
else
  : "${HETERPS_NODE_ID:?}"
  # The notice of a batch system, which the training process takes, goes to all processes of a node.
  trap '' USR1
fi

end_node() {
  if [ "$HETERPS_NODE_IS" = machine ]; then
    shutdown -P now
  elif kill -TERM "$$"; then
    sleep 10
    kill -KILL "$$" 2>/dev/null || true
  fi
}

read_lease() {
  local key="leases/$HETERPS_RUN_ID"
  case "$HETERPS_RUN_DIR" in
  *://*)
    timeout "$look_s" "$HETERPS_PYTHON" -c '
import sys
from pyarrow import fs

files, root = fs.FileSystem.from_uri(sys.argv[1])
with files.open_input_stream(f"{root}/{sys.argv[2]}", compression=None) as stream:
    sys.stdout.buffer.write(stream.read())
' "$HETERPS_RUN_DIR" "$key"
    ;;
  *) cat "$HETERPS_RUN_DIR/$key" ;;
  esac
}

# The run renews the lease by writing another text into its file. Time is counted in looks of this node, each as long as
# a sleep: no clock that is set wrong, here or where the run is, makes a lease longer or shorter. A store that cannot be
# read, a Python that does not start and a run that is gone are all a lease that is not renewed.
watch_lease() {
  local seen="" lease="" unrenewed_s=0
  while kill -0 "$$"; do
    sleep "$look_s" &
    lease=$(read_lease) || lease=""
    wait "$!"
    unrenewed_s=$((unrenewed_s + look_s))
    if [ -n "$lease" ] && [ "$lease" != "$seen" ]; then
      seen=$lease
      unrenewed_s=0
    fi
    if [ "$unrenewed_s" -ge "$HETERPS_LEASE_S" ]; then
      end_node
      return
    fi
  done
  # What this shell became is gone: a rented machine has nothing more to do.
  if [ "$HETERPS_NODE_IS" = machine ]; then
    end_node
  fi
}

# Prints the disks of a machine's own (instance stores, by the model that EC2 gives them), formatted and mounted, one
# folder each: workers write to several in turns. A disk that holds anything is left alone. No discards: EC2 hands the
# disks over empty, and they would take a minute.
mount_own_disks() {
  local disk folder signatures
  lsblk --nodeps --noheadings --paths --output NAME,MODEL |
    sed -n 's/[[:space:]].*Amazon EC2 NVMe Instance Storage.*//p' |
    while read -r disk; do
      folder="/mnt/heterps/${disk##*/}"
      if signatures=$(wipefs --noheadings "$disk") && [ -z "$signatures" ] && make_file_system "$disk" &&
        mkdir -p "$folder" && mount -o noatime "$disk" "$folder"; then
        echo "$folder"
      else
        echo "bootstrap: the disk $disk is not used: it is not empty, or cannot be formatted or mounted" >&2
      fi
    done
}

make_file_system() {
  if command -v mkfs.xfs >/dev/null; then
    mkfs.xfs -q -K "$1"
  else
    mkfs.ext4 -q -m 0 -i 4194304 -E nodiscard "$1"
  fi >&2
}

look_s=$(((HETERPS_LEASE_S + 9) / 10))
watch_lease >/dev/null 2>&1 &
watch=$!

# A rented machine that has nothing more to do ends itself, also where it never came so far as to train.
if [ "$HETERPS_NODE_IS" = machine ]; then
  trap 'kill "$watch"; shutdown -P now' EXIT
  # Rows of tables that memory does not hold go to the machine's own disks, or to its volume where that was bought for them;
  # temporary files to the volume. Nothing goes to /tmp, which Amazon Linux 2023 keeps in memory.
  HETERPS_OWN_DISKS=$(mount_own_disks | paste -sd :) || HETERPS_OWN_DISKS=""
  export HETERPS_OWN_DISKS TMPDIR="${TMPDIR:-/var/tmp}"
fi

if ! "$HETERPS_PYTHON" -c '
import sys
from importlib.util import find_spec
sys.exit(sys.version_info < (3, 11) or not all(map(find_spec, ("torch", "numpy", "pyarrow"))))
'; then
  echo "bootstrap: $HETERPS_PYTHON must be Python 3.11 or later with torch, numpy and pyarrow" >&2
  exit 1
fi

# Prints to the console, which a cloud shows of a machine that never reached the bucket.
say() {
  echo "bootstrap: $(date -u +%FT%TZ) $*" >&2
}

# The project's code comes from the run directory, and only the wheel that this node was launched with is run. Returns
# 3 where it was replaced.
fetch_code() {
  "$HETERPS_PYTHON" -c '
import hashlib, io, sys, zipfile
from pyarrow import fs

location, key, sha256, target = sys.argv[1:]
try:
    files, root = fs.FileSystem.from_uri(location) if "://" in location else (fs.LocalFileSystem(), location)
    with files.open_input_stream(f"{root}/{key}", compression=None) as stream:
        content = stream.read()
except OSError as problem:
    sys.exit(f"bootstrap: {key} in {location} cannot be read: {problem}")
found = hashlib.sha256(content).hexdigest()
if found != sha256:
    print(f"bootstrap: {key} in {location} must have the SHA-256 {sha256}, but has {found}: it was replaced", file=sys.stderr)
    sys.exit(3)
zipfile.ZipFile(io.BytesIO(content)).extractall(target)
' "$HETERPS_RUN_DIR" "$HETERPS_WHEEL" "$HETERPS_WHEEL_SHA256" "$code"
}

if [ -n "${HETERPS_WHEEL:-}" ]; then
  code=$(mktemp -d)
  case "$HETERPS_RUN_DIR" in
  *://*) fetch_s=120 ;; # A role is known to the machine and to the bucket some seconds late, and a bucket may be busy.
  *) fetch_s=0 ;;
  esac
  say "the node is up and fetches its code from $HETERPS_RUN_DIR"
  until fetch_code; do
    [ $? -ne 3 ] && [ "$SECONDS" -lt "$fetch_s" ] || exit 1
    say "tries again until $fetch_s s after its start"
    sleep 3
  done
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ "$HETERPS_NODE_IS" = machine ]; then
  "$HETERPS_PYTHON" "$@"
  exit
fi

case "$HETERPS_RUN_DIR" in
*://*) ;;
*)
  mkdir -p "$HETERPS_RUN_DIR/nodes/$HETERPS_NODE_ID"
  touch "$HETERPS_RUN_DIR/nodes/$HETERPS_NODE_ID/booted"
  ;;
esac
# A node that is a process has its lifetime by this clock, as a machine has it by that of its shutdown.
exec timeout --kill-after=10 "$HETERPS_LIFETIME_S" "$HETERPS_PYTHON" "$@"
