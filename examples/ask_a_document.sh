#!/usr/bin/env bash
# Reads a long document once, then answers questions about it, each in the time of a file read.
#
#   examples/ask_a_document.sh README.md 'What is this about?' 'Who is it for?'
#
# The document is kept in document.bin (or $SESSION); running the script again, with other questions too, does not read
# the document a second time. If the file has grown, only what is new is read.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 FILE QUESTION..." >&2
    exit 2
fi

document=$1
shift
session=${SESSION:-document.bin}

llamakv save -f "$document" --system 'Answer from the text, in one sentence.' "$session" >/dev/null
for question in "$@"; do
    printf '> %s\n' "$question"
    llamakv load --quiet "$session" -p "$question" --temperature 0 --max-tokens 60
    printf '\n'
done
