#!/usr/bin/env bash
# Asks the same question N times (default: 9), with another seed each time, and prints the answer that was given most
# often. What a model knows comes out again and again; what it makes up comes out differently each time.
#
#   examples/best_of_n.sh 'What is the largest planet of the solar system?'
#   examples/best_of_n.sh 'What is the capital of Canada?' 32
#
# The votes go to standard error, the answer alone to standard output. It works for questions with a short answer. The
# examples below show the model how short; they are read once and kept in best_of_n.bin (or $SESSION).
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 PROMPT [N]" >&2
    exit 2
fi

question=$1
n=${2:-9}
session=${SESSION:-best_of_n.bin}

llamakv save --raw -f - "$session" >&2 <<'END'
Question: How many days has a week?
Answer: 7

Question: What colour is the sky on a clear day?
Answer: blue

Question: Who wrote Hamlet?
Answer: Shakespeare

END

votes=$(
    llamakv fork --quiet "$session" $'Question: '"$question"$'\nAnswer:' --samples "$n" --seed 1 \
        --format text --stop $'\n' --temperature 0.7 --max-tokens 24 |
        sed -e 's/^ *//' -e 's/[ .]*$//' -e '/^$/d' | sort | uniq -c | sort -rn
)
printf '%s\n' "$votes" >&2
printf '%s\n' "$votes" | sed -n '1s/^ *[0-9]* //p'
