#!/bin/bash
# Runs the model of ring ranges:  bash docs/model/ranges.sh [big]   (see ranges.md; about two minutes, big: ten)
# One line per run; exit status 1 if any run differs from what is expected, 2 if a tool is missing.
missing=; for tool in spin gcc; do command -v $tool >/dev/null || missing="$missing $tool"; done
if [ "$missing" ]; then echo "ranges.sh: needs${missing}: install what is missing (Debian, Ubuntu: apt install spin gcc)" >&2; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; bad=0
one() { # one WANT(pass|fail) NAME flags...
  want=$1 name=$2; shift 2; cd "$work" && cp "$here/ranges.pml" . && rm -f pan*
  spin -a "$@" ranges.pml >spin.out 2>&1 || { cat spin.out; exit 1; }
  gcc -O1 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=4096 -o pan pan.c && ./pan -m200000 -w24 >pan.out 2>&1
  err=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.out); states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out | head -1)
  got=pass; [ "$err" = 0 ] || got=fail; grep -q 'max search depth\|out of memory' pan.out && got=INCOMPLETE
  verdict=ok; [ $got = $want ] || { verdict=UNEXPECTED; bad=1; }
  why=; [ $got = pass ] || why=$(grep -om1 'assertion violated.*' pan.out | cut -c1-60)
  printf '%-10s %-34s %-4s %10s states  %s | %s\n' $verdict "$name" $got "$states" "$*" "$why"
}
if [ "$1" = big ]; then
one pass 'stores between, one fault'           -DF=1 -DCHECKPOINTS
one pass 'three slots, one fault'              -DN=1 -DS=3 -DF=1
exit $bad
fi
# the protocol
one pass 'two assignments'                     -DMV=2;        one pass 'one fault'                    -DF=1
one pass 'two faults, one message a slot'      -DN=1 -DF=2;   one pass 'three assignments, one fault' -DN=1 -DMV=3 -DF=1
one pass 'three slots'                         -DN=1 -DS=3;   one pass 'three members'                -DN=1 -DM=3
# false invariants: each must be violated, or the model never goes there
one fail 'a moved part is stored'              -DF=1 -DREACH=1;  one fail 'a store of a former owner'    -DF=1 -DREACH=2
one fail 'a cancelled handler ends'            -DF=1 -DREACH=3;  one fail 'a claim comes too late'       -DF=1 -DREACH=4
one fail 'a drain ends by a later epoch'       -DF=1 -DREACH=5;  one fail 'a drain ends by an expiry'    -DF=1 -DREACH=6
one fail 'a part moves while its owner runs'   -DF=1 -DREACH=7;  one fail 'a lease expires'              -DF=1 -DREACH=8
one fail 'a process is killed'                 -DF=1 -DREACH=9;  one fail 'a split during a drain'       -DN=1 -DS=3 -DREACH=10
one fail 'rest'                                -DF=1 -DREACH=11
# a step changed or left out
one fail 'fed before the drain'                -DX_FEDBEFORE;              one fail 'an expiry is never judged'       -DMV=1 -DN=1 -DF=1 -DX_NOEXPIRY
one fail 'a later epoch does not end a drain'  -DF=1 -DX_NOEPOCHRULE;      one fail 'released while handlers run'     -DF=1 -DX_RELEASEEARLY
one fail 'moved while handlers run'            -DF=1 -DX_EARLYMOVE;        one fail 'a store without the epoch'       -DF=1 -DCHECKPOINTS -DX_NOFENCE
one fail 'a moved part without its drain'      -DF=1 -DX_NOENTRY;          one fail 'a part that was not looked at'   -DN=1 -DS=3 -DX_ALLENTRIES
one fail 'a split without the finished set'    -DF=1 -DCHECKPOINTS -DX_NOCOPY;           one fail 'a second split forgets the drain' -DN=1 -DS=3 -DX_NOCHAIN
one fail 'a release stores its own row only'   -DF=1 -DX_OWNROWONLY
exit $bad
