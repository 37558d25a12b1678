#!/usr/bin/env bash
# One conversation, several ways on: each QUESTION is asked after the same beginning, in a session of its own, and none of
# them reads or stores that beginning again. Run again with other questions, it goes on from what is there.
#
#   examples/what_if.sh 'I open a bakery by the harbour.' 'What if it rains all summer?' 'What if ten ships come in?'
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 BEGINNING QUESTION..." >&2
    exit 2
fi

beginning=$1
shift
base=${SESSION:-what-if}
if ! llamakv inspect "$base" --quiet >/dev/null 2>&1; then
    llamakv chat --quiet --save "$base" --system 'You tell short stories.' --message "$beginning" >/dev/null
    llamakv pin "$base" --quiet
fi
llamakv fork "$base" "$@" --save-as "$base-{id}" --format $'{prompt}\n{text}\n' --quiet
llamakv ls --tree
