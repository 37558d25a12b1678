#!/usr/bin/env bash
# Reads a long document once and answers a list of questions about it, one question on a line, several at a time.
#
#   examples/question_list.sh README.md questions.txt
#
# What was read is kept in README.md.bin (or $SESSION): the next list of questions about the same document does not read
# it again, and a document that has grown is read on from where it ended. After changing it in the middle, delete
# README.md.bin.
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "usage: $0 DOCUMENT QUESTIONS.txt" >&2
    exit 2
fi

document=$1
questions=$2
session=${SESSION:-${document##*/}.bin}

llamakv save -f "$document" --system 'Answer from the text, in one sentence.' "$session" >&2
llamakv fork "$session" --prompts "$questions" --input text --format $'> {prompt}\n{text}\n' \
    --stop $'\n' --temperature 0 --max-tokens 60
