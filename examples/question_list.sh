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

# A table with one column: a question is its own id, so that the line of its answer names it.
table() {
    echo id
    awk '{ sub(/\r$/, "") } NF && !seen[$0]++ { gsub(/"/, "\"\""); print "\"" $0 "\"" }' "$questions"
}

# From JSON to text: --stop has made each answer one line, so that only \" and \\ in it have to be undone.
pairs() {
    sed -e 's/^{"type": "answer", "id": "\(.*\)", "index": .*, "text": "\(.*\)", "finish_reason": .*/> \1\
\2\
/' -e 's/^{"type": "error", "id": "\(.*\)", "index": .*, "message": "\(.*\)", "hint": .*/> \1\
(no answer: \2)\
/' -e 's/\\\(["\\]\)/\1/g'
}

llamakv save -f "$document" --system 'Answer from the text, in one sentence.' "$session" >&2
table | llamakv fork "$session" --prompts - --input csv --template '{id}' \
    --stop $'\n' --temperature 0 --max-tokens 60 | pairs
