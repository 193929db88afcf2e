#!/bin/bash
# Runs the cohort model:  bash docs/model/cohort.sh [reach|check|mutants|big]...   (default: all but big; see README.md)
# One line per run; exit status 1 if any run differs from what is expected, 2 if a tool is missing.
missing=; for tool in spin gcc; do command -v $tool >/dev/null || missing="$missing $tool"; done
if [ "$missing" ]; then echo "cohort.sh: needs${missing}: install what is missing (Debian, Ubuntu: apt install spin gcc)" >&2; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; bad=0
one() { # one WANT(pass|fail) NAME flags...
  want=$1 name=$2; shift 2; cd "$work" && cp "$here/cohort.pml" . && rm -f pan*
  spin -a "$@" cohort.pml >spin.out 2>&1 || { cat spin.out; exit 1; }
  if [ "$NP" ]; then gcc -O2 -w -DNP -DNOREDUCE -DCOLLAPSE -DVECTORSZ=2048 -o pan pan.c && run="./pan -l -m60000 -w24"
  else gcc -O2 -w -DSAFETY -DNOREDUCE ${XC:--DCOLLAPSE} -DVECTORSZ=2048 -o pan pan.c && run="./pan -m60000 -w${W:-24}"; fi
  t0=$SECONDS; $run >pan.out 2>&1; t1=$SECONDS
  err=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' pan.out); states=$(sed -n 's/ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out | head -1)
  got=pass; [ "$err" = 0 ] || got=fail; grep -q 'max search depth\|out of memory' pan.out && got=INCOMPLETE
  verdict=ok; [ $got = $want ] || { verdict=UNEXPECTED; bad=1; }
  why=; [ $got = pass ] || why=$(grep -om1 'assertion violated.*\|non-progress cycle' pan.out | cut -c1-78)
  printf '%-10s %-26s %-4s %10s states %3d s  depth %-5s %s | %s\n' $verdict "$name" $got "$states" $((t1 - t0)) "$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' pan.out)" "$*" "$why"
}
reach() { # false invariants: each must be violated, or the model never goes there
  one fail 'late holder overlaps'   -DF=1 -DMOVES=2 -DREACH=1;  one fail 'unfenced overlap, skew'   -DF=1 -DNOMARGIN -DREACH=16
  one fail 'unfenced ov., regress'  -DF=0 -DBL=1 -DBLK=2 -DREACH=16
  one fail 'repeat after a fault'   -DREACH=2;  one fail 'dedupe hit' -DREACH=3;  one fail 'late garbage swept' -DF=2 -DCK=0 -DREACH=4
  one fail 'self-takeover'          -DREACH=6;  one fail 'takeover of a takeover' -DF=2 -DCK=0 -DREACH=7
  one fail 'stale state write'      -DREACH=8;  one fail 'verify refuses' -DREACH=9
  one fail 'wq create refused'      -DF=2 -DCK=0 -DRET=1 -DREACH=10;   one fail 'zombie ends late' -DREACH=11
  one fail 'holes in the done-set'  -DF=2 -DCK=0 -DREACH=12;           one fail 'two keys at once' -DF=0 -DREACH=13
  one fail '503 tells the loss'     -DMOVES=2 -DREACH=14;       one fail 'the end is reached' -DREACH=15
  one fail 'old ack before delete'  -DREACH=17;                 one fail 'acquire on a stale plan' -DF=0 -DMOVES=2 -DREACH=18
  one fail 'checkpoint written'     -DF=0 -DREACH=19;           one fail 'checkpoint comes late' -DREACH=20
  one fail 'start in self-takeover' -DREACH=21;                 one fail 'epoch name conflict' -DF=2 -DCK=0 -DP_UNFENCED -DPROPS=0 -DEPSRC=1 -DREACH=5
  one fail 'a drain is forced'      -DREACH=22;                 one fail 'and a handler does not end' -DREACH=23
  one fail 'another owner in the wait' -DF=0 -DBL=2 -DREACH=29
  R='-DRULES -DN=1 -DCK=0'
  one fail 'a plan by new rules'    $R -DF=0 -DREACH=24;        one fail 'another plan came first'    $R -DKINDS=3 -DREACH=25
  one fail 'a member is upgraded'   $R -DKINDS=1 -DREACH=26;    one fail 'old code joins the new'     $R -DKINDS=1 -DREACH=27
  one fail 'the end with both codes' $R -DF=0 -DREACH=28
}
check() {
  for r in 0 1 2; do
    one pass 'clean (d)'       -DRET=$r -DF=0 -DN=4 -DMOVES=2;  one pass 'one fault, all kinds' -DRET=$r -DF=1 -DMOVES=2
    one pass 'skew, no margin' -DRET=$r -DF=1 -DNOMARGIN;       one pass 'bucket lost'          -DRET=$r -DF=0 -DBL=1 -DBLK=1
    one pass 'two checkpoints' -DRET=$r -DF=1 -DCK=2
    one pass 'bucket lost twice' -DRET=$r -DF=0 -DBL=2 -DN=2 -DCK=0
    one pass 'bucket regress'  -DRET=$r -DF=0 -DBL=1 -DBLK=2;   one pass 'drain = running only' -DRET=$r -DF=1 -DALT_NOPREFIX
    NP=1; one pass 'no cycle (c)(g)' -DRET=$r -DF=1;            one pass 'no cycle, bucket lost' -DRET=$r -DF=0 -DBL=1
    one pass 'no cycle, lost twice' -DRET=$r -DF=0 -DBL=2 -DN=1 -DCK=0; NP=
  done
  one pass 'plan rules (j)'        -DRULES -DN=1 -DCK=0 -DKINDS=3;   one pass 'plan rules, 3 members' -DRULES -DN=1 -DCK=0 -DMEM=3 -DF=0
  NP=1; one pass 'no cycle of plans' -DRULES -DN=1 -DCK=0 -DKINDS=1; NP=
}
mutants() {
  # the protocol as first planned: one step put back at a time
  one fail 'epoch+1 in the TTL key'     -DP_ONEKEY -DEPSRC=0;          one fail 'same, above consumers (wq)' -DP_ONEKEY -DEPSRC=1 -DRET=1
  one fail 'delete first + TTL key'     -DP_ONEKEY -DP_DELFIRST -DF=2 -DCK=0 -DKINDS=3 -DPROPS=64
  one fail 'delete first (interest)'    -DP_DELFIRST -DRET=2
  one fail 'wq without dedupe'          -DP_NODEDUPE -DF=0 -DRET=1;    one fail 'interest without dedupe' -DP_NODEDUPE -DF=0 -DRET=2
  one fail 're-pull after lost delivery' -DP_NOGAP -DKINDS=16;         one fail 'renewal unknown = loss' -DP_RENEWUNK -DKINDS=4
  one fail 'no verify (f)'              -DP_NOVERIFY;                  one fail 'no verify, skew (e)' -DP_NOVERIFY -DNOMARGIN -DPROPS=8
  one fail 'no verify (wq)'             -DP_NOVERIFY -DRET=1 -DF=2 -DCK=0 -DN=2
  one fail 'unfenced state write'       -DP_UNFENCED;                  one fail 'no grace, bucket lost' -DP_NOGRACE -DF=0 -DBL=1
  one fail 'epoch from consumers (wq)'  -DEPSRC=1 -DRET=1 -DF=0 -DBL=1; one fail 'bare revision, regress' -DP_REVONLY -DF=0 -DBL=1 -DBLK=2
  one fail 'one wait for two losses'    -DX_ONEWAIT -DF=0 -DBL=2 -DN=2 -DCK=0
  one fail 'revision restarts'          -DP_REVRESTART -DBL=1 -DCK=0
  # mutants
  one fail 'no barrier (b)'             -DX_NOBARRIER -DKINDS=1 -DPROPS=2; one fail 'restart adopts its lease' -DX_ADOPT -DKINDS=1 -DPROPS=2
  one fail 'pull before delete (e)'     -DX_PULLFIRST -DPROPS=8;       one fail 'epoch not bumped, upsert' -DX_NOBUMP -DP_UPSERT
  NP=1; one fail 'epoch not bumped, strict' -DX_NOBUMP; NP=
  one fail 'release before drain'       -DX_RELFIRST -DF=0;            XC=-DBFS; one fail 'take without waiting' -DX_NOWAIT -DCUT -DF=0 -DN=2 -DPROPS=1; XC=
  for r in 0 1 2; do one fail 'done-set not written' -DX_NODONE -DF=0 -DRET=$r; done
  one fail 'watch as loss signal'       -DX_WATCH -DPROPS=1;           one fail 'renew after loss' -DX_RENEWLOST -DCUT -DKINDS=2 -DPROPS=1
  one fail 'unknown acquire = mine'     -DX_IGNUNK -DP_UNFENCED -DP_NOVERIFY -DKINDS=4; one fail 'unknown release = go on' -DX_RESUME -DMOVES=2
  one fail 'delete any other epoch'     -DX_DELANY;                one fail 'checkpoint unfenced (i)'   -DX_CKUNFENCED
  one fail 'checkpoint behind the next' -DX_STALESAVE -DKINDS=4 -DCK=2
  one fail 'checkpoint behind the last' -DX_STALESAVE -DKINDS=4;      one fail 'forced while it runs'  -DX_RELRUNNING -DKINDS=64
  R='-DRULES -DN=1 -DCK=0'
  NP=1; one fail 'own rules'        $R -DX_OWNRULES -DF=0;          one fail 'highest rules alive' $R -DX_HIGHEST -DF=0
  one fail 'new rules for good'     $R -DX_STICKY -DKINDS=1;        NP=
}
big() {
  for r in ${RETS:-0 1 2}; do
    one pass 'two faults'          -DRET=$r -DF=2;                     one pass '4 messages, 2 moves' -DRET=$r -DF=1 -DN=4 -DMOVES=2
    one pass '3 members'           -DRET=$r -DF=1 -DN=2 -DMEM=3 -DMOVES=2;       one pass 'two faults, skew' -DRET=$r -DF=2 -DNOMARGIN
    one pass 'bucket lost + fault' -DRET=$r -DF=1 -DBL=1 -DBLK=1;      one pass 'regress + fault' -DRET=$r -DF=1 -DBL=1 -DBLK=2
  done
  [ "$RETS" ] || { one pass 'three crashes, lapses' -DF=3 -DN=2 -DKINDS=3; 
    XC=-DBITSTATE W=33; one pass '2 slots, real plan' -DS=2 -DPURE -DMOVES=0 -DN=1 -DF=1 -DKINDS=1; XC= W=; }
}
for what in ${@:-reach check mutants}; do $what; done; exit $bad
