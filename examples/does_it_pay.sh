#!/usr/bin/env bash
# Measures what keeping pays with a model on this machine, and says what changed since the last time (after a new engine,
# a new machine, other settings): a file of results for each day it ran, and the last two side by side.
#
#   examples/does_it_pay.sh                         # the demo model, or $LLAMAKV_MODEL
#   examples/does_it_pay.sh --tokens 4000 -t 2      # options go to llamakv bench
set -euo pipefail

folder=${RESULTS:-bench-results}
mkdir -p "$folder"
today=$folder/$(date +%Y-%m-%d-%H%M%S).json
llamakv bench -o "$today" "$@"

last=$(find "$folder" -name '*.json' | sort | tail -n 2 | head -n 1)
if [ "$last" != "$today" ]; then
    llamakv bench --compare "$last" "$today"
fi
