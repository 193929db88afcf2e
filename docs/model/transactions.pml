/* Transactions that commit outputs with positions; see transactions.md.  Run by transactions.sh.
   One partition with N messages of different keys, each with one output.  Two processes with one transactional id each.
   A mask has the bit of each covered message.  The metadata has room for CAP messages above the floor.
   The coordinator of the transactions aborts a transaction when its time is over, or when a producer starts with its id.
   Properties (asserted):
     O  once: no output is visible twice
     T  together: an output is visible if and only if the stored position covers its message
   Faults (F in all): a rebalance, a kill, a lost answer to a commit, a transaction that reaches its timeout. */
#ifndef N
#define N 3
#endif
#ifndef CAP
#define CAP 1
#endif
#ifndef F
#define F 3
#endif
#define ALL ((1<<N)-1)
#define NONE 255
#define BIT(m,i) (((m)>>(i))&1)
#ifdef REACH
#define SEEN(k) if :: REACH==(k) -> assert(0) :: else fi
#define HOLDS(p) skip        /* only the searched state may end the search */
#else
#define SEEN(k) skip
#define HOLDS(p) assert(p)
#endif
byte flt = F;
/* the group, and its stored position */
byte gen = 1, owner, stored, twice, visible;
/* the coordinator, by transactional id: its epoch, and the open transaction with its outputs and its position */
byte ce[2]; bool open[2], offs[2]; byte outs[2], toff[2];
/* requests to commit on their way (epoch + 1), and their answers: 1 = committed, 2 = refused */
byte air[2], ans[2];
/* a process: whether it owns the partition, the generation of its snapshot, finished and stored messages as it knows */
bool has[2]; byte sg[2], done[2], base[2];
/* its transaction: the snapshot, the position, the outputs; and the epoch of its producer */
byte ep[2], tsg[2], tcov[2], touts[2];
mtype = { IDLE, SENT, OFFSETS, COMMIT, FATAL, INIT };
mtype ph[2] = FATAL;         /* a process first starts its producer */
byte cov, above, i;

/* The position of a commit: the floor, the lowest CAP finished messages above it, and all that was stored before. */
inline cover(p) {
  cov = 0; i = 0;
  do :: i<N && BIT(done[p],i) -> cov = cov | (1<<i); i++ :: else -> break od;
  above = 0;
  do
  :: i>=N -> break
  :: else ->
    if
#ifndef X_SHRINK
    :: BIT(base[p],i) -> cov = cov | (1<<i); above++
    :: !BIT(base[p],i) && BIT(done[p],i) && above<CAP && !(base[p]>>i) -> cov = cov | (1<<i); above++
#else
    :: BIT(done[p],i) && above<CAP -> cov = cov | (1<<i); above++
#endif
    :: else -> skip
    fi; i++
  od; above = 0; i = 0
}
inline aborted(p) { open[p] = 0; offs[p] = 0; outs[p] = 0; toff[p] = 0 }
#define CURRENT(p) (has[p] && tsg[p]==sg[p])
#ifdef X_UNSTABLE
#define STABLE 1
#else
#define STABLE (!offs[0] && !offs[1])
#endif
#ifdef X_FRESH
#define FENCED(p) 0
#else
#define FENCED(p) (tsg[p]!=gen)
#endif
#ifdef X_NOCHECK
#define OURS(p) 1
#else
#define OURS(p) CURRENT(p)
#endif

inline step(p) {
  if
  /* ownership */
  :: atomic { owner==p && sg[p]!=gen && STABLE ->
       has[p] = 1; sg[p] = gen; done[p] = stored; base[p] = stored }
  :: atomic { has[p] && sg[p]!=gen -> has[p] = 0; SEEN(1) }
  /* a handler ends */
  :: atomic { has[p] && done[p]!=ALL ->
       if
       :: !BIT(done[p],0) -> done[p] = done[p] | 1
       :: N>1 && !BIT(done[p],1) -> done[p] = done[p] | 2
       :: N>2 && !BIT(done[p],2) -> done[p] = done[p] | 4
       fi }
  /* a transaction */
  :: atomic { ph[p]==IDLE && has[p] -> cover(p);
       if
       :: (cov & (ALL-base[p]))==0 -> cov = 0
       :: else -> tcov[p] = cov; touts[p] = cov & (ALL-base[p]); tsg[p] = sg[p]; cov = 0;
          if :: ep[p]==ce[p] -> open[p] = 1; outs[p] = touts[p]; ph[p] = SENT :: else -> ph[p] = FATAL fi
       fi }
  :: atomic { ph[p]==SENT ->
       if
       :: ep[p]!=ce[p] -> ph[p] = FATAL
       :: ep[p]==ce[p] && (FENCED(p) || !OURS(p)) -> aborted(p); ph[p] = IDLE; SEEN(2)
       :: else -> offs[p] = 1; toff[p] = tcov[p]; ph[p] = OFFSETS
       fi }
  :: atomic { ph[p]==OFFSETS ->
       if
       :: !OURS(p) -> if :: ep[p]==ce[p] -> aborted(p); ph[p] = IDLE; SEEN(3) :: else -> ph[p] = FATAL fi
       :: else -> air[p] = ep[p]+1; ans[p] = 0; ph[p] = COMMIT
       fi }
  :: atomic { air[p]!=0 ->
       if
       :: air[p]==ce[p]+1 && open[p] ->
            twice = twice | (visible & outs[p]); visible = visible | outs[p];
            if :: offs[p] -> stored = toff[p] :: else fi;
            aborted(p); ans[p] = 1; if :: ph[p]!=COMMIT -> SEEN(4) :: else fi;
            HOLDS(twice==0); HOLDS(visible==stored)
       :: else -> ans[p] = 2
       fi; air[p] = 0 }
  :: atomic { ph[p]==COMMIT && ans[p]==1 ->
       if :: CURRENT(p) -> base[p] = tcov[p] :: else fi; ph[p] = IDLE; ans[p] = 0 }
  :: atomic { ph[p]==COMMIT && ans[p]==2 -> ph[p] = FATAL; ans[p] = 0 }
  :: atomic { ph[p]==FATAL ->
       aborted(p); ce[p]++; ep[p] = ce[p]; ph[p] = INIT }
  :: atomic { ph[p]==INIT && STABLE ->
#ifndef X_NOLOOKUP
       if :: CURRENT(p) -> if :: (stored & touts[p]) -> SEEN(5) :: else -> SEEN(6) fi; base[p] = stored :: else fi;
#endif
       ph[p] = IDLE }
  /* faults */
  :: atomic { flt && ph[p]==COMMIT -> flt--; ph[p] = FATAL; ans[p] = 0 }
  :: atomic { flt && open[p] -> flt--; aborted(p); ce[p]++ }
  :: atomic { flt -> flt--; has[p] = 0; sg[p] = 0; done[p] = 0; base[p] = 0; tsg[p] = NONE; ph[p] = FATAL; ans[p] = 0 }
  :: atomic { flt -> flt--; gen++; owner = p }
  :: atomic { flt==0 && stored==ALL && ph[0]==IDLE && ph[1]==IDLE -> SEEN(7); break }
  fi
}
active proctype world() {
  do
  :: step(0)
  :: step(1)
  od
}
