#!/bin/bash
# Runs the model of transactions:  bash docs/model/transactions.sh   (see transactions.md; about a minute)
# One line per run; exit status 1 if any run differs from what is expected, 2 if a tool is missing.
missing=; for tool in spin gcc; do command -v $tool >/dev/null || missing="$missing $tool"; done
if [ "$missing" ]; then echo "transactions.sh: needs${missing}: install what is missing (Debian, Ubuntu: apt install spin gcc)" >&2; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; bad=0
one() { # one WANT(pass|fail) NAME flags...
  want=$1 name=$2; shift 2; cd "$work" && cp "$here/transactions.pml" . && rm -f pan*
  spin -a "$@" transactions.pml >spin.out 2>&1 || { cat spin.out; exit 1; }
  gcc -O1 -w -DSAFETY -DNOREDUCE -DCOLLAPSE -o pan pan.c && ./pan -m200000 -w24 >pan.out 2>&1
  err=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.out); states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out | head -1)
  got=pass; [ "$err" = 0 ] || got=fail; grep -q 'max search depth\|out of memory' pan.out && got=INCOMPLETE
  verdict=ok; [ $got = $want ] || { verdict=UNEXPECTED; bad=1; }
  why=; [ $got = pass ] || why=$(grep -om1 'assertion violated.*\|invalid end state' pan.out | cut -c1-60)
  printf '%-10s %-44s %-4s %10s states  %s | %s\n' $verdict "$name" $got "$states" "$*" "$why"
}
one pass 'two messages, three faults'              -DN=2 -DF=3
one pass 'three messages, two faults'              -DN=3 -DF=2
one pass 'room for two messages'                   -DN=3 -DF=2 -DCAP=2
# false invariants: each must be violated, or the model never goes there
one fail 'a member learns of its loss'             -DREACH=1
one fail 'an old snapshot is refused'              -DREACH=2
one fail 'a partition leaves before the commit'    -DREACH=3
one fail 'a commit arrives after a loss of answer' -DREACH=4
one fail 'an unknown commit had an effect'         -DREACH=5
one fail 'an unknown commit had no effect'         -DREACH=6
one fail 'the end'                                 -DREACH=7
# a step left out
one fail 'outputs sent again without a look'       -DX_NOLOOKUP -DN=2
one fail 'the generation of the moment'            -DX_FRESH -DX_NOCHECK -DN=2
one fail 'a start without a wait for transactions' -DX_UNSTABLE -DN=2
one fail 'a set that loses stored messages'        -DX_SHRINK
exit $bad
