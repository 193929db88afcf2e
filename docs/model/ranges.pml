/* Ring ranges on the PostgreSQL log: pieces of the ring that move and split, with a mandatory drain; see ranges.md.
   Run by ranges.sh.  One partition of the log.  S slots with N messages each; message i of slot s is bit i*S+s of a mask.
   M members, P pieces.  A piece is a row of the database: its slots, the member that the map names, an epoch, the
   finished messages, and at most one *drain*: the piece that it was split from, and the epoch of that piece's owner.
   Budgets: MV assignments, F faults (a crash, or a lease that expires under a running process).
   Properties (asserted):
     E  no two owners handle messages of one slot at once, expired owners apart
     D  a message that a row lists as finished never starts again, and no write takes a finished message out of a row
     R  without a fault, no message runs twice
     U  a member claims a piece only while the map names it
     T  when nothing more can happen, every message of an assigned slot is finished, and every drain has ended */
#ifndef M
#define M 2
#endif
#ifndef P
#define P 3
#endif
#ifndef S
#define S 2
#endif
#ifndef N
#define N 2
#endif
#ifndef MV
#define MV 2
#endif
#ifndef F
#define F 0
#endif
#define NOBODY M
#define STALE (M+1)              /* the session of a process that was killed: the server still holds its locks */
#define ALL ((1<<S)-1)
#if N==1
#define MASK(x) (x)
#else
#define MASK(x) ((x)|((x)<<S))
#endif
#define IN(m,p) ((m)*P+(p))
#ifdef REACH
#define SEEN(k) if :: REACH==(k) -> assert(0) :: else fi
#else
#define SEEN(k) skip
#endif
/* the database */
byte slots[P], named[P], epoch[P], done[P], from[P], since[P], lock[P];
/* the members: claimed epoch (0: none), slots that they feed, slots that have moved away, finished messages */
bool has[M*P], leave[M*P];
byte mine[M*P], fed[M*P], gone[M*P], known[M*P];
byte busy[M], zombie[M], ran;
/* one request of each member on its way: 1 store, 2 store of moved slots, 3 store before a release */
byte kind[M], rp[M], re[M], rs[M], rv[M];
byte clearing[M];                /* the piece whose drain a member ends, plus 1: it holds the lock of the parent */
byte moves = MV, faults = F, used;
bool dead[M];                    /* a process that was killed and never starts again */

#define LIVE(m) (busy[m] & ~zombie[m])
#define LOCKED(p) (lock[p]!=NOBODY)
inline forget(m,p) { has[IN(m,p)]=0; leave[IN(m,p)]=0; mine[IN(m,p)]=0; fed[IN(m,p)]=0; gone[IN(m,p)]=0; known[IN(m,p)]=0 }
inline apply(m) { /* a request arrives at the database */
  if
  :: kind[m]>=2 ->                /* the rows of moved slots, and with a release the row of the piece in the same transaction */
     i = 0;
     do
     :: i<P ->
        if
#ifdef X_NOENTRY
        :: i!=rp[m] && slots[i]!=0 && (slots[i] & ~rs[m])==0 ->
#elif defined(X_ALLENTRIES)
        :: since[i]!=0 && since[i]==re[m] && from[i]==rp[m] ->
#else
        :: since[i]!=0 && since[i]==re[m] && from[i]==rp[m] && (slots[i] & ~rs[m])==0 ->
#endif
           assert((done[i] & MASK(slots[i]) & ~rv[m])==0);                                        /* D */
           done[i] = (done[i] & ~MASK(slots[i])) | (rv[m] & MASK(slots[i])); since[i] = 0; SEEN(1)
        :: else
        fi; i++
     :: else -> break
     od
  :: else
  fi;
  if
  :: kind[m]!=2 ->
     if
#ifdef X_NOFENCE
     :: true ->
#else
     :: epoch[rp[m]]==re[m] ->
#endif
        assert((done[rp[m]] & MASK(slots[rp[m]]) & ~rv[m])==0);                                   /* D */
        done[rp[m]] = rv[m]
     :: else -> SEEN(2)
     fi
  :: else
  fi; i = 0
}
#define SEND(m,p,k) kind[m]=k; rp[m]=p; re[m]=mine[IN(m,p)]; rs[m]=gone[IN(m,p)]; rv[m]=known[IN(m,p)]

#define START(m,p,s) \
  :: atomic { has[IN(m,p)] && mine[IN(m,p)] && (fed[IN(m,p)] & (1<<s)) && !(busy[m] & MASK(1<<s)) && (MASK(1<<s) & ~known[IN(m,p)]) -> \
     b = ((known[IN(m,p)] & (1<<s)) -> (1<<(S+s)) : (1<<s)); \
     i = 0; do :: i<M -> assert(i==m || !(LIVE(i) & MASK(1<<s))); i++ :: else -> break od; i = 0;           /* E */ \
     do :: i<P -> assert(!((slots[i] & (1<<s)) && (done[i] & b))); i++ :: else -> break od; i = 0;          /* D */ \
     assert(used || !(ran & b)); ran = ran | b; busy[m] = busy[m] | b; b = 0 }                                /* R */
#define FINISH(m,p,s) \
  :: atomic { (busy[m] & MASK(1<<s)) -> b = busy[m] & MASK(1<<s); busy[m] = busy[m] & ~b; \
     if :: zombie[m] & b -> zombie[m] = zombie[m] & ~b; SEEN(3) \
        :: else -> i = 0; do :: i<P -> if :: has[IN(m,i)] && ((fed[IN(m,i)]|gone[IN(m,i)]|(leave[IN(m,i)] -> ALL : 0)) & (1<<s)) -> known[IN(m,i)] = known[IN(m,i)] | b :: else fi; i++ :: else -> break od; i = 0 \
     fi; b = 0 }
#ifdef X_FEDBEFORE
#define DRAINED(p) true
#else
#define DRAINED(p) (since[p]==0)
#endif
#ifdef X_RELEASEEARLY
#define IDLE(m,x) true
#else
#define IDLE(m,x) !(LIVE(m) & MASK(x))
#endif
#ifdef X_EARLYMOVE
#define IDLEMOVED(m,x) true
#else
#define IDLEMOVED(m,x) !(LIVE(m) & MASK(x))
#endif
#ifdef X_NOEPOCHRULE
#define LATER(p) false
#else
#define LATER(p) (epoch[from[p]] > since[p])
#endif
#ifdef X_NOEXPIRY
#define FREE(p) false
#else
#define FREE(p) (lock[from[p]]==NOBODY)
#endif
#ifdef X_OWNROWONLY
#define RELEASED skip
#else
#define RELEASED rs[m]=ALL
#endif
#define PIECE(m,p) \
  :: atomic { named[p]==m && !dead[m] && lock[p]==NOBODY && !has[IN(m,p)] && !(zombie[m] & MASK(slots[p])) -> lock[p]=m; has[IN(m,p)]=1 } \
  :: atomic { has[IN(m,p)] && !mine[IN(m,p)] && named[p]!=m && clearing[m]!=p+1 -> lock[p]=NOBODY; forget(m,p); SEEN(4) } \
  /* claim: one transaction */ \
  :: atomic { has[IN(m,p)] && !mine[IN(m,p)] && named[p]==m && DRAINED(p) && clearing[m]!=p+1 && !kind[m] -> \
     epoch[p]++; mine[IN(m,p)]=epoch[p]; fed[IN(m,p)]=slots[p]; known[IN(m,p)]=done[p]; since[p]=0 } \
  /* end a drain whose owner is gone: a later epoch of the parent, or the parent's lock can be had; the lock of the piece is not needed */ \
  :: atomic { has[IN(m,p)] && !mine[IN(m,p)] && since[p]!=0 && LATER(p) && !clearing[m] -> since[p]=0; SEEN(5) } \
  :: atomic { named[p]==m && !dead[m] && since[p]!=0 && FREE(p) && !has[IN(m,from[p])] && !clearing[m] -> lock[from[p]]=m; clearing[m]=p+1 } \
  :: atomic { clearing[m]==p+1 -> b = from[p]; if :: since[p]!=0 -> since[p]=0; SEEN(6) :: else fi; clearing[m]=0; if :: lock[b]==m && !has[IN(m,b)] -> lock[b]=NOBODY :: else fi; b = 0 } \
  /* look at the map: one read of the row */ \
  :: atomic { mine[IN(m,p)] && !leave[IN(m,p)] && (named[p]!=m || (fed[IN(m,p)] & ~slots[p])) -> \
     gone[IN(m,p)] = gone[IN(m,p)] | (fed[IN(m,p)] & ~slots[p]); fed[IN(m,p)] = fed[IN(m,p)] & slots[p]; \
     if :: named[p]!=m -> leave[IN(m,p)]=1 :: else fi } \
  :: atomic { mine[IN(m,p)] && gone[IN(m,p)] && IDLEMOVED(m,gone[IN(m,p)]) && !kind[m] -> SEND(m,p,2); SEEN(7) } \
  :: atomic { leave[IN(m,p)] && !gone[IN(m,p)] && IDLE(m,fed[IN(m,p)]) && !kind[m] -> SEND(m,p,3); RELEASED; fed[IN(m,p)]=0 } \
  CHECKPOINT(m,p)
#ifdef CHECKPOINTS
#define CHECKPOINT(m,p) :: atomic { mine[IN(m,p)] && !leave[IN(m,p)] && !kind[m] && epoch[p]==mine[IN(m,p)] && (known[IN(m,p)] & ~done[p]) -> SEND(m,p,1) }
#else
#define CHECKPOINT(m,p)
#endif
inline lose(m) { /* the session has ended: its locks are free, its deadline has passed before */
  i = 0;
  do :: i<P -> if :: lock[i]==m -> lock[i]=NOBODY :: else fi; forget(m,i); i++ :: else -> break od; i = 0;
  zombie[m] = busy[m]; clearing[m]=0
}
inline crash(m) {
  i = 0;
  do :: i<P -> if :: lock[i]==m -> lock[i]=STALE :: else fi; forget(m,i); i++ :: else -> break od; i = 0;
  zombie[m]=0; busy[m]=0; clearing[m]=0
}
proctype Member(byte m) {
  byte i, b;
  end: do
  START(m,0,0) START(m,0,1)
  PIECE(m,0) PIECE(m,1) PIECE(m,2)
  START(m,1,0) START(m,1,1) START(m,2,0) START(m,2,1)
  FINISH(m,0,0) FINISH(m,0,1)
#if S>2
  START(m,0,2) START(m,1,2) START(m,2,2) FINISH(m,0,2)
#endif
  /* the answer to the request */
  :: atomic { kind[m] && (kind[m] & 8)==0 -> apply(m);
     if
     :: mine[IN(m,rp[m])]!=re[m] || re[m]==0 -> skip           /* the member has lost the piece meanwhile */
     :: else ->
        if
        :: kind[m]==2 -> gone[IN(m,rp[m])] = gone[IN(m,rp[m])] & ~rs[m]
        :: kind[m]==3 -> lock[rp[m]]=NOBODY; b = rp[m]; forget(m,b); b = 0
        :: else
        fi
     fi; kind[m]=0; rp[m]=0; re[m]=0; rs[m]=0; rv[m]=0 }
  :: atomic { faults>0 -> faults--; used=1; lose(m); SEEN(8) }
  :: atomic { faults>0 -> faults--; used=1; crash(m); if :: true :: dead[m]=1 fi; SEEN(9) }
  od
}
proctype Server() { /* ends the sessions of killed processes */
  end: do
  :: atomic { lock[0]==STALE -> lock[0]=NOBODY }
  :: atomic { lock[1]==STALE -> lock[1]=NOBODY }
  :: atomic { lock[2]==STALE -> lock[2]=NOBODY }
  od
}
#define PARENT(p,q) \
        if :: since[p]!=0 -> assert(epoch[p]==0); CHAIN(p,q) \
           :: else -> if :: epoch[p]!=0 -> from[q]=p; since[q]=epoch[p] :: else fi \
        fi
#ifdef X_NOCHAIN
#define CHAIN(p,q) skip
#else
#define CHAIN(p,q) from[q]=from[p]; since[q]=since[p]; SEEN(10)
#endif
#ifdef X_NOCOPY
#define COPY(p,q) skip
#else
#define COPY(p,q) done[q]=done[p]
#endif
#define SPLIT(p,q,x) :: slots[q]==0 && (slots[p] & (x)) && (slots[p] & ~(x)) && ((x) & ~slots[p])==0 -> \
        slots[p] = slots[p] & ~(x); slots[q] = x; COPY(p,q); PARENT(p,q); r = q
#define MOVE(p) :: slots[p]!=0 -> r = p
proctype Map() {
  byte r;
  end: do
  :: atomic { moves>0 -> moves--;
     if
     MOVE(0) MOVE(1) MOVE(2)
     SPLIT(0,1,1) SPLIT(0,1,2) SPLIT(0,2,1) SPLIT(0,2,2) SPLIT(1,2,1) SPLIT(1,2,2) SPLIT(2,1,1) SPLIT(2,1,2)
#if S>2
     SPLIT(0,1,4) SPLIT(0,1,6) SPLIT(0,1,3) SPLIT(0,1,5) SPLIT(0,2,4) SPLIT(1,2,4)
#endif
     fi;
     if :: named[r]=0 :: named[r]=1
#if M>2
        :: named[r]=2
#endif
     fi; r = 0 }
  od
}
#define FULL(p) (slots[p]==0 || named[p]==NOBODY || dead[named[p]] || \
   (since[p]==0 && ((done[p]|known[IN(named[p],p)]) & MASK(slots[p]))==MASK(slots[p])))
proctype Rest() {
  end: do
  :: timeout -> SEEN(11); assert(FULL(0) && FULL(1) && FULL(2)); break                         /* T */
  od
}
init { atomic {
  byte i = 0;
  do :: i<P -> named[i]=NOBODY; lock[i]=NOBODY; i++ :: else -> break od;
  slots[0]=ALL; named[0]=0;
  run Map(); run Server(); run Rest(); run Member(0); run Member(1);
#if M>2
  run Member(2);
#endif
} }
