#!/usr/bin/env bash
# Sorts support tickets into categories: one long instruction is read once, then every ticket is put to it.
#
#   examples/classify_tickets.sh examples/tickets.csv                  # a JSON line for each ticket
#   examples/classify_tickets.sh examples/tickets.csv sorted.jsonl     # the same into a file, and how many of each
#
# The table needs the columns id, subject and body. With a file to write to, a run that was interrupted goes on where it
# stopped: call it again in the same way. Tickets that were added to the table meanwhile are sorted too.
#
# The instruction is kept in tickets.bin (or $SESSION) and is not read again by the next run. To change it, or the
# categories, edit it below (and in the grammar: whatever the model would like to say, it can only say one of these
# words), delete tickets.bin and write to another file. It is written as text to be continued, which even very small
# models understand a little: the demo model gets 7 to 9 of the 12 tickets in examples/tickets.csv right, on which the
# examples below were tried out, and fewer of others. A close call can turn out differently when other tickets are read
# beside it; with --parallel 1 below it does not.
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 TICKETS.csv [OUT.jsonl]" >&2
    exit 2
fi

tickets=$1
session=${SESSION:-tickets.bin}
grammar='root ::= " " ("billing" | "account" | "delivery" | "technical" | "other")'

llamakv save --raw -f - "$session" >&2 <<'END'
The support tickets of a web shop are sorted into five categories:

billing: invoices, prices, charges and refunds
account: logging in, passwords, changing or deleting an account
delivery: parcels that are late, lost, damaged, or not what was ordered
technical: pages or apps that show errors, crash or do nothing
other: everything else, such as praise, questions and suggestions

Ticket: Lyon. Do you also have a shop in Lyon?
Category: other

Ticket: Where is it? My parcel should have been here on Friday.
Category: delivery

Ticket: Wrong size. I ordered size 40, but size 44 was in the box.
Category: delivery

Ticket: Which price? Your invoice says 30 euros, the web page said 25.
Category: billing

Ticket: Well done. I like your new catalogue very much.
Category: other

Ticket: Password. I forgot my password and cannot get in.
Category: account

Ticket: My name. I have married; please change the name in my account.
Category: account

Ticket: Cart does not open. The app closes when I open the cart.
Category: technical

Ticket: Scratched. The table I ordered has come with a scratch.
Category: delivery

Ticket: Error. When I press Search there is only an error message.
Category: technical

Ticket: Blank page. The search page has been blank since the update.
Category: technical

Ticket: Closing my account. How can I close my account?
Category: account

Ticket: Money back. You promised a refund for the jacket, when will I get the money?
Category: billing

Ticket: Paid two times. I paid by card, and the money was taken two times.
Category: billing

END

classify() {
    llamakv fork "$session" --prompts "$tickets" --input csv --template $'Ticket: {subject}. {body}\nCategory:' \
        --grammar <(echo "$grammar") --temperature 0 --max-tokens 16 "$@"
}

if [ $# -eq 1 ]; then
    classify
else
    classify --skip-done "$2" >>"$2"
    sed -n 's/.*"text": " \([a-z]*\)".*/\1/p' "$2" | sort | uniq -c | sort -rn
fi
