/* A change of the number of partitions of a queue, and its runbook; see widths.md.  Run by widths.sh.
   Physical queue 0 belongs to both numbers, physical queue 1 to the larger number only.  Groups G (default 2), each with
   WPG workers; PR producers; N messages a producer.  Processes are killed and started again F times, with the number
   that was last deployed to them.  The operator may give the change up after every step, and a step takes any time.
   SHRINK: 2 -> 1, else 1 -> 2.  Properties (asserted):
     S  stranded: at rest, no message lies in a queue that its group has not finished and does not read
     L  lost: no queue is removed while a message in it is unfinished by some group
   With -DMOMENT, S holds at every moment and not only at rest. */
#ifndef G
#define G 2
#endif
#ifndef WPG
#define WPG 2
#endif
#ifndef PR
#define PR 2
#endif
#ifndef N
#define N 2
#endif
#ifndef F
#define F 1
#endif
#define W (G*WPG)
#ifdef SHRINK
#define OLD 2
#define NEW 1
#else
#define OLD 1
#define NEW 2
#endif
byte pw[PR], ww[W];          /* the number deployed to each producer and worker */
byte pr[PR], wr[W];          /* the number with which it runs; 0 = it is down */
byte sent[PR];
byte log1, log0;             /* messages in the logs of physical queue 1 and 0 */
byte pos1[G], pos0[G];       /* positions of the groups */
byte air;                    /* requests of producers on their way to queue 1 */
bool there1 = (OLD==2), over, refused;
byte flt = F;
#define DEPLOYS(g,n) (ww[(g)*WPG]==(n) || ww[(g)*WPG+WPG-1]==(n))
#define READS(g) (DEPLOYS(g,2))                  /* some worker of the group is to read queue 1 */
#define LIVE(g) (wr[(g)*WPG]==2 || wr[(g)*WPG+WPG-1]==2)
#define LEFT(g) (pos1[g]<log1)
#if G>1
#define FINISHED (!LEFT(0) && !LEFT(1))
#define UNREAD (!LIVE(0) && !LIVE(1))
#define ALLREAD (LIVE(0) && LIVE(1))
#define STRANDED ((LEFT(0) && !READS(0)) || (LEFT(1) && !READS(1)))
#else
#define FINISHED (!LEFT(0))
#define UNREAD (!LIVE(0))
#define ALLREAD (LIVE(0))
#define STRANDED (LEFT(0) && !READS(0))
#endif
#ifdef REACH
#define SEEN(k) if :: REACH==(k) -> assert(0) :: else fi
#define HOLDS(p) skip        /* only the searched state may end the search */
#else
#define SEEN(k) skip
#define HOLDS(p) assert(p)
#endif
/* a message goes to any physical queue of the number with which its producer runs */
proctype Producer(byte p) {
end: do
 :: d_step { pr[p]!=0 && sent[p]<N -> sent[p]++; log0++ }
 :: d_step { pr[p]==2 && sent[p]<N && there1 -> sent[p]++;
#ifdef AIR
      air++ }
#else
      log1++ }
#endif
 :: d_step { pr[p]==0 && pw[p]!=0 -> pr[p]=pw[p] }                       /* starts again with what is deployed */
 :: d_step { pr[p]!=0 && flt>0 -> flt--; pr[p]=0; SEEN(1) }              /* kill -9 */
 od }
proctype Worker(byte w) { byte g = w/WPG;
end: do
 :: d_step { wr[w]!=0 && pos0[g]<log0 -> pos0[g]++ }
 :: d_step { wr[w]==2 && there1 && LEFT(g) -> pos1[g]++ }
 :: d_step { wr[w]==0 -> wr[w]=ww[w] }
 :: d_step { wr[w]!=0 && flt>0 -> flt--; wr[w]=0; SEEN(2) }
 od }
proctype Net() {
end: do
 :: d_step { air>0 -> air--; if :: there1 -> log1++ :: else -> HOLDS(0) fi }
 od }
#define GIVEUP if :: over=1; goto out :: skip fi
#define DEPLOY_P(p,n) d_step { pw[p]=n; pr[p]=0 }
#define DEPLOY_W(w,n) d_step { ww[w]=n; wr[w]=0 }
#define WORKERS(n) i=0; do :: i<W -> DEPLOY_W(i,n); GIVEUP; i++ :: else -> break od
#define PRODUCERS(n) i=0; do :: i<PR -> DEPLOY_P(i,n); GIVEUP; i++ :: else -> break od
proctype Operator() { byte i;
#ifdef SHRINK
 #if defined(X_WORKERSFIRST)
  WORKERS(NEW); PRODUCERS(NEW);
 #else
  #ifdef X_ONEPRODUCER
  DEPLOY_P(0,NEW); GIVEUP;
  #else
  PRODUCERS(NEW);
  #endif
  #ifndef X_NOWAIT
   #ifdef X_OWNGROUP
  !LEFT(0);                                      /* looks at one group only */
   #else
  FINISHED;
   #endif
  #endif
  GIVEUP; WORKERS(NEW);
 #endif
 GIVEUP;
 #ifndef X_NOCHECK
  #ifdef X_OWNGROUP
  if :: LEFT(0) -> refused=1 :: !LEFT(0) ->
  #else
  if :: atomic { (!FINISHED || !UNREAD) -> refused=1; SEEN(3) } :: atomic { FINISHED && UNREAD ->
  #endif
 #else
  if :: atomic { 1 ->
 #endif
       there1=0; SEEN(4); HOLDS(FINISHED)       /* L */
 #ifdef X_OWNGROUP
  fi;
 #else
  } fi;
 #endif
#else
 there1=1; GIVEUP;
 #ifdef X_PRODUCERSFIRST
  PRODUCERS(NEW); WORKERS(NEW);
 #else
  #ifdef X_ONEGROUP
  i=0; do :: i<WPG -> DEPLOY_W(i,NEW); GIVEUP; i++ :: else -> break od; LIVE(0);
  #else
  WORKERS(NEW);
   #ifndef X_NOLOOK
  ALLREAD;                                       /* the command shows: every group reads the added queue */
   #endif
  #endif
  GIVEUP; PRODUCERS(NEW);
 #endif
#endif
 over=1; SEEN(5);
out: skip }
proctype Monitor() {
  timeout; SEEN(6); HOLDS(!STRANDED);            /* S */
  HOLDS(pos0[0]==log0)
}
#ifdef MOMENT
/* the stronger property of the right order: a message never lies, even for a moment, where no worker is to read it */
proctype Moment() { do :: assert(!STRANDED) od }
#endif
init { atomic { byte k;
  k=0; do :: k<PR -> pw[k]=OLD; pr[k]=OLD; run Producer(k); k++ :: else -> break od;
  k=0; do :: k<W -> ww[k]=OLD; wr[k]=OLD; run Worker(k); k++ :: else -> break od;
#ifdef AIR
  run Net();
#endif
#ifdef MOMENT
  run Moment();
#endif
  run Operator(); run Monitor() } }
