#!/bin/bash
# Runs the model of a change of width:  bash docs/model/widths.sh   (see widths.md; about half a minute)
# One line per run; exit status 1 if any run differs from what is expected, 2 if a tool is missing.
missing=; for tool in spin gcc; do command -v $tool >/dev/null || missing="$missing $tool"; done
if [ "$missing" ]; then echo "widths.sh: needs${missing}: install what is missing (Debian, Ubuntu: apt install spin gcc)" >&2; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; bad=0
one() { # one WANT(pass|fail) NAME flags...
  want=$1 name=$2; shift 2; cd "$work" && cp "$here/widths.pml" . && rm -f pan*
  spin -a "$@" widths.pml >spin.out 2>&1 || { cat spin.out; exit 1; }
  gcc -O1 -w -DSAFETY -DNOREDUCE -DCOLLAPSE -o pan pan.c && ./pan -m60000 -w22 >pan.out 2>&1
  err=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.out); states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out | head -1)
  got=pass; [ "$err" = 0 ] || got=fail; grep -q 'max search depth\|out of memory' pan.out && got=INCOMPLETE
  verdict=ok; [ $got = $want ] || { verdict=UNEXPECTED; bad=1; }
  why=; [ $got = pass ] || why=$(grep -om1 'assertion violated.*' pan.out | cut -c1-60)
  printf '%-10s %-34s %-4s %10s states  %s | %s\n' $verdict "$name" $got "$states" "$*" "$why"
}
# the runbook
one pass 'grow'                          -DF=1;             one pass 'shrink'                      -DSHRINK -DF=1
one pass 'grow, three kills'             -DF=3 -DG=1 -DMOMENT
one pass 'shrink, three kills'           -DSHRINK -DF=3 -DG=1 -DMOMENT
# false invariants: each must be violated, or the model never goes there
one fail 'a producer is killed'          -DREACH=1;         one fail 'a worker is killed'          -DREACH=2
one fail 'a removal'                     -DSHRINK -DREACH=4; one fail 'the end of a growth'        -DREACH=5
one fail 'rest'                          -DREACH=6
# in the right order, only the request of a killed producer that arrives after the wait leads to a refusal
one fail 'a removal is refused'          -DSHRINK -DAIR -DREACH=3
# another order, or a step left out
one fail 'grow: producers first'         -DX_PRODUCERSFIRST; one fail 'grow: one group of two'     -DX_ONEGROUP
one fail 'shrink: workers first'         -DSHRINK -DX_WORKERSFIRST
one fail 'shrink: one producer left'     -DSHRINK -DX_ONEPRODUCER
one fail 'shrink: without the wait'      -DSHRINK -DX_NOWAIT
one fail 'removal: one group of two'     -DSHRINK -DX_OWNGROUP
one fail 'removal: unchecked'            -DSHRINK -DX_WORKERSFIRST -DX_NOCHECK
# a fault that no order excludes: a request of a killed producer arrives after the wait
one fail 'shrink: late request'          -DSHRINK -DAIR
exit $bad
