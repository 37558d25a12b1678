#!/usr/bin/env bash
# A conversation that goes on day after day: each run resumes it, says one thing, and saves the answer with the rest.
#
#   examples/diary.sh 'I planted three apple trees today.'
#   examples/diary.sh 'How many trees did I plant?'
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 MESSAGE" >&2
    exit 2
fi

session=${SESSION:-diary.bin}
if [ -e "$session" ]; then
    llamakv chat --quiet --resume "$session" --message "$1"
else
    llamakv chat --quiet --save "$session" --system 'You keep a diary with me. Be brief.' --message "$1"
fi
