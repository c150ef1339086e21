#!/usr/bin/env bash
# Makes a machine image of a stock Amazon Linux 2023, x86 or Arm: the user data of an instance that a person starts once
# (docs/AWS.md), which stops itself when all is installed. Nodes fetch the project's code from their run directory; what
# all nights share is here.
set -euo pipefail
trap 'shutdown -P now' EXIT

# PyTorch's index of wheels for processors, where no cards are used: about 4 GB in place of 8. Arm has no others.
torch_index=""

dnf install -y python3.11 gcc-c++ xfsprogs
python3.11 -m venv /opt/heterps
# The versions of requirements.lock.
/opt/heterps/bin/python -m pip install --no-cache-dir ${torch_index:+--index-url "$torch_index"} torch==2.13.0
/opt/heterps/bin/python -m pip install --no-cache-dir numpy==2.4.6 pyarrow==25.0.1
/opt/heterps/bin/python -c 'import numpy, pyarrow, torch; print("image:", torch.__version__, numpy.__version__)'
